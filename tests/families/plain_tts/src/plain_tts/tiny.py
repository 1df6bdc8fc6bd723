"""Writes a tiny random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from plain_tts.family import ARCHITECTURE
from vllm_omni_ext.testing import write_byte_tokenizer


def write(directory: Path, *, seed: int = 0) -> Path:
    """Write config, tokenizer and weights made from a seed; returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_byte_tokenizer(directory)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    weights = {"frequencies": 100 + 900 * torch.rand(vocabulary, generator=generator)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
