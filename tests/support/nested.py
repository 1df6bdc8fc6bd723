"""Suites that need a process of their own: a network namespace, or another environment when vLLM is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.capabilities import ISOLATED


def run_suite(
    suite: Path | str,
    *arguments: str,
    timeout_s: float,
    isolated: bool = True,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run pytest on a file in another process; all that pytest prints is printed here too.

    Args:
        suite: the file, or one test of it as pytest names tests.
        arguments: more of pytest's options.
        timeout_s: for machines that other programs keep busy.
        isolated: only loopback can be reached; needs the capability `isolation`.
        environment: variables beside those of this process.

    Raises:
        AssertionError: a test failed, or none passed.
        subprocess.TimeoutExpired: the suite took too long.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, str(suite)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [*(ISOLATED if isolated else ()), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**variables, **(environment or {})},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        print(output)
        raise
    print(output)
    assert process.returncode == 0, f"{suite}: pytest ended with exit code {process.returncode}; its output is below"
    assert " passed" in output
