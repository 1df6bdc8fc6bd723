"""`vllm-omni-ext tiny FAMILY DIR`: write a tiny random checkpoint for tests and demonstrations."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.registry import families
from vllm_omni_ext.plugins.spec import resolve

Writer = Callable[..., Path]


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, write a tiny checkpoint, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-omni-ext tiny", description="Write a tiny random checkpoint that Transformers and vLLM load."
    )
    models = parser.add_subparsers(required=True, metavar="MODEL")
    for family in families():
        if family.tiny:
            name, writer = family.name.replace("_", "-"), resolve(family.tiny)
            _add_options(models.add_parser(name, help=_first_line(writer), description=_first_line(writer)), writer)
    args = vars(parser.parse_args(argv))
    writer, directory = args.pop("writer"), args.pop("directory")
    try:
        print(writer(directory, **args))
    except OSError as err:
        raise ConfigError(f"DIR {directory}: cannot be written: {err.strerror or err}") from err
    return 0


def _add_options(parser: argparse.ArgumentParser, writer: Writer) -> None:
    """Add an option for each keyword argument of a writer: a flag for a bool, a number for an int.

    A writer is the function with which a model plugin writes a tiny checkpoint (`ModelFamily.tiny`).
    """
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; created if needed")
    for name, parameter in inspect.signature(writer).parameters.items():
        flag, about = "--" + name.replace("_", "-"), _about(writer, name)
        if parameter.default is False:
            parser.add_argument(flag, action="store_true", help=about)
        elif isinstance(parameter.default, int):
            default = parameter.default
            parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{about} (default: {default})")
    parser.set_defaults(writer=writer)


def _first_line(writer: Writer) -> str:
    return (inspect.getdoc(writer) or "").partition("\n")[0]


def _about(writer: Writer, argument: str) -> str:
    """Return the first line of an argument's description in a writer's docstring; it is the help text of the option."""
    found = re.search(rf"^ +{argument}: (.*)$", inspect.getdoc(writer) or "", re.MULTILINE)
    return found.group(1).replace("%", "%%") if found else ""
