"""LoRA adapters in PEFT's format, and tiny checkpoints that vLLM can use with them on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from vllm_omni_ext.model_plugins.qwen3_omni.tiny import config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

RANK = 8
LOUD = 0.5
"""Scale of the random weights: the adapter changes every token."""


def write_dense(folder: Path) -> Path:
    """Write a tiny checkpoint whose thinker has no experts: vLLM's adapters of experts need a GPU."""
    small = config.SMALL
    with mock.patch.object(config, "SMALL", replace(small, thinker={**small.thinker, "num_experts": 0})):
        return write_qwen3_omni(folder, seed=0)


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter of the attention outputs of a tiny Qwen-Omni's thinker; returns its folder."""
    text = json.loads((model / "config.json").read_text())["thinker_config"]["text_config"]
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    inner = heads * text.get("head_dim", hidden // heads)
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(text["num_hidden_layers"]):
        name = f"base_model.model.thinker.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inner, generator=chance) * LOUD
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=chance) * LOUD
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    return folder
