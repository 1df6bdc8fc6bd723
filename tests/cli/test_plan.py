"""`vllm-omni-ext plan`: the table of the devices, other machines, and plans that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_omni_ext.cli import model as model_module
from vllm_omni_ext.cli.plan import main
from vllm_omni_ext.cli.serve import main as serve_main
from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.topology.machine import Machine

H100 = "cuda:81559MiB"


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The released shape without weights."""
    return str(write_qwen3_omni(tmp_path_factory.mktemp("released"), released_shape=True))


@pytest.mark.slow
def test_a_plan_for_another_machine_or_for_this_one(released: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([released, "--machine", f"{H100}x2", "--max-model-len", "32768"]) == 0
    told = capsys.readouterr().out
    assert "machine   cuda, 2 devices of 79.6 GiB, " in told
    lines = told.splitlines()
    at = lines.index("  device 0: 79.6 GiB, 77.3 of it to hand out")
    assert " ".join(lines[at + 1].split()) == "GiB weights KV cache activations graphs buffers context sum KV tokens"
    assert lines[at + 2].split()[:2] == ["thinker/0", "59.1"]
    assert lines[at + 3].split()[0] == "free"
    assert lines[at + 4] == "  device 1: 79.6 GiB, 77.3 of it to hand out"
    assert main([released]) == 0
    told = capsys.readouterr().out
    assert "machine   cpu, " in told and "\nmemory\n" not in told


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_shown_and_refused(released: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([released, "--machine", H100]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("memory\n  device 0: 79.6 GiB, 77.3 of it to hand out\n")
    assert told.out.splitlines()[-1].split() == ["free", "-16.6"]
    [line] = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: memory: device 0 has 77.3 GiB to hand out of 79.6, but 93.8 are needed: thinker/0")
    assert "it fits with --quantization fp8, or with" in line
    assert main([released, "--machine", H100, "--quantization", "fp8"]) == 0
    assert "  |- code2wav/0  device 0" in capsys.readouterr().out
    assert main([released, "--machine", "h100"]) == 2
    refused = capsys.readouterr()
    assert refused.out == "" and "error: --machine h100: write cuda:SIZExCOUNT, e.g. cuda:80GiBx2" in refused.err


def test_a_device_without_memory_for_a_process_is_refused(released: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The driver has all of its memory."""
    assert main([released, "--machine", "cuda:512MiB", "--gpu-memory-utilization", "0.9"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: stages.thinker.engine.gpu_memory_utilization: 0.9 of device 0 is 0.0 GiB, but ")
    assert line.endswith("; use a larger device or more of them")


def test_a_plan_is_printed_as_json(released: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([released, "--json", f"--machine={H100}x2", "--max-model-len=32768"]) == 0
    [first, second] = json.loads(capsys.readouterr().out)["memory"]
    assert [each["id"] for each in second["replicas"]] == ["talker/0", "code2wav/0"]
    assert first["bytes"] == 81559 << 20
    assert first["free_bytes"] + sum(
        size for each in first["replicas"] for name, size in each.items() if name.endswith("_bytes")
    ) == pytest.approx(first["usable_bytes"])
    assert main([released, "--json", "--machine", H100]) == 2
    refused = json.loads(capsys.readouterr().out)
    assert refused["fits"] is False
    assert refused["memory"][0]["free_bytes"] < 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["--headless", "--stage", "thinker", "-oma", "127.0.0.1", "-omp", "9100"]], ids=["head", "headless"]
)
def test_a_model_that_does_not_fit_is_refused_before_any_start(
    words: list[str], released: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def card(size: int) -> Machine:
        return Machine(platform="cuda", device_count=1, cpu_count=8, memory_bytes=1 << 37, device_bytes=(size,))

    monkeypatch.setattr("vllm_omni_ext.cli.settings.detect_machine", lambda: card(40 << 30))
    assert serve_main([released, *words]) == 2
    assert "error: memory: device 0 has " in capsys.readouterr().err
    monkeypatch.setattr("vllm_omni_ext.cli.settings.detect_machine", lambda: card(81559 << 20))
    with pytest.raises(ConfigError, match=r"^memory: device 0 has .* it fits with --quantization fp8"):
        from_kwargs(released)
    assert from_kwargs(released, quantization="fp8").stage("thinker").engine_args["gpu_memory_utilization"] > 0.7


class FakeCuda:
    """The attributes of a CUDA platform that `detect_machine` reads."""

    device_type = "cuda"

    def is_cuda_alike(self) -> bool:
        return True

    def is_cuda(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_total_memory(self, device: int) -> int:
        return (device + 1) << 30


def test_sizes_of_the_devices_come_from_nvml_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML vLLM's platform would initialise CUDA in the process that starts the others."""

    class Nvml(FakeCuda):
        pass

    monkeypatch.setattr(model_module, "_nvml_platform", lambda: Nvml)
    for platform, sizes in ((Nvml(), (1 << 30, 2 << 30)), (FakeCuda(), ())):
        monkeypatch.setattr(model_module, "current_platform", platform)
        found = model_module.detect_machine()
        assert (found.device_count, found.device_bytes) == (2, sizes)


@pytest.mark.slow
def test_a_checkpoint_with_weights_is_measured_by_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_qwen3_omni(tmp_path / "tiny", real_vocab=True)
    assert main([str(model), "--json", "--machine", "cuda:12GiB", "--dtype", "bfloat16"]) == 0
    [device] = json.loads(capsys.readouterr().out)["memory"]
    measured = {each["id"]: each["weights_bytes"] for each in device["replicas"]}
    assert measured == {"thinker/0": 2 * 19790912, "talker/0": 2 * 14243648, "code2wav/0": 4 * 1178473}


@pytest.mark.parametrize("template", ["/missing", "/"])
def test_a_chat_template_that_cannot_be_read_is_refused(
    model: str, template: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--omni", "--chat-template", template]) == 2
    assert capsys.readouterr().err.startswith("error: --chat-template: The supplied chat template ")
