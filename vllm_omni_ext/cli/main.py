"""Entry points of `vllm-omni-ext` and of `vllm ... --omni`. They import only the modules of the selected command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from vllm_omni_ext import __version__
from vllm_omni_ext.errors import OmniError

PROGRAM = "vllm-omni-ext"
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell's command that SIGINT has ended."""

OMNI_FLAG = "--omni"


@dataclass(frozen=True)
class Command:
    """A subcommand of `vllm-omni-ext`.

    Attributes:
        module: module whose `main(argv) -> int` runs the command.
        help: line of the command in the help text.
        checks_vllm: the command does not run with an untested version of vLLM.
        extra: the package's extra that contains further requirements of the command.
    """

    module: str
    help: str
    checks_vllm: bool = False
    extra: str | None = None


COMMANDS = {
    "serve": Command(
        "vllm_omni_ext.cli.serve", "serve a multi-stage model; the same as `vllm serve MODEL --omni`", True
    ),
    "plan": Command("vllm_omni_ext.cli.plan", "show what `serve` would start, and start nothing", True),
    "doctor": Command("vllm_omni_ext.doctor", "check vLLM, patches, entry points and connectors"),
    "tiny": Command("vllm_omni_ext.cli.tiny", "write a tiny random checkpoint to try things with"),
    "bench": Command(
        "vllm_omni_ext.cli.bench", "run vLLM's own benchmarks (`vllm bench`), or spoken answers under load"
    ),
    "eval": Command(
        "vllm_omni_ext.cli.eval", "measure how accurate running servers answer a suite of requests", extra="eval"
    ),
    "run-batch": Command(
        "vllm_omni_ext.cli.run_batch", "send the requests of a file to a server, and write their answers to another"
    ),
    "top": Command("vllm_omni_ext.cli.top", "show the replicas of a running server and how busy they are"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `vllm-omni-ext`, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _parser().print_help(sys.stderr)
        return WRONG_USAGE
    name = _parser().parse_args(words[:1]).command
    try:
        return _run(COMMANDS[name], words[1:])
    except OmniError as err:
        print(f"{PROGRAM} {name}: {err}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM} {name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def vllm_main() -> None:
    """Run a `vllm` command line with `--omni`; called instead of vLLM's `main`. Exits the process on failure."""
    words = [word for word in sys.argv[1:] if word != OMNI_FLAG]
    status = main(words) if words[:1] == ["serve"] or words[:1] == ["--version"] else _refuse(words)
    if status:
        sys.exit(status)


def _run(command: Command, argv: Sequence[str]) -> int:
    if command.checks_vllm:
        from vllm_omni_ext.compat import activate

        activate()
    try:
        module = import_module(command.module)
    except ModuleNotFoundError as err:
        if command.extra is None:
            raise
        raise OmniError(f"{err}; run: pip install 'vllm-omni-ext[{command.extra}]'") from None
    status: int = module.main(argv)
    return status


def _refuse(words: Sequence[str]) -> int:
    command = " ".join(words[:1])
    instead = f"write '{PROGRAM} {command} ...' instead, or " if command in COMMANDS else ""
    print(
        f"vllm {command} {OMNI_FLAG}: only 'vllm serve MODEL {OMNI_FLAG}' exists; "
        f"{instead}leave {OMNI_FLAG} out for vLLM's own command",
        file=sys.stderr,
    )
    return WRONG_USAGE


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Multi-stage (omni-modal) models on stock vLLM.",
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=f"see '{PROGRAM} COMMAND --help'")
    return parser
