"""Reading a checkpoint: all of it is used, nothing may be missing, and sizes are those of the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tests.support.bagel_runs import picture
from tests.support.dit_room import config_of
from vllm_omni_ext.model_plugins.bagel import checkpoint as checkpoint_module
from vllm_omni_ext.model_plugins.bagel.checkpoint import checkpoint_sizes, empty_bagel, load_bagel, model_sources
from vllm_omni_ext.model_plugins.bagel.denoise import Denoiser, begin, finish
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import Prompts
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED, CheckpointError, ResizeRule
from vllm_omni_ext.model_plugins.bagel.stages.dit import BagelDit
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens


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


def test_every_parameter_is_filled_from_the_file(model: Bagel, checkpoint: Path) -> None:
    stored = load_file(checkpoint / "ema.safetensors")
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    rest = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("vae."))
    assert rest == sum(tensor.numel() for tensor in stored.values())
    qkv = [stored[f"language_model.model.layers.1.self_attn.{part}_proj_moe_gen.weight"].float() for part in "qkv"]
    assert torch.equal(model.llm.layers[1].gen.qkv.weight, torch.cat(qkv))
    assert torch.equal(model.latents.table, stored["latent_pos_embed.pos_embed"].float())
    assert torch.equal(model.vision.table, stored["vit_pos_embed.pos_embed"].float())
    names = [name for sources in model_sources(checkpoint_sizes(checkpoint)).values() for name in sources]
    assert sorted(names) == sorted(stored), "every tensor of the file has one place"


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
def test_a_resize_that_is_not_three_numbers_is_refused(copy: Path, written: object) -> None:
    edit_json(copy / "config.json", vit_transform=written)
    with pytest.raises(CheckpointError, match=r"is no resize; write \[largest, smallest, step\]"):
        load_bagel(copy)


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("ema", lambda t: t.pop("time_embedder.mlp.2.bias"), r"missing tensors: time_embedder\.mlp\.2\.bias$"),
        ("ae", lambda t: t.pop("decoder.mid.attn_1.q.bias"), r"missing tensors: decoder\.mid\.attn_1\.q\.bias$"),
        ("ema", lambda t: t.update(other=torch.zeros(1)), "unknown tensors: other$"),
        ("ae", lambda t: t.update(other=torch.zeros(1)), "unknown tensors: other$"),
        ("ema", lambda t: t.update({"llm2vae.bias": torch.zeros(63)}), r"llm2vae.bias \[63\] does not make \[64\]"),
    ],
    ids=["missing", "missing in ae", "unknown", "unknown in ae", "shape"],
)
def test_a_wrong_tensor_is_named(copy: Path, file: str, change: Any, reason: str) -> None:
    edit(copy / f"{file}.safetensors", change)
    with pytest.raises(CheckpointError, match=f"{file}.safetensors: .*{reason}"):
        load_bagel(copy)


def test_weights_are_read_onto_the_current_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors takes "cuda" as "cuda:0", but a replica of another device has that one as its current device."""
    opened: list[str] = []

    def safe_open(path: Path, *, framework: str, device: str) -> Any:
        opened.append(device)
        raise ValueError("no CUDA here")

    monkeypatch.setattr(checkpoint_module, "safe_open", safe_open)
    current = SimpleNamespace(device=torch.device("cuda:1"))
    monkeypatch.setattr(torch, "empty", lambda size, *, device: current if device == "cuda" else None)
    with pytest.raises(CheckpointError, match="no CUDA here"):
        checkpoint_module._open(checkpoint / "ema.safetensors", "cuda")
    assert opened == ["cuda:1"]


def test_of_many_missing_and_unknown_tensors_a_few_are_named(copy: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("decoder.")]:
            tensors[f"first_stage.{name}"] = tensors.pop(name)

    sizes_need = "decoder.conv_in.weight"
    edit(copy / "ae.safetensors", rename)
    with pytest.raises(CheckpointError, match=f"'{sizes_need}'; is this a BAGEL checkpoint"):
        load_bagel(copy)
    edit(copy / "ae.safetensors", lambda t: t.update({sizes_need: t[f"first_stage.{sizes_need}"].clone()}))
    with pytest.raises(
        CheckpointError, match=r"missing tensors: .* and \d+ more; \d+ unknown tensors: .* and \d+ more"
    ):
        load_bagel(copy)


def test_a_layer_in_the_middle_is_missing(copy: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name and name.startswith("language")]:
            del tensors[name]

    edit(copy / "ema.safetensors", drop)
    with pytest.raises(CheckpointError, match=r"layers \[0, 2\], not 0, 1, 2"):
        load_bagel(copy)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors", "llm_config.json", "tokenizer.json"])
