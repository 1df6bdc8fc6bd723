"""Parses the command line of `vllm serve MODEL --omni` with vLLM's parser and an additional group of flags."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import vllm
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.exceptions import VLLMError
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import import_plugin

from vllm_omni_ext.config.checks import AUTO
from vllm_omni_ext.config.schema import SETTINGS
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.engine_args import DATA_PARALLEL, NOT_SUPPORTED
from vllm_omni_ext.vllm_hooks import VLLM_SUBCMD_PARSER_EPILOG

GROUP = "OmniConfig"

EXPLICIT = "omni_explicit"
"""Attribute of the parsed arguments: the names of the arguments that are set on the command line or in `--config`."""

FLAGS: Mapping[str, str] = {
    "--async-chunk" if key == "async_chunk" else "--omni-" + re.sub("_(s|mib)$", "", key).replace("_", "-"): key
    for key, (_, about) in SETTINGS.items()
    if about.metavar is not None
}
"""Key of the configuration by the flag that sets it, e.g. `--omni-max-body` for `limits.max_body_mib`: the flag's name
is the key without its group and unit."""

_TYPES: Mapping[str | None, Any] = {"SECONDS": float, "MIB": int, "N": int, "PORT": int}
"""Types of flags by their metavar. Flags with another metavar have the type str."""

_SHORT = {"--omni-master-address": ["-oma"], "--omni-master-port": ["-omp"]}

KEYS = {flag[2:].replace("-", "_"): key for flag, key in FLAGS.items()} | {"api_servers": "api_servers"}
"""Key of the configuration by the name of the argument (an attribute of the parsed arguments) that sets the key."""


class _Parser(FlexibleArgumentParser):
    """vLLM's parser. Its error text about an unknown flag also contains the most similar flag in `known`."""

    known: Collection[str] = ()

    def error(self, message: str) -> Any:
        """Print the usage and the message, and exit."""
        if message.startswith("unrecognized arguments:"):
            given = [word.partition("=")[0].replace("_", "-") for word in message.split() if word.startswith("--")]
            near = [match for name in given for match in difflib.get_close_matches(name, self.known, n=1, cutoff=0.75)]
            message += f"; did you mean {', '.join(near)}?" if near else ""
        super().error(message)


class OmniServe(ServeSubcommand):
    """`vllm serve` with the flags of this package. vLLM's flags apply to the frontend, the stage that writes text."""

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> FlexibleArgumentParser:
        """Return vLLM's parser of `serve`, extended by this package's group of flags."""
        parser = super().subparser_init(subparsers)
        for action in parser._actions:
            if action.dest == "api_server_count":
                action.type = _count_or_auto
        _add_group(parser)
        return parser


