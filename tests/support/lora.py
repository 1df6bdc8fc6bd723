"""LoRA adapters of tiny checkpoints, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
LOUD = 0.5
"""Scale of the random weights: what the adapter adds is heard in every token."""


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter of the attention outputs of a tiny Qwen3-Omni's thinker; returns its folder."""
    text = json.loads((model / "config.json").read_text())["thinker_config"]["text_config"]
    inner, hidden = text["num_attention_heads"] * text["head_dim"], text["hidden_size"]
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(text["num_hidden_layers"]):
        name = f"base_model.model.thinker.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inner, generator=chance) * LOUD
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=chance) * LOUD
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
