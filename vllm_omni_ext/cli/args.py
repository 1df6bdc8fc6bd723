"""The command line of `vllm serve MODEL --omni`: vLLM's own parser plus one group of flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import vllm
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import VLLM_SUBCMD_PARSER_EPILOG
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni_ext.config.checks import AUTO
from vllm_omni_ext.config.schema import OmniConfig, keys

GROUP = "OmniConfig"

EXPLICIT = "omni_explicit"
"""Name in the parsed arguments of the set of those the user gave (on the command line or in `--config`)."""

SETTINGS = {
    "async_chunk": "async_chunk",
    "omni_allow_private_media": "allow_private_media",
    "omni_api_key_routes": "api_key_routes",
    "omni_cluster_secret_file": "cluster_secret_file",
    "omni_drain_timeout": "drain_timeout_s",
    "omni_heartbeat_timeout": "heartbeat_timeout_s",
    "omni_lb_policy": "lb_policy",
    "omni_log_dir": "log_dir",
    "omni_master_address": "master_address",
    "omni_master_port": "master_port",
    "omni_max_body": "max_body_mib",
    "omni_verbose": "verbose",
    "omni_no_cluster_secret": "no_cluster_secret",
    "omni_replica_wait": "replica_wait_s",
    "omni_request_deadline": "request_deadline_s",
    "omni_restart_limit": "restart_limit",
    "omni_shutdown_timeout": "shutdown_timeout_s",
    "omni_startup_timeout": "startup_timeout_s",
    "api_servers": "api_servers",
}
"""Argument -> key of `OmniConfig` that it sets."""


class OmniServe(ServeSubcommand):
    """`vllm serve` with the flags of this package; every stock flag keeps its meaning, for the text stage."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        """Build the stock parser and add the group."""
        parser = super().subparser_init(subparsers)
        for action in parser._actions:
            if action.dest == "api_server_count":
                action.type = _count_or_auto
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
    given = frozenset(vars(parser.parse_args(words))) - {"subparser"}
    if "api_server_count" in given:
        args.api_servers, given = args.api_server_count, given | {"api_servers"}
        if args.api_server_count == AUTO:  # which vLLM's own checks do not know
            args.api_server_count = None
    setattr(args, EXPLICIT, given)
    args.omni = True
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


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
    group.add_argument("--omni-api-key-routes", metavar="all|vllm", help=text["api_key_routes"])
    group.add_argument("--omni-allow-private-media", metavar="HOST,NETWORK", help=text["allow_private_media"])
    group.add_argument("--omni-log-dir", metavar="DIR", help=text["log_dir"])
    group.add_argument("--omni-verbose", action="store_true", help=text["verbose"])
    _add_pools(group, text)
    _add_members(group, text)


def _add_pools(group: argparse._ArgumentGroup, text: Mapping[str, str]) -> None:
    """Flags about replicas: which is next, which is lost."""
    group.add_argument("--omni-lb-policy", metavar="NAME", help=text["lb_policy"])
    group.add_argument("--omni-heartbeat-timeout", type=float, metavar="SECONDS", help=text["heartbeat_timeout_s"])
    group.add_argument("--omni-drain-timeout", type=float, metavar="SECONDS", help=text["drain_timeout_s"])
    group.add_argument("--omni-replica-wait", type=float, metavar="SECONDS", help=text["replica_wait_s"])
    group.add_argument("--omni-restart-limit", type=int, metavar="N", help=text["restart_limit"])


def _add_members(group: argparse._ArgumentGroup, text: Mapping[str, str]) -> None:
    """Flags about replicas on several hosts; `--headless` itself is vLLM's."""
    group.add_argument("--omni-master-address", "-oma", metavar="HOST", help=text["master_address"])
    group.add_argument("--omni-master-port", "-omp", type=int, metavar="PORT", help=text["master_port"])
    group.add_argument("--omni-cluster-secret-file", metavar="FILE", help=text["cluster_secret_file"])
    group.add_argument("--omni-no-cluster-secret", action="store_true", help=text["no_cluster_secret"])
    group.add_argument(
        "--stage",
        metavar="NAME",
        help="Run this stage only: on the head the one that answers text, with --headless any.",
    )
    group.add_argument("--stage-id", type=int, metavar="N", help="As --stage, by its place in the pipeline from 0.")
    group.add_argument(
        "--omni-dp-size-local",
        type=int,
        default=1,
        metavar="N",
        help="How many replicas of that stage this process starts.",
    )
    group.add_argument(
        "--omni-replica-address",
        "-ora",
        metavar="HOST",
        help="Address of this host under which the head reaches it, with --headless. Left out: found by routing.",
    )
    group.add_argument("--replica-id", type=int, metavar="N", help="Ignored: the head gives replicas their numbers.")
