"""The command line `python -m benchmarks [NAME ...] [--json FILE] [--html FILE] [--markdown FILE]`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from benchmarks.tool import html, markdown
from benchmarks.tool.description import Options, ProgramFailed
from benchmarks.tool.environment import busy, environment
from benchmarks.tool.results import BadReport, Environment, Report, Result, decode, encode
from benchmarks.tool.suite import BENCHMARKS


class BadName(ValueError):
    """A benchmark of this name does not exist; the message lists the existing ones."""


def chosen(names: Sequence[str]) -> list[ModuleType]:
    """Return the modules (`benchmarks.tool.suite`) of the named benchmarks, each once; without names, of all.

    Raises:
        BadName: there is no benchmark of a name.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], BENCHMARKS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise BadName(f"no benchmark {', '.join(unknown)}{meant} There are: {', '.join(BENCHMARKS)}")
    return [module for name, module in BENCHMARKS.items() if not names or name in names]


def missing(module: ModuleType, where: Environment) -> str | None:
    """Return the reason why a benchmark does not fit the machine; None if it does."""
    needed = module.DESCRIPTION.memory_gib
    if where.memory_gib >= needed:
        return None
    return f"needs {needed:g} GiB of memory; this machine has {where.memory_gib:g}"


def one(module: ModuleType, options: Options) -> Result:
    """Run one benchmark; return its result, with `failed` set if its program has failed, so that others still run."""
    began = time.monotonic()
    try:
        result: Result = module.run(options)
    except (ProgramFailed, BadReport, KeyError, ValueError) as error:
        result = Result(module.DESCRIPTION.name, failed=f"{type(error).__name__}: {error}")
    result.seconds = round(time.monotonic() - began, 1)
    return result


def measure(names: Sequence[str], options: Options, keep: Callable[[Report], None] = lambda report: None) -> Report:
    """Run benchmarks one after the other, and return the report.

    Args:
        names: benchmarks to run, also on a machine with too little memory; empty: all that fit the machine.
        keep: called with the report after each benchmark, because a run of all takes long.
    """
    modules, where = chosen(names), environment()
    report = Report(where, options.model, options.quick)
    in_use: list[float] = []
    for module in modules:
        name = module.DESCRIPTION.name
        reason = None if names else missing(module, where)
        if reason is not None:
            report.left_out[name] = reason
            continue
        print(f"{name}: {module.DESCRIPTION.compares}", file=sys.stderr, flush=True)
        in_use.append(busy())
        report.results.append(one(module, options))
        after = round(os.getloadavg()[0], 2)
        report.environment = msgspec.structs.replace(where, load=[*where.load, after], busy=list(in_use))
        keep(report)
    return report


def listed() -> str:
    """Return a line for every benchmark: its name, its subject and its baseline."""
    each = (module.DESCRIPTION for module in BENCHMARKS.values())
    return "\n".join(f"{d.name:<16}{d.compares}; compared with {d.baseline}" for d in each)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs benchmarks, and writes pages.")
    made.add_argument("names", nargs="*", metavar="NAME", help="default: all that fit this machine")
    made.add_argument("--list", action="store_true", help="say what there is")
    made.add_argument("--model", help="directory of a checkpoint; default: a tiny random one")
    made.add_argument("--quick", action="store_true", help="smallest sizes, to try it out; the figures say nothing")
    made.add_argument("--from", dest="source", type=Path, metavar="FILE", help="make pages of this JSON, run nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every sample")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write a page for docs/")
    return made


def report_of(args: argparse.Namespace) -> Report:
    """Return the report in the file of `--from`; without `--from`, run the benchmarks and return their report."""
    if args.source is None:
        return measure(args.names, Options(args.model, args.quick), lambda report: write_json(args, report))
    if args.names:
        raise BadName("--from makes pages of a run that is over: leave out the names")
    try:
        return decode(args.source.read_bytes())
    except OSError as error:
        raise BadReport(f"--from {args.source}: {error.strerror}") from error
    except BadReport as error:
        raise BadReport(f"--from {args.source}: {error}") from error


def write_json(args: argparse.Namespace, report: Report) -> None:
    """Write the report to the file of `--json`, if it is set."""
    if args.json is not None:
        args.json.write_bytes(encode(report))


def check_targets(args: argparse.Namespace) -> None:
    """Raise BadReport if the folder of an output file does not exist; called before a run, which takes long."""
    for path in (args.json, args.html, args.markdown):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadReport(f"{path}: there is no folder {path.parent}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run benchmarks, or read a report, and write the pages.

    Returns:
        The exit status: 0, 1 if a benchmark failed, 2 for bad options.
    """
    args = parser().parse_args(argv)
    if args.list:
        print(listed())
        return 0
    try:
        check_targets(args)
        report = report_of(args)
    except (BadName, BadReport) as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    write_json(args, report)
    report = decode(encode(report))  # as in the file, so pages made from the file are the same
    if args.html is not None:
        args.html.write_text(html.page(report), encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(markdown.page(report), encoding="utf-8")
    print(markdown.figures(report))
    return 1 if any(result.failed for result in report.results) else 0
