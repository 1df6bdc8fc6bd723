"""`benchmarks/speech_levels.py`: the released shape on a CUDA device; without one, its settings and figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vllm_omni_ext.cli import settings as settings_module
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args
from vllm_omni_ext.topology.machine import Machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LEVELS = (1, 4, 8, 16, 32)
GIB = 1 << 30
TIMEOUT_S = 900


@pytest.fixture
def module(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The program as a module."""
    return benchmark("speech_levels")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_released_shape_speaks_faster_than_real_time(module: ModuleType, tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    if total < sum(module.NEEDED_GIB.values()) * GIB:
        pytest.skip("the released shape does not fit onto this device")
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "speech_levels.py"), "--levels", *map(str, LEVELS), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    reported = json.loads(file.read_text())
    assert [level["concurrency"] for level in reported] == list(LEVELS)
    for level in reported:
        assert level["answers"] == 4 * level["concurrency"] and level["sound_per_s"] > 1


@pytest.mark.slow
def test_the_stages_fit_onto_one_device(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = module.engine_settings(LEVELS, device_bytes=79 * GIB)
    stages = settings["stage_overrides"]
    assert sum(stage["engine"]["gpu_memory_utilization"] for stage in stages.values()) < 1
    flags = module.as_flags(settings)
    assert flags[flags.index("--load-format") + 1] == "dummy"
    assert json.loads(flags[flags.index("--stage-overrides") + 1]) == stages
    one_device = Machine(platform="cuda", device_count=1, cpu_count=16, memory_bytes=128 * GIB)
    monkeypatch.setattr(settings_module, "detect_machine", lambda: one_device)
    plan = settings_module.from_kwargs(str(write_qwen3_omni(tmp_path / "model", released_shape=True)), **settings)
    for stage in plan.stages:
        args = stage_engine_args(plan, stage.replicas[0].id)
        dtype = "float32" if stage.name == "code2wav" else "bfloat16"
        assert (args.load_format, args.dtype, args.max_num_seqs) == ("dummy", dtype, 32)
        assert args.gpu_memory_utilization == pytest.approx(module.NEEDED_GIB[stage.name] / 79, abs=1e-3)
        assert args.kv_cache_memory_bytes == module.CACHE_BYTES.get(stage.name)
        assert args.enforce_eager is (stage.name == "code2wav")
        assert stage.replicas[0].devices == (0,)


def test_figures_of_answers_and_levels(module: ModuleType) -> None:
    spoken = importlib.import_module("spoken")
    pieces = {10.5: 1.0, 11.0: 1.0, 13.5: 0.5, 13.6: 0.5}
    listener = spoken.Listener(iter([10.0, *pieces, 14.0]).__next__)
    for seconds in pieces.values():
        listener.hear(seconds)
    answer = listener.end()
    assert (answer.first_s, answer.whole_s, answer.sound_s) == pytest.approx((0.5, 4.0, 3.0))
    assert answer.late_s == pytest.approx(1.0), "silent from 12.5 to 13.5"
    with pytest.raises(ValueError, match="no sound"):
        spoken.Listener().end()
    level = module.Level(3, 6.0, [spoken.Answer(0.1 * number, 2.0, 4.0) for number in (1, 2, 3)])
    made = level.figures()
    assert (made["first_p50_s"], made["first_max_s"]) == pytest.approx((0.2, 0.3))
    assert (made["requests_per_s"], made["sound_per_s"], made["real_time_factor_p50"]) == pytest.approx((0.5, 2.0, 0.5))
    assert "goal: first sound below 200 ms; missed at 3" in list(module.table([level]))
