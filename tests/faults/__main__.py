"""Makes the faults of the table, each in a copy of this repository, and runs the tests that must fail.

    .venv/bin/python -m tests.faults                       all faults, two at a time (half an hour)
    .venv/bin/python -m tests.faults --suite quick         those that `make quick` finds
    .venv/bin/python -m tests.faults NAME ...              some of them
    .venv/bin/python -m tests.faults --tests PATH NAME     other tests than those of the table

Exit status 1: a fault was not found, or a test fails without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.table import ROOT, Fault, read
from tests.support.sharing import with_each

MARKS = {"quick": "not engine and not extended and not slow", "test": "not extended", "all": ""}
"""Tests that a suite runs, as an expression for pytest's `-m`."""

PASSED, FAILED = 0, 1
"""Exit statuses of pytest. All others mean that it could not run the tests."""


def main() -> int:
    """Run the faults that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all, if none is named")
    parser.add_argument("--suite", choices=("quick", "test", "all"), help="only faults of this suite")
    parser.add_argument("--tests", action="append", metavar="PATH", help="tests to run instead of the table's")
    parser.add_argument("--sound", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time, each in a copy of its own (2)")
    options = parser.parse_args()
    faults = {fault.name: fault for fault in read()}
    if unknown := set(options.names) - faults.keys():
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [faults[name] for name in options.names] or list(faults.values())
    chosen = [fault for fault in chosen if options.suite in (None, fault.suite)]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copies = [Path(folder) / f"copy-{job}" for job in range(min(options.jobs, len(chosen)))]
        return run(chosen, copies, options.tests, sound=options.sound)


def run(faults: list[Fault], copies: list[Path], tests: list[str] | None, *, sound: bool) -> int:
    """Run the tests of all faults without a fault, then with each of them; returns the exit status."""
    for copy in copies:
        copy_repository(copy)
    if not sound and (failing := fails_without_a_fault(faults, copies, tests)):
        print(f"These tests fail without a fault: {' '.join(failing)}")
        return 1

    def is_found(fault: Fault, copy: Path) -> bool:
        began = time.monotonic()
        file = copy / fault.file
        text = file.read_text()
        file.write_text(fault.changed(text))
        status, failed = pytest(copy, tests or fault.tests, "-m", MARKS[fault.suite])
        file.write_text(text)
        found = {PASSED: "MISSED", FAILED: f"found by {failed}"}.get(status, f"pytest ended with {status}")
        print(f"{fault.name} ({fault.suite}, {time.monotonic() - began:.0f} s): {found}", flush=True)
        return status == FAILED

    missed = [fault.name for fault, found in zip(faults, with_each(is_found, faults, copies), strict=True) if not found]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found" + f"; not: {', '.join(missed)}" * bool(missed))
    return 1 if missed else 0


def fails_without_a_fault(faults: list[Fault], copies: list[Path], tests: list[str] | None) -> list[str]:
    """Run the tests of all faults without a fault; returns those of the first suite in which one fails."""
    for suite in sorted({fault.suite for fault in faults}):
        wanted = sorted({test for fault in faults if fault.suite == suite for test in tests or fault.tests})
        if pytest(copies[0], wanted, "-m", MARKS[suite], "-n", str(len(copies))) != (PASSED, ""):
            return wanted
    return []


def pytest(copy: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Run tests in the copy until one fails; returns pytest's exit status and the test that failed."""
    python, quiet = str(copy / ".venv/bin/python"), ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", *quiet, *options, *tests]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    ended = subprocess.run(
        command, cwd=copy, env=clean | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True
    )
    failed = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return ended.returncode, failed[0] if failed else ""


def copy_repository(copy: Path) -> None:
    """Copy all files that git does not ignore, and make an environment that has the copy instead of the original."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    original, environment = Path(sys.prefix), copy / ".venv"
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    link_all(original, environment, original.parent)
    for folder in ("bin", str(packages)):
        link_all(original / folder, environment / folder, original.parent)


def link_all(original: Path, copy: Path, root: Path) -> None:
    """Fill a folder with links to the contents of another; files with paths of `root` are copied and changed."""
    copy.mkdir(parents=True, exist_ok=True)
    for each in original.iterdir():
        if each.name in ("__pycache__", "bin", "lib"):
            continue
        if each.is_symlink():
            (copy / each.name).symlink_to(os.readlink(each))
        elif each.is_file() and (original.name == "bin" or each.name.startswith(("__editable__", "pyvenv"))):
            text = each.read_bytes().replace(os.fsencode(root) + b"/", os.fsencode(copy_root(copy)) + b"/")
            (copy / each.name).write_bytes(text)
            shutil.copymode(each, copy / each.name)
        else:
            (copy / each.name).symlink_to(each)


def copy_root(folder: Path) -> Path:
    """Return the folder that contains the environment of a folder in it."""
    while folder.name != ".venv":
        folder = folder.parent
    return folder.parent


if __name__ == "__main__":
    sys.exit(main())
