"""Code predictor of the talker: the residual codes of one frame from the talker's hidden state and its first code.

A small autoregressive transformer that runs `num_code_groups - 1` steps for every frame. Its whole context is at
most `num_code_groups` positions, so keys and values live in a plain tensor made per call.
Source: `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` in Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOP_K = 50  # Transformers samples the residual codes with these two whatever the talker uses
TOP_P = 0.8


@dataclass(frozen=True)
class Draw:
    """How one request's residual codes are chosen.

    Attributes:
        greedy: take the most likely code; else sample with top_k 50 and top_p 0.8.
        generator: source of randomness; None uses torch's default.
    """

    greedy: bool
    generator: torch.Generator | None = None


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        bias = c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=bias)
        self.q_norm = _RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = _RMSNorm(self.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, start: int) -> Tensor:
        """x [batch, new, hidden]; cache [2, batch, kv heads, positions, head_dim] is written at `start`."""
        batch, new, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, new, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, new, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, new, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, *rope), _rotate(k, *rope)
        stop = start + new
        cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
        groups = self.heads // self.kv_heads
        keys = cache[0, :, :, :stop].repeat_interleave(groups, dim=1)
        values = cache[1, :, :, :stop].repeat_interleave(groups, dim=1)
        # The only multi-token call starts at position 0, where a causal mask is the plain lower triangle.
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=new > 1)
        return self.o_proj(y.transpose(1, 2).reshape(batch, new, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        c = config
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, start: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.codec_embedding = nn.ModuleList(
            [nn.Embedding(config.vocab_size, config.hidden_size) for _ in range(config.num_code_groups - 1)]
        )


class CodePredictor(nn.Module):
    """Predicts codes 1..num_code_groups-1 of frames; parameter names are those of the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.groups: int = config.num_code_groups
        self.model = _Decoder(config)
        self.lm_head = nn.ModuleList(
            [nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(self.groups - 1)]
        )
        theta = float(config.rope_parameters["rope_theta"])
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(self.groups, dtype=torch.float32)[:, None] * (theta**-half)[None, :]
        self._angles = torch.cat((angles, angles), dim=-1)  # [positions, head_dim]; a plain tensor: not a weight
        self._rope: tuple[Tensor, Tensor] | None = None

    def _rope_at(self, start: int, stop: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope[0].device != like.device:
            angles = self._angles.to(like.device)
            self._rope = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        return self._rope[0][start:stop], self._rope[1][start:stop]

    @torch.inference_mode()
    def predict(self, hidden: Tensor, first: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Residual codes of one frame per row.

        Args:
            hidden: talker hidden states that the first codes were sampled from, [batch, hidden].
            first: codec embeddings of those first codes, [batch, hidden].
            draws: one per row.

        Returns:
            int64 [batch, num_code_groups - 1].
        """
        c, batch = self.config, hidden.shape[0]
        cache = hidden.new_empty((c.num_hidden_layers, 2, batch, c.num_key_value_heads, self.groups, c.head_dim))
        x, start, codes = torch.stack((hidden, first), dim=1), 0, []
        for group in range(self.groups - 1):
            stop = start + x.shape[1]
            rope = self._rope_at(start, stop, x)
            for layer, memory in zip(self.model.layers, cache, strict=True):
                x = layer(x, rope, memory, start)
            logits = self.lm_head[group](self.model.norm(x[:, -1]))
            codes.append(choose(logits.float(), draws))
            x = self.model.codec_embedding[group](codes[-1])[:, None]
            start = stop
        return torch.stack(codes, dim=1)


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One code per row of logits [batch, codes]; int64 [batch]."""
    best = logits.argmax(dim=-1)
    sampled = [i for i, draw in enumerate(draws) if not draw.greedy]
    if not sampled:
        return best
    scores, ids = logits[sampled].topk(min(TOP_K, logits.shape[-1]), dim=-1)
    probs = scores.softmax(dim=-1)
    # nucleus: keep the smallest prefix whose mass reaches TOP_P (the most likely code always stays)
    probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= TOP_P, 0.0)
    for row, i in enumerate(sampled):
        pick = torch.multinomial(probs[row], 1, generator=draws[i].generator)
        best[i] = ids[row, pick[0]]
    return best
