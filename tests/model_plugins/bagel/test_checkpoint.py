"""Reading a checkpoint: everything in it is used, nothing may be missing, and sizes are those of the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes, load_bagel, model_sources
from vllm_omni_ext.model_plugins.bagel.errors import CheckpointError
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.sizes import ResizeRule


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be spoiled."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_every_parameter_is_filled(model: Bagel, checkpoint: Path) -> None:
    stored = load_file(checkpoint / "ema.safetensors")
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    rest = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("vae."))
    assert rest == sum(tensor.numel() for tensor in stored.values())
    qkv = [stored[f"language_model.model.layers.1.self_attn.{part}_proj_moe_gen.weight"].float() for part in "qkv"]
    assert torch.equal(model.llm.layers[1].gen.qkv.weight, torch.cat(qkv))


def test_both_tables_of_positions_are_the_stored_ones(model: Bagel, checkpoint: Path) -> None:
    stored = load_file(checkpoint / "ema.safetensors")
    assert torch.equal(model.latents.table, stored["latent_pos_embed.pos_embed"].float())
    assert torch.equal(model.vision.table, stored["vit_pos_embed.pos_embed"].float())


def test_sizes_come_from_the_weights_not_from_stale_configs(checkpoint: Path) -> None:
    sizes = checkpoint_sizes(checkpoint)
    assert json.loads((checkpoint / "vit_config.json").read_text())["num_hidden_layers"] == 3
    assert json.loads((checkpoint / "config.json").read_text())["max_latent_size"] == 8
    assert (sizes.vit.layers, sizes.latent_side, sizes.latent_patch, sizes.largest_side) == (2, 16, 2, 256)
    assert (sizes.vit.patch, sizes.vit.side, sizes.vae.downsample, sizes.token_pixels) == (14, 8, 8, 16)
    assert (sizes.llm.heads, sizes.llm.kv_heads, sizes.llm.head_dim) == (2, 1, 32)


def test_without_a_config_the_released_limits_hold(copy: Path) -> None:
    written = checkpoint_sizes(copy)
    (copy / "config.json").unlink()
    sizes = checkpoint_sizes(copy)
    assert written.vae_resize == ResizeRule(96, 48, 16)
    assert sizes.vae == written.vae
    assert sizes.vae_resize == ResizeRule(256, 256, 16)
    assert sizes.vit_resize == ResizeRule(112, 112, 14)


@pytest.mark.parametrize("written", [[96, 48], 5, ["a", 1, 2]])
def test_a_resize_that_is_none(copy: Path, written: object) -> None:
    edit_json(copy / "config.json", vit_transform=written)
    with pytest.raises(CheckpointError, match=r"is no resize; write \[largest, smallest, step\]"):
        load_bagel(copy)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors"])
def test_a_missing_tensor(copy: Path, file: str) -> None:
    name = {"ema": "time_embedder.mlp.2.bias", "ae": "decoder.mid.attn_1.q.bias"}[file.split(".")[0]]
    edit(copy / file, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{file}: missing tensors: {name}$"):
        load_bagel(copy)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors"])
def test_an_unknown_tensor(copy: Path, file: str) -> None:
    edit(copy / file, lambda tensors: tensors.update(other=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=f"{file}: unknown tensors: other$"):
        load_bagel(copy)


def test_both_are_named_and_few_of_many(copy: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("decoder.")]:
            tensors[f"first_stage.{name}"] = tensors.pop(name)

    sizes_need = "decoder.conv_in.weight"
    edit(copy / "ae.safetensors", rename)
    with pytest.raises(CheckpointError, match=f"'{sizes_need}'; is this a BAGEL checkpoint"):
        load_bagel(copy)
    edit(copy / "ae.safetensors", lambda t: t.update({sizes_need: t[f"first_stage.{sizes_need}"].clone()}))
    with pytest.raises(CheckpointError, match=r"missing tensors: .* and \d+ more; unknown tensors: .* and \d+ more"):
        load_bagel(copy)


def test_a_wrong_shape(copy: Path) -> None:
    name = "llm2vae.bias"
    edit(copy / "ema.safetensors", lambda tensors: tensors.update({name: torch.zeros(63)}))
    with pytest.raises(CheckpointError, match=rf"{name} \[63\] does not make \[64\]"):
        load_bagel(copy)


def test_a_layer_in_the_middle_is_missing(copy: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and name.startswith("language")]:
            del tensors[name]

    edit(copy / "ema.safetensors", drop)
    with pytest.raises(CheckpointError, match=r"layers \[0, 2\], not 0, 1, 2"):
        load_bagel(copy)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors", "llm_config.json", "tokenizer.json"])
def test_a_missing_file(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: is missing"):
        load_bagel(copy)


@pytest.mark.parametrize("file", ["ema.safetensors", "vit_config.json"])
def test_a_damaged_file(copy: Path, file: str) -> None:
    path = copy / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{file}: is damaged"):
        load_bagel(copy)


def test_the_number_of_vit_heads_is_needed(copy: Path) -> None:
    edit_json(copy / "vit_config.json", num_attention_heads=None)
    with pytest.raises(CheckpointError, match="'num_attention_heads'"):
        load_bagel(copy)


def test_dtypes(checkpoint: Path, model_bf16: Bagel) -> None:
    assert {p.dtype for name, p in model_bf16.named_parameters() if not name.startswith("vae.")} == {torch.bfloat16}
    assert {p.dtype for p in model_bf16.vae.parameters()} == {torch.float32}
    assert load_bagel(checkpoint, dtype=torch.float16).dtype is torch.float16
    with pytest.raises(ValueError, match="dtype"):
        load_bagel(checkpoint, dtype=torch.int8)


def test_every_tensor_of_the_file_has_one_place(checkpoint: Path) -> None:
    names = [name for sources in model_sources(checkpoint_sizes(checkpoint)).values() for name in sources]
    assert sorted(names) == sorted(load_file(checkpoint / "ema.safetensors"))
