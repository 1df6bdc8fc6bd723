"""All stages on one CUDA device, in every mode of `run_once.py`, against answers stored on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
MODES = (
    "fp32-eager-v2",
    "fp32-graphs-v2",
    "bf16-eager-v2",
    "bf16-graphs-v2",
    "bf16-graphs-v2-native-rotary",
    "fp32-eager-v1",
    "bf16-graphs-v1",
)


def run_once(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`run_once.py` with its output captured."""
    command = [sys.executable, HERE / "run_once.py", *arguments]
    return subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_mode(mode: str) -> None:
    done = run_once("--modes", mode)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.engine
def test_the_script_knows_these_modes() -> None:
    assert tuple(run_once("--list").stdout.split()) == MODES


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["cpu", "cpu-compiled", "cpu-v2-compiled"])
def test_without_a_gpu(mode: str) -> None:
    """The script works; thinker and talker can be compiled, and rows are exported from a compiled thinker.

    With "v2", the model runner is the one that CUDA has, on kernels that Triton interprets, and the thinker's scheduler
    is ahead of it. `tests/processes/v2_suite.py` has that runner without compilation.
    """
    done = run_once("--modes", mode)
    assert done.returncode == 0, done.stdout + done.stderr
