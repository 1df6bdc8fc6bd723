"""Sizes of tensors from the headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_omni_ext.cli.checkpoint import checkpoint_folder, stored_tensors
from vllm_omni_ext.errors import ConfigError

ONE, OTHER = {"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, {"b": torch.zeros(4, dtype=torch.uint8)}


def test_sizes_are_read_from_one_file_or_all_files_of_an_index(tmp_path: Path) -> None:
    assert stored_tensors(tmp_path) is None and stored_tensors(None) is None
    save_file(ONE, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert stored_tensors(tmp_path) is None  # a file is missing
    save_file(OTHER, tmp_path / "2.safetensors")
    assert stored_tensors(tmp_path) == {"a": ("BF16", 6, 12), "b": ("U8", 4, 4)}
    index.unlink()
    save_file({**ONE, **OTHER}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert stored_tensors(tmp_path) == {"a": ("BF16", 6, 12), "b": ("U8", 4, 4)}


@pytest.mark.parametrize("content", [b"", b"\x04\0\0\0\0\0\0\0nope", b"\xff" * 8])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^model: '.*model\.safetensors' is not a safetensors file: "):
        stored_tensors(tmp_path)


def test_the_folder_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoint_folder(str(tmp_path)) == tmp_path
    assert checkpoint_folder("nobody/has-this", download_dir=str(tmp_path)) is None
    assert checkpoint_folder("not a name at all", download_dir=str(tmp_path)) is None
    folder = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert checkpoint_folder("some/model", download_dir=str(tmp_path)) == folder
