"""Answers of the families, computed in plain torch from their checkpoints alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SAMPLE_RATE, TONE = 16000, 320


def tokens_of(folder: Path, text: str) -> list[int]:
    """Token ids of a text."""
    return list(AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"])


def painted(
    folder: Path, tokens: list[int], size: tuple[int, int], seed: int, steps: int = 3, contrast: float = 1.0
) -> np.ndarray:
    """The picture of `optional_text_image`, uint8 [height, width, 3]."""
    weights = load_file(folder / "painter" / "weights.safetensors")
    condition = weights["embedding"][tokens].mean(0)
    width, height = size
    picture = torch.randn(height, width, 3, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        picture = picture + torch.sin(picture @ weights["inward"] + condition) @ weights["outward"] / steps
    return _uint8(picture * contrast)


def continued(folder: Path, tokens: list[int], count: int) -> list[int]:
    """So many greedy tokens of the language model of `optional_text_image`, by Transformers."""
    config = LlamaConfig.from_pretrained(folder)
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM.from_pretrained(folder, config=config, torch_dtype=torch.float32)
    made = model.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None
    )
    return list(made[0, len(tokens) :].tolist())


def spoken(folder: Path, text: str, pitch: float = 1.0, volume: float = 0.5) -> np.ndarray:
    """The sound of `plain_tts`, float32 [samples] at 16 kHz."""
    frequencies = load_file(folder / "model.safetensors")["frequencies"]
    wave, phase = [], 0.0
    for token in tokens_of(folder, text):
        per_sample = 2 * math.pi * pitch * float(frequencies[token]) / SAMPLE_RATE
        wave.append(volume * np.sin(phase + per_sample * np.arange(TONE)))
        phase += per_sample * TONE
    return np.concatenate(wave).astype(np.float32)


def _uint8(picture: torch.Tensor) -> np.ndarray:
    return ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
