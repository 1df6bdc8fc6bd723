"""All stages on one CUDA device, in every mode of `run_once.py`, compared with answers stored on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.run_once import MODES
from tests.support.capabilities import ISOLATED, needs


def check(mode: str, *wrapper: str) -> None:
    """Run the script in one mode."""
    command = [*wrapper, sys.executable, str(Path(__file__).with_name("run_once.py")), "--modes", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_answers_on_a_gpu_are_the_stored_ones(mode: str) -> None:
    if MODES[mode].connector:
        needs(f"library {MODES[mode].connector}")
    check(mode)


@pytest.mark.engine
@pytest.mark.extended
@pytest.mark.parametrize("mode", ["cpu", "cpu-compiled", "cpu-v2-compiled"])
def test_answers_on_a_cpu_are_the_stored_ones(mode: str) -> None:
    """Thinker and talker can be compiled, and rows are exported from a compiled thinker.

    With "v2", the model runner is the one that CUDA has, on kernels that Triton interprets, and the thinker's scheduler
    is ahead of it. `tests/processes/v2_suite.py` has that runner without compilation.
    """
    check(mode)


@pytest.mark.engine
@pytest.mark.extended
def test_answers_with_prompts_computed_apart_are_the_stored_ones() -> None:
    """As on a GPU; `tests/processes/test_prefill_decode.py` has the other library, and failures."""
    needs("library nixl", "isolation")
    check("cpu-nixl", *ISOLATED)
