"""Random weights of a tiny BAGEL checkpoint: every tensor comes from numpy's stable generator, seeded by its name."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel.model import TIME_CHANNELS
from vllm_omni_ext.model_plugins.bagel.sizes import LLM, VIT, BagelSizes
from vllm_omni_ext.model_plugins.bagel.vae import Autoencoder
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

_FIRST_PRINTABLE, _AFTER_PRINTABLE = 0x20, 0x7F


class Tensors(dict[str, Tensor]):
    """Random tensors by name, with methods that add whole layers. Without a seed, tensors are on the meta device."""

    def __init__(self, seed: int | None, prefix: str = "") -> None:
        super().__init__()
        self._seed, self._prefix = seed, prefix

    def normal(self, name: str, shape: tuple[int, ...], spread: float, mean: float = 0.0) -> Tensor:
        """Return normally distributed random numbers, float32, that depend only on the seed and the tensor's name.

        Args:
            spread: standard deviation.
        """
        if self._seed is None:
            return torch.empty(shape, device="meta")
        key = zlib.crc32(f"{self._seed}/{self._prefix}{name}".encode()) & 0x7FFFFFFF
        numbers = np.random.RandomState(key).standard_normal(shape) * spread + mean
        return torch.from_numpy(numbers.astype(np.float32))

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = True, gain: float = 1.0) -> None:
        self[f"{name}.weight"] = self.normal(f"{name}.weight", (outputs, inputs), gain / math.sqrt(inputs))
        if bias:
            self[f"{name}.bias"] = self.normal(f"{name}.bias", (outputs,), 0.1)

    def norm(self, name: str, channels: int, *, mean: float = 1.0, bias: bool = False) -> None:
        self[f"{name}.weight"] = self.normal(f"{name}.weight", (channels,), 0.1, mean)
        if bias:
            self[f"{name}.bias"] = self.normal(f"{name}.bias", (channels,), 0.1)


def model_weights(size: BagelSizes, words: Vocabulary, seed: int | None) -> dict[str, Tensor]:
    """Return all tensors of `ema.safetensors`, bfloat16; without a seed, most of them are on the meta device."""
    tensors, hidden = Tensors(seed), size.llm.hidden
    _language_model(tensors, size, words)
    _vision_model(tensors, size)
    tensors.linear("vae2llm", hidden, size.token_channels)
    tensors.linear("llm2vae", size.token_channels, hidden)
    tensors.linear("time_embedder.mlp.0", hidden, TIME_CHANNELS, gain=1.4)
    tensors.linear("time_embedder.mlp.2", hidden, hidden, gain=1.4)
    tensors["latent_pos_embed.pos_embed"] = position_table(hidden, size.latent_side)
    tensors["vit_pos_embed.pos_embed"] = position_table(hidden, size.vit.side)
    tensors.linear("connector.fc1", hidden, size.vit.hidden)
    tensors.linear("connector.fc2", hidden, hidden)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _language_model(tensors: Tensors, size: BagelSizes, words: Vocabulary) -> None:
    llm = size.llm
    hidden, width = llm.hidden, llm.heads * llm.head_dim
    tensors[f"{LLM}.embed_tokens.weight"] = tensors.normal("embed", (llm.vocabulary, hidden), 0.7)
    for layer in range(llm.layers):
        for expert in ("", "_moe_gen"):
            at = f"{LLM}.layers.{layer}"
            for part, heads in (("q", llm.heads), ("k", llm.kv_heads), ("v", llm.kv_heads)):
                tensors.linear(f"{at}.self_attn.{part}_proj{expert}", heads * llm.head_dim, hidden)
            tensors.linear(f"{at}.self_attn.o_proj{expert}", hidden, width, bias=False, gain=0.8)
            for part in "qk":
                tensors.norm(f"{at}.self_attn.{part}_norm{expert}", llm.head_dim, mean=1.4)
            for part in ("gate", "up"):
                tensors.linear(f"{at}.mlp{expert}.{part}_proj", llm.feed_forward, hidden, bias=False)
            tensors.linear(f"{at}.mlp{expert}.down_proj", hidden, llm.feed_forward, bias=False)
            tensors.norm(f"{at}.input_layernorm{expert}", hidden)
            tensors.norm(f"{at}.post_attention_layernorm{expert}", hidden)
    tensors.norm(f"{LLM}.norm", hidden)
    tensors.norm(f"{LLM}.norm_moe_gen", hidden)
    head = tensors.normal("lm_head", (llm.vocabulary, hidden), 3.0 / math.sqrt(hidden))
    head[sorted(set(range(llm.vocabulary)) - printable_ids(words))] *= 0.02
    tensors["language_model.lm_head.weight"] = head


def printable_ids(words: Vocabulary) -> set[int]:
    """Return the text ids that decode to printable ASCII; greedy replies contain only these ids."""
    byte_of = {letter: id_ for letter, id_ in words.ids.items() if id_ < 256}
    return {
        id_
        for token, id_ in words.ids.items()
        if all(_FIRST_PRINTABLE <= byte_of[letter] < _AFTER_PRINTABLE for letter in token)
    }


def _vision_model(tensors: Tensors, size: BagelSizes) -> None:
    vit, hidden = size.vit, size.vit.hidden
    tensors.linear(f"{VIT}.embeddings.patch_embedding", hidden, 3 * vit.patch**2)
    tensors[f"{VIT}.embeddings.position_embedding.weight"] = tensors.normal("vitpos", (vit.side**2, hidden), 0.5)
    for layer in range(vit.layers):
        at = f"{VIT}.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors.linear(f"{at}.self_attn.{part}", hidden, hidden)
        tensors.linear(f"{at}.mlp.fc1", vit.feed_forward, hidden)
        tensors.linear(f"{at}.mlp.fc2", hidden, vit.feed_forward)
        tensors.norm(f"{at}.layer_norm1", hidden, bias=True)
        tensors.norm(f"{at}.layer_norm2", hidden, bias=True)
    tensors.norm(f"{VIT}.post_layernorm", hidden, bias=True)


def position_table(channels: int, side: int) -> Tensor:
    """Return position embeddings of a square's places, `[side * side, channels]` float32.

    A row contains sines and cosines of the place's column, then of its row.
    """

    def of(places: np.ndarray) -> np.ndarray:
        half = channels // 4
        rates = 1.0 / 10000 ** (np.arange(half, dtype=np.float64) / float(half))
        angles = np.einsum("m,d->md", places.reshape(-1), rates)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    places = np.arange(side, dtype=np.float32)
    columns, rows = np.meshgrid(places, places)
    return torch.from_numpy(np.concatenate([of(columns), of(rows)], axis=1)).float()


def autoencoder_weights(size: BagelSizes, seed: int | None) -> dict[str, Tensor]:
    """Return all tensors of `ae.safetensors`, float32; without a seed, they are on the meta device."""
    tensors = Tensors(seed, "ae.")
    with torch.device("meta"):
        model = Autoencoder(size.vae)
    for name, tensor in model.state_dict().items():
        spread, mean = 1.0 / math.sqrt(tensor[0].numel()), 0.0
        if "norm" in name:
            spread, mean = 0.1, float(name.endswith("weight"))
        elif name.endswith("bias"):
            spread = 0.05
        tensors[name] = tensors.normal(name, tuple(tensor.shape), spread, mean)
    return dict(tensors)