def parse_serve(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `serve MODEL ...` (the word `serve` can be omitted) as vLLM's own `main` does.

    Returns:
        The arguments, with one more attribute, `omni_explicit`: the names of the arguments that the user has set. A
        second parse without defaults finds them, so a flag that is set to its default value is included.
    """
    words = list(argv) if argv[:1] == ["serve"] else ["serve", *argv]
    parser = _Parser(description="vLLM CLI", epilog=VLLM_SUBCMD_PARSER_EPILOG.format(subcmd="[subcommand]"))
    parser.add_argument("-v", "--version", action="version", version=vllm.__version__)
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    command = OmniServe()
    serve = command.subparser_init(subparsers)
    parser.known = [flag for flag in serve._option_string_actions if flag.startswith("--")]
    args = parser.parse_args(words)
    for action in serve._actions:
        action.default = argparse.SUPPRESS
    given = frozenset(vars(parser.parse_args(words))) - {"subparser"}
    if "api_server_count" in given:
        args.api_servers, given = args.api_server_count, given | {"api_servers"}
        if args.api_server_count == AUTO:  # vLLM's own checks do not accept it
            args.api_server_count = None
    setattr(args, EXPLICIT, given)
    args.omni = True
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


class _Once(argparse.Action):
    """Stores the value of a flag that may be written once, and whose value is not empty.

    A dotted flag, e.g. `--stage-overrides.talker.replicas 2`, counts as the flag: vLLM's parser makes JSON of it.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"{option_string}: is written twice; keep one with the values of both (also of dotted flags)")
        if not values:
            parser.error(f"{option_string}: must not be empty; leave it out")
        setattr(namespace, self.dest, values)


def _add_group(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group(
        title=GROUP,
        description="Multi-stage models: stock flags apply to the frontend; these are about all stages.",
    )
    group.add_argument("--omni", action="store_true", help="Run the model as a pipeline of stages.")
    group.add_argument(
        "--stage-config",
        "--stage-configs-path",
        "--deploy-config",
        action=_Once,
        metavar="FILE|NAME",
        help="Stage config: a YAML file, or the name of one that comes with the model's plugin.",
    )
    group.add_argument(
        "--stage-overrides",
        action=_Once,
        metavar="JSON",
        help='Settings by stage over those of the stage config: {"STAGE": {"replicas": 2, "max_num_seqs": 4}}.',
    )
    for flag, key in FLAGS.items():
        _, about = SETTINGS[key]
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if about.metavar:
            options = {"type": _TYPES.get(about.metavar, str), "metavar": about.metavar}
        group.add_argument(flag, *_SHORT.get(flag, ()), help=about.text, **options)
    _add_members(group)


def _add_members(group: argparse._ArgumentGroup) -> None:
    """Add the flags for replicas on several hosts. The flag `--headless` is vLLM's."""
    group.add_argument(
        "--stage",
        metavar="NAME",
        help="Run replicas of this stage only; on the head those of all others join from elsewhere.",
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


_REPLICAS = (
    'stages are replicated, not data-parallel; write --stage-overrides \'{{"{stage}": {{"replicas": 2}}}}\' '
    "or replicas in a stage config (docs/operations.md, Data parallelism)"
)
_HOST = "a replica runs on one host; remove it"

REFUSED: Mapping[str, tuple[frozenset[object], str]] = {
    "grpc": (frozenset({False}), "only the HTTP server is available; remove it"),
    "grpc_port": (frozenset({None}), "only the HTTP server is available; remove it"),
    "runner": (frozenset({"auto", "generate"}), "the stages choose their own runner; remove it"),
    "convert": (frozenset({"auto", "none"}), "the stages choose their own; remove it"),
    "device_ids": (
        frozenset({None}),
        'write --stage-overrides \'{{"{stage}": {{"devices": "0"}}}}\' or devices in a stage config',
    ),
    "master_addr": (frozenset({"127.0.0.1"}), "the head's address is another flag; write --omni-master-address"),
    "master_port": (frozenset({29501}), "the head's port is another flag; write --omni-master-port"),
    "nnodes": (frozenset({1}), _HOST),
    "node_rank": (frozenset({0}), _HOST),
    **{name: (frozenset({harmless}), _REPLICAS) for name, harmless in DATA_PARALLEL.items()},
    **{name: (frozenset({harmless}), advice) for name, (harmless, advice) in NOT_SUPPORTED.items()},
    "enable_fault_tolerance": (frozenset({False}), "a lost replica is handled by its pool; remove it"),
}
"""vLLM's arguments that are refused with `--omni`: (values that have no effect and are accepted; error text)."""

RUST_SERVER = "VLLM_USE_RUST_FRONTEND"
"""Environment variable with which vLLM starts its HTTP server in Rust."""

_HEADLESS_SERVERS = (None, 0, 1)
"""Values of `--api-server-count` that are accepted with `--headless`: unset, vLLM's 0, and this package's default."""


def check_flags(args: argparse.Namespace, given: Collection[str], *, frontend: str) -> None:
    """Refuse vLLM's flags in `REFUSED`, flags of API servers with `--headless`, and vLLM's HTTP server in Rust.

    Args:
        given: names of the arguments that the user has set.
        frontend: name of the stage that writes text, for the advice in error messages.

    Raises:
        ConfigError: a flag in `given` is refused; the message starts with the flag and its value. Or the environment
            variable `RUST_SERVER` is refused; the message starts with its name.
    """
    names = REFUSED.keys() & set(given)
    if args.headless and args.api_server_count not in _HEADLESS_SERVERS:
        raise ConfigError(f"--api-server-count {args.api_server_count}: --headless starts no API server; remove it")
    if args.headless and args.omni_playground:
        raise ConfigError("--omni-playground: --headless starts no API server; remove it")
    if not args.headless and os.environ.get(RUST_SERVER, "0") != "0":
        raise ConfigError(f"{RUST_SERVER}: with --omni the HTTP server is vLLM's in Python; unset it")
    for name in sorted(names):
        harmless, advice = REFUSED[name]
        value = getattr(args, name)
        if isinstance(value, list) or value not in harmless:
            written = "" if value is True else f" {value}"
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}{written}: with --omni {advice.format(stage=frontend)}")


def check_chat(args: argparse.Namespace) -> None:
    """Refuse a chat template that cannot be read, and parsers that neither vLLM nor a plugin on the command line has.

    Plugins with parsers are imported, as in vLLM's own start of a server.

    Raises:
        ConfigError: the message starts with the flag.
    """
    try:
        load_chat_template(args.chat_template)
    except (OSError, ValueError, VLLMError) as err:
        raise ConfigError(f"--chat-template: {' '.join(str(err).split())}") from err
    parsers: Mapping[str, Any] = {"tool_call": ToolParserManager, "reasoning": ReasoningParserManager}
    for kind, manager in parsers.items():
        flag, name = f"--{kind.replace('_', '-')}-parser", getattr(args, f"{kind}_parser")
        if not name:
            continue
        if plugin := args.tool_parser_plugin if kind == "tool_call" else args.reasoning_parser_plugin:
            import_plugin(plugin)
        if name not in (known := manager.list_registered()):
            close = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(known)}"
            raise ConfigError(f"{flag} {name}: vLLM has no such parser; {advice}")
