"""Reads a checkpoint with the released files: `ema.safetensors`, `ae.safetensors`, configs and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.sizes import LLM, VIT, BagelSizes, CheckpointError, Shapes, read_sizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

MODEL, AUTOENCODER = "ema.safetensors", "ae.safetensors"

Sources = dict[str, tuple[str, ...]]
"""For each parameter name, the names of the file's tensors that are concatenated along dimension 0 for it."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 5
_LENGTH_BYTES, _LARGEST_HEADER = 8, 100 << 20

_EXPERT = {
    "input_norm.weight": ("input_layernorm{e}.weight",),
    "qkv.weight": tuple(f"self_attn.{part}_proj{{e}}.weight" for part in "qkv"),
    "qkv.bias": tuple(f"self_attn.{part}_proj{{e}}.bias" for part in "qkv"),
    "q_norm.weight": ("self_attn.q_norm{e}.weight",),
    "k_norm.weight": ("self_attn.k_norm{e}.weight",),
    "output.weight": ("self_attn.o_proj{e}.weight",),
    "mlp_norm.weight": ("post_attention_layernorm{e}.weight",),
    "gate_up.weight": ("mlp{e}.gate_proj.weight", "mlp{e}.up_proj.weight"),
    "down.weight": ("mlp{e}.down_proj.weight",),
}
_EXPERTS = {"und": "", "gen": "_moe_gen"}
_VIT_LAYER = {
    "attention_norm": ("layer_norm1",),
    "qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "output": ("self_attn.out_proj",),
    "mlp_norm": ("layer_norm2",),
    "up": ("mlp.fc1",),
    "down": ("mlp.fc2",),
}
_WITH_BIAS = {
    "vision.patches": f"{VIT}.embeddings.patch_embedding",
    "vision.norm": f"{VIT}.post_layernorm",
    "vision.connector_up": "connector.fc1",
    "vision.connector_down": "connector.fc2",
    "latents.enter": "vae2llm",
    "latents.leave": "llm2vae",
    "latents.time_up": "time_embedder.mlp.0",
    "latents.time_down": "time_embedder.mlp.2",
}
_SINGLE = {
    "llm.embed.weight": f"{LLM}.embed_tokens.weight",
    "llm.head.weight": "language_model.lm_head.weight",
    "llm.norm.und.weight": f"{LLM}.norm.weight",
    "llm.norm.gen.weight": f"{LLM}.norm_moe_gen.weight",
    "vision.positions.weight": f"{VIT}.embeddings.position_embedding.weight",
    "vision.table": "vit_pos_embed.pos_embed",
    "latents.table": "latent_pos_embed.pos_embed",
}


