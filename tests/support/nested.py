"""Suites that need a process of their own: a network namespace, or another environment when vLLM is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support import preloaded
from tests.support.capabilities import ISOLATED


def run_suite(
    suite: Path | str, *arguments: str, timeout_s: float, isolated: bool = True, config: pytest.Config | None = None
) -> None:
    """Run pytest on a file in another process; all that pytest prints is printed here too.

    Args:
        suite: the file, or one test of it as pytest names tests.
        arguments: more of pytest's options.
        timeout_s: for machines that other programs keep busy.
        isolated: only loopback can be reached; needs the capability `isolation`.
        config: of the outer run. Where its `-m` leaves out tests marked `extended`, the suite does so too.

    Raises:
        AssertionError: a test failed, or none passed.
    """
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    if config is not None and "not extended" in config.option.markexpr:
        options += ["-m", "not extended"]
    words = [*preloaded.PYTEST, *options, *arguments, str(suite)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            code = _run(words, log, isolated, timeout_s)
        finally:
            output = log.read_text(errors="replace")
            print(output)
    assert code == 0, f"{suite}: pytest ended with exit code {code}; its output is below"
    assert " passed" in output


def _run(words: list[str], log: Path, isolated: bool, timeout_s: float) -> int:
    """Run pytest with its output in `log`; returns the exit status."""
    process: subprocess.Popen[bytes] | preloaded.Started | None = None
    if isolated and preloaded.current is not None:
        process = preloaded.current.start(words, log, isolated=True)
    if process is None:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*(ISOLATED if isolated else ()), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=preloaded.for_a_suite(os.environ),
            )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        raise
