"""`benchmarks/speech_levels.py`: the released shape on a CUDA device; without one, that the program works."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from vllm_omni_ext.cli import settings as settings_module
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args
from vllm_omni_ext.topology.plan import Machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LEVELS = (1, 4, 8, 16, 32)
GIB = 1 << 30
TIMEOUT_S = 900


@pytest.fixture
def module(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The program as a module."""
    return benchmark("speech_levels")


def figures(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """What the program reports."""
    command = [sys.executable, str(BENCHMARKS / "speech_levels.py"), *words, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "sglang-omni, one H100, 32 at once: 7.3 requests/s" in done.stdout
    return json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_released_shape(module: ModuleType, tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    if total < sum(module.NEEDED_GIB.values()) * GIB:
        pytest.skip("the released shape does not fit onto this device")
    reported = figures(tmp_path, "--levels", *map(str, LEVELS))
    assert [level["concurrency"] for level in reported] == list(LEVELS)
    for level in reported:
        assert level["answers"] == 4 * level["concurrency"] and level["sound_per_s"] > 1, "slower than it is heard"


@pytest.mark.engine
def test_without_a_gpu(tmp_path: Path) -> None:
    """Over HTTP; what is asked from Python is run by the tests of `make gpu`."""
    small = ("--tiny", "--http", "--levels", "1", "3", "--rounds", "2", "--text", "8", "--frames", "12")
    reported = figures(tmp_path, *small)
    assert [(level["concurrency"], level["answers"]) for level in reported] == [(1, 2), (3, 6)]
    for level in reported:
        assert 0 < level["first_p50_s"] <= level["whole_p50_s"]
        for answer in level["each"]:
            assert answer["sound_s"] == pytest.approx(12 * 0.08, abs=0.05)  # but for the vocoder's edge


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_it_says_that_there_is_no_gpu(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speech_levels.py"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    said = capsys.readouterr().err
    assert "no CUDA device" in said and "--tiny" in said


def test_the_stages_fit_onto_one_device(module: ModuleType) -> None:
    settings = module.engine_settings(LEVELS, device_bytes=79 * GIB)
    stages = settings["stage_overrides"]
    assert settings["load_format"] == "dummy" and "enforce_eager" not in settings
    assert sum(stage["engine"]["gpu_memory_utilization"] for stage in stages.values()) < 1
    assert all(stage["engine"]["max_num_seqs"] == 32 for stage in stages.values())
    flags = module.as_flags(settings)
    assert flags[flags.index("--load-format") + 1] == "dummy"
    assert json.loads(flags[flags.index("--stage-overrides") + 1]) == stages


def test_a_plan_comes_out_of_it(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_device = Machine(platform="cuda", device_count=1, cpu_count=16, memory_bytes=128 * GIB)
    monkeypatch.setattr(settings_module, "detect_machine", lambda: one_device)
    model = write_qwen3_omni(tmp_path / "model", released_shape=True)
    plan = settings_module.from_kwargs(str(model), **module.engine_settings(LEVELS, device_bytes=79 * GIB))
    for stage in plan.stages:
        args = stage_engine_args(plan, stage.replicas[0].id)
        dtype = "float32" if stage.name == "code2wav" else "bfloat16"
        assert (args.load_format, args.dtype, args.max_num_seqs) == ("dummy", dtype, 32)
        assert args.gpu_memory_utilization == pytest.approx(module.NEEDED_GIB[stage.name] / 79, abs=1e-3)
        assert args.kv_cache_memory_bytes == module.CACHE_BYTES.get(stage.name)
        assert args.enforce_eager is (stage.name == "code2wav")
        assert stage.replicas[0].devices == (0,)


def test_what_a_listener_notices(module: ModuleType) -> None:
    spoken = importlib.import_module("spoken")
    pieces = {10.5: 1.0, 11.0: 1.0, 13.5: 0.5, 13.6: 0.5}
    clock = iter([10.0, *pieces, 14.0])
    listener = spoken.Listener(clock.__next__)
    listener.hear(0.0)  # nothing, and nobody looks at the clock
    for seconds in pieces.values():
        listener.hear(seconds)
    answer = listener.end()
    assert (answer.first_s, answer.whole_s, answer.sound_s) == pytest.approx((0.5, 4.0, 3.0))
    assert answer.late_s == pytest.approx(1.0)  # silent from 12.5 to 13.5, and nothing is late after that
    assert answer.real_time_factor == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="no sound"):
        spoken.Listener().end()


def test_the_figures_of_a_level(module: ModuleType) -> None:
    spoken = importlib.import_module("spoken")
    answers = [spoken.Answer(0.1 * number, 2.0, 4.0) for number in (1, 2, 3)]
    level = module.Level(3, 6.0, answers)
    told = level.figures()
    assert (told["first_p50_s"], told["first_max_s"]) == pytest.approx((0.2, 0.3))
    assert (told["requests_per_s"], told["sound_per_s"], told["real_time_factor_p50"]) == pytest.approx((0.5, 2.0, 0.5))
    lines = list(module.table([level]))
    assert "goal: first sound below 200 ms; missed at 3" in lines
    assert any("234 ms" in line for line in lines)


def test_what_the_stream_says(module: ModuleType) -> None:
    http = importlib.import_module("spoken_http")
    event = {"choices": [{"delta": {"audio": {"data": "AAAAAAAAAAA="}}}]}
    assert http.sound_of(event) == pytest.approx(4 / 24_000)
    assert http.sound_of({"choices": [{"delta": {"content": "x", "audio": None}}]}) == 0
    assert http.frames_of({"usage": {"completion_tokens_details": {"audio_tokens": 12}}}) == 12
    assert http.frames_of(event) == 0
    with pytest.raises(RuntimeError, match="it is broken"):
        http.sound_of({"error": {"message": "it is broken"}})