def load_bagel(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Bagel:
    """Load a checkpoint.

    Args:
        directory: folder with `ema.safetensors`, `ae.safetensors`, `llm_config.json`, `vit_config.json`,
            `tokenizer.json` and optionally `config.json`.
        dtype: float32, bfloat16 or float16, for all parts except the autoencoder, which is float32.
        device: device of the weights, which are copied one tensor at a time.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unknown or has the wrong shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype} is not possible; use float32, bfloat16 or float16")
    path = Path(directory)
    tokens = Tokens.from_directory(path)
    with ExitStack() as stack:
        ema, ae = (stack.enter_context(_open(path / name, device)) for name in (MODEL, AUTOENCODER))
        sizes = checkpoint_sizes(path)
        model = _without_memory(sizes)
        vae_sources: Sources = {f"vae.{name}": (name,) for name, _ in model.vae.named_parameters()}
        _fill(model, model_sources(sizes), ema, path / MODEL, dtype)
        _fill(model, vae_sources, ae, path / AUTOENCODER, torch.float32)
    model.tokens = tokens
    return model


def empty_bagel(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Bagel:
    """Return a model with the sizes and the tokenizer of a checkpoint, and with uninitialized weights.

    It is for measurements: only the headers of the weights' files are read. Arguments and errors are those of
    `load_bagel`.
    """
    path = Path(directory)
    tokens, model = Tokens.from_directory(path), _without_memory(checkpoint_sizes(path))
    for part in (model.llm, model.vision, model.latents):
        part.to(dtype)
    model.vae.to(torch.float32)  # vLLM's loader sets another default dtype
    model.to_empty(device=device)
    model.tokens = tokens
    return model


def _without_memory(sizes: BagelSizes) -> Bagel:
    with torch.device("meta"):
        return Bagel(sizes).eval().requires_grad_(False)


def checkpoint_sizes(directory: str | Path) -> BagelSizes:
    """Return a checkpoint's sizes from the headers of its files, without reading weights. Raises CheckpointError."""
    path = Path(directory)
    ema, ae = (_read(file, partial(_shapes, file)) for file in (path / MODEL, path / AUTOENCODER))
    config = _json(path / "config.json") if (path / "config.json").is_file() else {}
    llm, vit = _json(path / "llm_config.json"), _json(path / "vit_config.json")
    return read_sizes(ema, ae, config, llm, vit)


def model_sources(sizes: BagelSizes) -> Sources:
    """Return, for each parameter of `Bagel`, the names of its tensors in `ema.safetensors`."""
    sources: Sources = {ours: (theirs,) for ours, theirs in _SINGLE.items()}
    for ours, theirs in _WITH_BIAS.items():
        for kind in ("weight", "bias"):
            sources[f"{ours}.{kind}"] = (f"{theirs}.{kind}",)
    for layer in range(sizes.llm.layers):
        for expert, ending in _EXPERTS.items():
            for ours, names in _EXPERT.items():
                full = tuple(f"{LLM}.layers.{layer}.{name.format(e=ending)}" for name in names)
                sources[f"llm.layers.{layer}.{expert}.{ours}"] = full
    for layer in range(sizes.vit.layers):
        for ours, names in _VIT_LAYER.items():
            for kind in ("weight", "bias"):
                full = tuple(f"{VIT}.encoder.layers.{layer}.{name}.{kind}" for name in names)
                sources[f"vision.layers.{layer}.{ours}.{kind}"] = full
    return sources


def _fill(model: nn.Module, sources: Sources, file: Any, path: Path, dtype: torch.dtype) -> None:
    """Fill the model's parameters, which are on the meta device; every tensor of the file must be used."""
    wanted, present = {name for names in sources.values() for name in names}, set(file.keys())
    if wanted != present:
        raise CheckpointError(f"{path}: {differences(wanted - present, present - wanted)}")
    for ours, names in sources.items():
        owner, _, attribute = ours.rpartition(".")
        module = model.get_submodule(owner)
        shape = getattr(module, attribute).shape
        parts = [file.get_tensor(name).to(dtype) for name in names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tensor.shape != shape:
            found = " and ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise CheckpointError(f"{path}: {found} does not make {list(shape)}")
        setattr(module, attribute, nn.Parameter(tensor.contiguous(), requires_grad=False))


def differences(missing: set[str], unknown: set[str]) -> str:
    """Return a text for an error message: numbers and some names of a file's missing and unknown tensors."""
    kinds = {"missing": sorted(missing), "unknown": sorted(unknown)}
    return "; ".join(f"{len(names)} {kind} tensors: {_some(names)}" for kind, names in kinds.items() if names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _open(path: Path, device: torch.device | str) -> Any:
    current = torch.empty(0, device=device).device  # safetensors takes "cuda" as cuda:0, not as the current device
    return _read(path, lambda: safe_open(path, framework="pt", device=str(current)))


def _json(path: Path) -> dict[str, Any]:
    return _read(path, lambda: json.loads(path.read_text(encoding="utf-8")))


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error


def _shapes(path: Path) -> Shapes:
    """Return the shapes in a file's header. `safe_open` would map the whole file, which may be larger than memory."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