def test_a_missing_or_damaged_file_is_named(copy: Path, file: str) -> None:
    path = copy / file
    if file != "tokenizer.json":
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(CheckpointError, match=f"{file}: is damaged"):
            load_bagel(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{file}: is missing"):
        load_bagel(copy)


def test_the_number_of_vit_heads_is_needed(copy: Path) -> None:
    edit_json(copy / "vit_config.json", num_attention_heads=None)
    with pytest.raises(CheckpointError, match="'num_attention_heads'"):
        load_bagel(copy)


def test_the_model_has_the_dtype_of_the_engine_and_the_autoencoder_float32(checkpoint: Path, model_bf16: Bagel) -> None:
    assert {p.dtype for name, p in model_bf16.named_parameters() if not name.startswith("vae.")} == {torch.bfloat16}
    assert {p.dtype for p in model_bf16.vae.parameters()} == {torch.float32}
    assert load_bagel(checkpoint, dtype=torch.float16).dtype is torch.float16
    with pytest.raises(ValueError, match="dtype"):
        load_bagel(checkpoint, dtype=torch.int8)


# -- the released shape on the meta device, and dummy weights -----------------------------------------


@pytest.fixture(scope="module")
def released(checkpoint: Path) -> Bagel:
    with torch.device("meta"):
        model = Bagel(RELEASED).requires_grad_(False)
    for part in (model.llm, model.vision, model.latents):
        part.to(torch.bfloat16)
    model.tokens = Tokens.from_directory(checkpoint)
    return model


def test_the_number_of_parameters_is_that_of_the_release(released: Bagel) -> None:
    def count(module: torch.nn.Module) -> float:
        return round(sum(p.numel() for p in module.parameters()) / 1e9, 2)

    assert (count(released.llm), count(released.vae)) == (14.14, 0.08)
    assert count(released.vision) == pytest.approx(0.43, abs=0.02)


@pytest.mark.slow
def test_an_edit_and_an_image_together(released: Bagel) -> None:
    prompts = Prompts(released.tokens, RELEASED)
    plans = [prompts.image([picture(700, 1100, 1), "blue"]), prompts.image(["a red cat"])]
    given = [{"num_timesteps": 2}, {"num_timesteps": 2, "height": 512, "width": 768}]
    running = [
        begin(released, plan, image_parameters(each, edit=plan.size is not None))
        for plan, each in zip(plans, given, strict=True)
    ]
    assert {key.dtype for key, _ in running[0].branches["cond"].layers} == {torch.bfloat16}
    denoiser = Denoiser(released)
    while not running[0].done:
        denoiser.step(running)
    images = [finish(released, each) for each in running]
    assert [tuple(image.image.shape) for image in images] == [(656, 1024, 3), (512, 768, 3)]
    assert {image.latent.device.type for image in images} == {"meta"}
    assert {image.latent.dtype for image in images} == {torch.float32}


@pytest.mark.slow
def test_files_of_the_released_shape(tmp_path: Path) -> None:
    directory = write_bagel(tmp_path / "model", released_shape=True)
    sizes = checkpoint_sizes(directory)
    assert (sizes.llm, sizes.vit, sizes.vae) == (RELEASED.llm, RELEASED.vit, RELEASED.vae)
    assert sizes == RELEASED
    model = empty_bagel(directory, dtype=torch.bfloat16, device="meta")
    assert {part.dtype for part in model.llm.parameters()} == {torch.bfloat16}
    assert {part.dtype for part in model.vae.parameters()} == {torch.float32}
    files = [directory / name for name in ("ema.safetensors", "ae.safetensors")]
    assert sum(file.stat().st_size for file in files) == pytest.approx(
        sum(part.nbytes for part in model.parameters()), rel=1e-4
    )
    assert sum(file.stat().st_blocks for file in files) * 512 < 1 << 20, "zeros must not be written"


def test_an_empty_autoencoder_is_float32_with_any_default_dtype(checkpoint: Path) -> None:
    """vLLM's loader sets the engine's dtype as PyTorch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = empty_bagel(checkpoint, dtype=torch.bfloat16, device="meta")
    finally:
        torch.set_default_dtype(before)
    assert {part.dtype for part in model.vae.parameters()} == {torch.float32}


def test_dummy_weights_fill_all_parameters(checkpoint: Path) -> None:
    """With `load_format: dummy` vLLM fills the parameters and does not call `load_weights`."""
    config = config_of(checkpoint)
    config.load_config.load_format = "dummy"
    stage = BagelDit(vllm_config=config)
    expected = dict(load_bagel(checkpoint).named_parameters())
    assert {name: part.shape for name, part in stage.bagel.named_parameters()} == {
        name: part.shape for name, part in expected.items()
    }
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(stage, config.model_config)
    for part in stage.parameters():
        assert part.isfinite().all() and part.any()
