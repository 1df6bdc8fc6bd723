"""`benchmarks/bagel_steps.py`: it compares the same work, and says what it measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser


def test_one_round(benchmark: Callable[[str], ModuleType], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark("bagel_steps")
    rows: list[int] = []
    step = Denoiser.step

    def counted(self: Denoiser, running: list) -> object:
        rows.append(len(running))
        return step(self, running)

    monkeypatch.setattr(Denoiser, "step", counted)
    options = {"height": 32, "width": 48, "steps": 2, "rounds": 1, "device": "cpu", "dtype": "float32"}
    args = argparse.Namespace(model=checkpoint, released_shape=False, **options)
    made = bench.made(args, "unused")
    assert made.packed(4) > 0
    assert made.one_by_one(4) > 0
    assert rows == [4, 4] + [1] * 8
    ways, parts = bench.measure(made)
    assert {len(values) for values in (*ways.values(), *parts.values())} == {1}
    lines = bench.table(ways, parts, args.steps)
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["1", "2", "4"]
    assert [line.split("|")[1].strip() for line in lines[-3:]] == ["prefill", "steps", "VAE"]


def test_the_table(benchmark: Callable[[str], ModuleType]) -> None:
    bench = benchmark("bagel_steps")
    ways = {
        f"{name} {count}": [seconds]
        for name, seconds in (("packed", 1.0), ("one by one", 2.0), ("plain loop", 4.0))
        for count in (1, 2, 4)
    }
    lines = bench.table(ways, {"prefill": [0.001, 0.003, 0.002]}, 10)
    assert [cell.strip() for cell in lines[0].split("|")[2:5]] == [
        f"{name}, image-steps/s" for name in ("packed", "one by one", "plain loop")
    ]
    assert lines[4] == "| 4 | 40.0 (40.0 to 40.0) | 20.0 (20.0 to 20.0) | 10.0 (10.0 to 10.0) | 0.50 |"
    assert lines[-1] == "| prefill | 2.0 (1.0 to 3.0) |"
