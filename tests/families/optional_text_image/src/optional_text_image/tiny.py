"""Writes a tiny random checkpoint: a Llama model, and the painter's weights in a folder next to it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from optional_text_image.family import ARCHITECTURE, HIDDEN, WEIGHTS
from vllm_omni_ext.testing import write_byte_tokenizer


def write(directory: Path, *, seed: int = 0) -> Path:
    """Write config, tokenizer and weights made from a seed; returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_byte_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        torch_dtype="float32",
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [ARCHITECTURE]}, indent=2))
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (vocabulary, HIDDEN), "inward": (3, HIDDEN), "outward": (HIDDEN, 3)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    (directory / WEIGHTS).parent.mkdir(exist_ok=True)
    save_file(weights, directory / WEIGHTS)
    return directory
