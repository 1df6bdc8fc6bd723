"""Code predictor of the talker: predicts a frame's residual codes from the talker's hidden state and first code.

It is a small autoregressive transformer that runs `num_code_groups - 1` steps for every frame. This module contains its
weights, under the checkpoint's names, and the sampling of codes; `code_loop.py` contains the steps.
Source: `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` in Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.qwen3_omni.code_loop import KERNEL_WIDTH, CodeLoop, Layer, Weights

TOP_K = 50  # Transformers samples the residual codes with TOP_K and TOP_P, independent of the talker's parameters
TOP_P = 0.8


@dataclass(frozen=True)
class Draw:
    """Sampling parameters of one request's residual codes.

    Attributes:
        greedy: choose the most likely code; else sample with top_k 50 and top_p 0.8.
        generator: source of randomness; None uses torch's default.
    """

    greedy: bool
    generator: torch.Generator | None = None

    def skip(self, frames: int, steps: int) -> None:
        """Advance the generator by the random numbers of frames that another replica has generated.

        Args:
            frames: number of these frames.
            steps: number of residual codes in a frame.
        """
        if self.generator is not None and not self.greedy:
            noise = torch.empty(steps, device=self.generator.device)
            for _ in range(frames):
                noise.uniform_(generator=self.generator)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = _Norm(c.head_dim)
        self.k_norm = _Norm(c.head_dim)


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(config.hidden_size)
        self.post_attention_layernorm = _Norm(config.hidden_size)

    def merged(self, config: Any) -> Layer:
        """Return the layer's weights for `CodeLoop`; the parameters become views of the merged tensors."""
        attention, mlp = self.self_attn, self.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        head_scale = (
            attention.q_norm.weight.expand(config.num_attention_heads, -1),
            attention.k_norm.weight.expand(config.num_key_value_heads, -1),
        )
        return Layer(
            norm_in=self.input_layernorm.weight.data,
            norm_out=self.post_attention_layernorm.weight.data,
            qkv=merge([part.weight for part in qkv]).t(),
            qkv_bias=merge([part.bias for part in qkv]) if config.attention_bias else None,
            head_scale=torch.cat(head_scale).data,
            out=attention.o_proj.weight.data.t(),
            out_bias=attention.o_proj.bias.data if config.attention_bias else None,
            gate_up=merge([mlp.gate_proj.weight, mlp.up_proj.weight]).t(),
            down=mlp.down_proj.weight.data.t(),
        )


def merge(parts: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate parameters into one tensor; the parameters become views of it, so that no weight exists twice."""
    merged = torch.cat([part.data for part in parts])
    for part, piece in zip(parts, merged.split([len(part) for part in parts]), strict=True):
        part.data = piece
    return merged


class _Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = _Norm(config.hidden_size)
        self.codec_embedding = nn.ModuleList(
            [nn.Embedding(config.vocab_size, config.hidden_size) for _ in range(config.num_code_groups - 1)]
        )


class CodePredictor(nn.Module):
    """Predicts codes 1..num_code_groups-1 of frames; parameter names are those of the checkpoint.

    Raises:
        ValueError: a size is not a multiple of the width of vLLM's kernels.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        for name in ("head_dim", "hidden_size", "intermediate_size"):
            if getattr(config, name) % KERNEL_WIDTH:
                raise ValueError(f"code predictor {name} {getattr(config, name)} is not a multiple of {KERNEL_WIDTH}")
        self.config = config
        self.groups: int = config.num_code_groups
        self.model = _Decoder(config)
        self.lm_head = nn.ModuleList(
            [nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(self.groups - 1)]
        )
        self._loop: CodeLoop | None = None

    @property
    def loop(self) -> CodeLoop:
        """The `CodeLoop`, created on first use, when the weights are loaded and on their device."""
        if self._loop is None:
            c, like = self.config, self.model.norm.weight
            theta = float(c.rope_parameters["rope_theta"])
            angles = torch.arange(self.groups)[:, None] * theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
            weights = Weights(
                layers=[layer.merged(c) for layer in self.model.layers],
                norm=self.model.norm.weight.data,
                heads=[head.weight.data.t() for head in self.lm_head],
                embeddings=merge([embedding.weight for embedding in self.model.codec_embedding]).view(
                    self.groups - 1, c.vocab_size, c.hidden_size
                ),
                rope=torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=like.device, dtype=like.dtype),
                eps=c.rms_norm_eps,
                head_dim=c.head_dim,
                kv_heads=c.num_key_value_heads,
            )
            self._loop = CodeLoop(weights)
        return self._loop

    def frame_rows(self, codes: Tensor) -> Tensor:
        """Return the sum of embeddings [frames, hidden] of each frame's codes [frames, num_code_groups - 1]."""
        return self.loop.embedded(codes)


def draw_noise(draws: Sequence[Draw], noise: Tensor) -> None:
    """Fill the first rows of `noise` with the random numbers of frames: [rows, steps] float32 uniform in [0, 1).

    A row with a generator uses its generator, so that its numbers do not depend on other rows. All other rows are drawn
    in one call.
    """
    if any(draw.generator is None and not draw.greedy for draw in draws):
        noise[: len(draws)].uniform_()
    for row, draw in enumerate(draws):
        if draw.generator is not None and not draw.greedy:
            noise[row].uniform_(generator=draw.generator)


@dataclass(frozen=True)
class Choice:
    """Samples the codes of a batch, with tensors that are set before the first code.

    Attributes:
        noise: uniform in [0, 1), [batch, steps]; None: every row is greedy.
        greedy: mask of the greedy rows, [batch]; None: no row is greedy.
        nucleus: `TOP_P` for each row, [batch, 1].
        recorded: the operators are recorded in a graph, so all of them must be torch's.
    """

    noise: Tensor | None
    greedy: Tensor | None
    nucleus: Tensor | None
    recorded: bool = False

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """Choose one code per row of logits [batch, codes]; return int64 [batch]."""
        if self.noise is None or self.nucleus is None:
            return logits.argmax(dim=-1)
        scores, ids = self._most_likely(logits.float(), min(TOP_K, logits.shape[-1]))
        mass = scores.softmax(dim=-1).cumsum(dim=-1)
        # nucleus: the smallest prefix whose mass reaches TOP_P (the most likely code always stays)
        last = torch.searchsorted(mass, self.nucleus).clamp_(max=scores.shape[-1] - 1)
        drawn = self.noise[:, step : step + 1] * mass.gather(1, last)
        place = torch.searchsorted(mass, drawn, right=True)
        codes = ids.gather(1, torch.minimum(place, last))[:, 0]
        return codes if self.greedy is None else torch.where(self.greedy, logits.argmax(dim=-1), codes)

    def _most_likely(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return scores and codes [batch, count] of the `count` most likely codes of each row, best first."""
        if self.recorded or logits.device.type != "cpu":
            return logits.topk(count, dim=-1)
        # NumPy selects with vector instructions, in half the time of torch's selection.
        ids = torch.from_numpy(np.argpartition(logits.numpy(), -count, axis=-1)[:, -count:])
        scores, order = logits.gather(1, ids).sort(dim=-1, descending=True)
        return scores, ids.gather(1, order)
