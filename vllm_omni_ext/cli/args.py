"""The command line of `vllm serve MODEL --omni`: vLLM's own parser plus one group of flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import vllm
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_ext.config.schema import OmniConfig, keys

GROUP = "OmniConfig"

EXPLICIT = "omni_explicit"
"""Name in the parsed arguments of the set of those the user gave (on the command line or in `--config`)."""

SETTINGS = {
    "async_chunk": "async_chunk",
    "omni_log_dir": "log_dir",
    "omni_max_body": "max_body_mib",
    "omni_verbose": "verbose",
    "omni_request_deadline": "request_deadline_s",
    "omni_shutdown_timeout": "shutdown_timeout_s",
    "omni_startup_timeout": "startup_timeout_s",
    "api_server_count": "api_servers",
}
"""Argument -> key of `OmniConfig` that it sets."""


class OmniServe(ServeSubcommand):
    """`vllm serve` with the flags of this package; every stock flag keeps its meaning, for the text stage."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        """Build the stock parser and add the group."""
        parser = super().subparser_init(subparsers)
        _add_group(parser)
        return parser


def parse_serve(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `serve MODEL ...` (the word `serve` may be left out) as vLLM's own `main` does.

    The result also has `omni_explicit`: the names of the arguments that were really given. It is found by parsing
    once more without defaults, so that a flag written with its default value counts as given.
    """
    words = list(argv) if argv[:1] == ["serve"] else ["serve", *argv]
    parser = FlexibleArgumentParser(
        description="vLLM CLI", epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="[subcommand]")
    )
    parser.add_argument("-v", "--version", action="version", version=vllm.__version__)
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    command = OmniServe()
    serve = command.subparser_init(subparsers)
    args = parser.parse_args(words)
    for action in serve._actions:
        action.default = argparse.SUPPRESS
    setattr(args, EXPLICIT, frozenset(vars(parser.parse_args(words))) - {"subparser"})
    args.omni = True
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _add_group(parser: FlexibleArgumentParser) -> None:
    text = {name: key.text for name, key in keys(OmniConfig).items()}
    group = parser.add_argument_group(
        title=GROUP,
        description="Multi-stage models: stock flags apply to the stage that answers text; these are about all stages.",
    )
    group.add_argument("--omni", action="store_true", help="Run the model as a pipeline of stages.")
    group.add_argument(
        "--stage-config",
        "--stage-configs-path",
        "--deploy-config",
        metavar="FILE|NAME",
        help="Stage config: a YAML file, or the name of one that comes with the package (e.g. qwen3_omni_replicas).",
    )
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        help='Settings by stage over those of the stage config, e.g. {"talker": {"replicas": 2, "max_num_seqs": 4}}.',
    )
    group.add_argument("--async-chunk", action=argparse.BooleanOptionalAction, help=text["async_chunk"])
    group.add_argument("--omni-startup-timeout", type=float, metavar="SECONDS", help=text["startup_timeout_s"])
    group.add_argument("--omni-shutdown-timeout", type=float, metavar="SECONDS", help=text["shutdown_timeout_s"])
    group.add_argument("--omni-request-deadline", type=float, metavar="SECONDS", help=text["request_deadline_s"])
    group.add_argument("--omni-max-body", type=int, metavar="MIB", help=text["max_body_mib"])
    group.add_argument("--omni-log-dir", metavar="DIR", help=text["log_dir"])
    group.add_argument("--omni-verbose", action="store_true", help=text["verbose"])
