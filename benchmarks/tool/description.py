"""The description of a benchmark, and the function that runs its program."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.tool.environment import ROOT

PROGRAMS = ROOT / "benchmarks"
TAIL_LINES = 15


class Description(msgspec.Struct, frozen=True):
    """The description of a benchmark.

    Args:
        compares: what is measured, as text.
        baseline: what the figures are compared with, as text.
        quick, full: sizes of the work with and without `--quick`: option of the program without its dashes -> value.
        memory_gib: least memory of the machine.
        cannot_show: one sentence about facts that the figures do not show.
    """

    name: str
    compares: str
    baseline: str
    quick: Mapping[str, Any]
    full: Mapping[str, Any]
    memory_gib: float
    cannot_show: str

    def sizes(self, options: Options) -> Mapping[str, Any]:
        """Return the sizes of a run: `quick` or `full`."""
        return self.quick if options.quick else self.full


class Options(msgspec.Struct, frozen=True):
    """Options of a run: a model (None: a tiny random one), and whether the sizes are the smallest."""

    model: str | None = None
    quick: bool = False


class ProgramFailed(RuntimeError):
    """A benchmark's program ended with an error; the message has the end of its output."""


def words(sizes: Mapping[str, Any]) -> list[str]:
    """Return the sizes as flags of a program, e.g. ["--rounds", "3"] for {"rounds": 3}."""
    made = []
    for name, value in sizes.items():
        many = value if isinstance(value, (list, tuple)) else [value]
        made += [f"--{name}", *map(str, many)]
    return made


def program(file: str, options: Options, sizes: Mapping[str, Any]) -> Any:
    """Run a program in the folder `PROGRAMS`; return the data that it wrote with `--json`.

    Raises:
        ProgramFailed: the program has failed, or has written no data.
    """
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        model = [] if options.model is None else [options.model]
        command = [sys.executable, str(PROGRAMS / file), *model, *words(sizes), "--json", str(out)]
        with log.open("wb") as printed:
            status = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, check=False
            ).returncode
        if status or not out.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise ProgramFailed(f"{file} ended with status {status}:\n{tail}")
        return json.loads(out.read_text(encoding="utf-8"))
