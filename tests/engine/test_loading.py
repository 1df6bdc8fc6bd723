"""Reports of the weights that a replica has read, from vLLM's own loader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from vllm_omni_ext.engine import loading
from vllm_omni_ext.wire.loading import Loading

ROWS = {"a.one": 4, "a.two": 8, "b.other": 16}


class Model(torch.nn.Module):
    """Loads the tensors whose names begin with "a."."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        return name.startswith("b.")

    def load_weights(self, weights: Any) -> None:
        self.taken = [name for name, _ in weights]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Loading]:
    """The reports of this process."""
    taken: list[Loading] = []

    def say(phase: Any, **fields: Any) -> None:
        taken.append(Loading(replica="talker/0", phase=phase, **fields))

    sender = SimpleNamespace(send=say, close=lambda: None)
    monkeypatch.setattr(loading.ProgressSender, "of_this_process", lambda: sender)
    monkeypatch.setattr(loading, "EVERY_S", 0.0)
    return taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files, one of which the model ignores."""
    tensors = {name: torch.zeros(rows, 1024) for name, rows in ROWS.items()}
    save_file({name: tensors[name] for name in ("a.one", "a.two")}, tmp_path / "model-1.safetensors")
    save_file({"b.other": tensors["b.other"]}, tmp_path / "model-2.safetensors")
    return tmp_path


def load(folder: Path, config: LoadConfig) -> Model:
    """Load a model as vLLM's runner does."""
    model, about = Model(), SimpleNamespace(model=str(folder), revision=None, quantization=None, multimodal_config=None)
    about.is_moe = False
    with set_current_vllm_config(VllmConfig()):
        get_model_loader(config).load_weights(model, about)
    return model


@pytest.mark.parametrize("name", ["auto", "safetensors"])
def test_progress_ends_at_the_bytes_of_all_used_tensors(folder: Path, reports: list[Loading], name: str) -> None:
    config = LoadConfig(load_format=name, use_tqdm_on_load=False)
    with loading.progress_reported(config):
        model = load(folder, config)
    assert sorted(model.taken) == ["a.one", "a.two"], "the file of unwanted tensors is not read"
    assert "load_weights" not in vars(model)
    total = 12 * 1024 * 4
    *counts, last = [(report.loaded, report.total) for report in reports if report.phase == "loading"]
    assert counts[0] == (0, total) and last == (total, total)
    assert reports[-1].phase == "warming up"
    assert config.load_format == name


def test_an_unused_tensor_does_not_count(reports: list[Loading]) -> None:
    weights = [(name, torch.zeros(rows)) for name, rows in reversed(ROWS.items())]
    sender = loading.ProgressSender.of_this_process()
    assert sender is not None
    passed = loading.counting(weights, sender, lambda: 48, Model().is_unused_checkpoint_weight)
    assert [name for name, _ in passed] == [*reversed(ROWS)]
    assert [report.loaded for report in reports] == [0, 0, 32, 48]


def test_a_download_reports_its_folder(reports: list[Loading], tmp_path: Path, monkeypatch: Any) -> None:
    module = "vllm.model_executor.model_loader.default_loader"
    monkeypatch.setattr(f"{module}.list_filtered_repo_files", lambda **_: [])
    monkeypatch.setattr(f"{module}.download_weights_from_hf", lambda *_, **__: pytest.fail("cut short"))
    config = LoadConfig(download_dir=str(tmp_path))
    with pytest.raises(pytest.fail.Exception), loading.progress_reported(config):
        load(Path("some/model"), config)
    assert [(each.phase, each.folder) for each in reports] == [("downloading", f"{tmp_path}/models--some--model")]
    assert config.load_format == "auto"


def test_other_formats_and_processes_without_a_socket_have_the_loader_of_vllm(reports: list[Loading]) -> None:
    with loading.progress_reported(config := LoadConfig(load_format="dummy")):
        assert config.load_format == "dummy"
    assert [report.phase for report in reports] == ["warming up"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.ProgressSender, "of_this_process", lambda: None)
        with loading.progress_reported(config := LoadConfig()):
            assert config.load_format == "auto"


def test_files_without_a_safetensors_header_count_whole(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(100))
    assert loading.wanted_bytes([str(tmp_path / "model.bin")], lambda name: False) == 100
