"""The language model: a Qwen2 decoder in which every layer has two sets of weights and one attention.

"und" weights are for text, for what the ViT sees and for the two markers around any image; "gen" weights are for the
tokens of latents. Tokens are computed set by set and put in the order of their rows only for attention, so that each
matrix is read once however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.bagel.attention import Attention, Rows, sdpa
from vllm_omni_ext.model_plugins.bagel.context import Seen
from vllm_omni_ext.model_plugins.bagel.sizes import LlmSizes

KeysValues = tuple[Tensor, Tensor]


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension; computed in float32, rounded, then weighted, as in Qwen2."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The shape and dtype stay."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.rms_norm(x, self.weight.shape, None, self.epsilon) * self.weight


class ExpertLayer(nn.Module):
    """One set of a layer's weights. Q, K and V are one matrix, and so are the two halves of the gated MLP."""

    def __init__(self, sizes: LlmSizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.input_norm = RmsNorm(sizes.hidden, sizes.epsilon)
        self.qkv = nn.Linear(sizes.hidden, width)
        self.q_norm = RmsNorm(sizes.head_dim, sizes.epsilon)
        self.k_norm = RmsNorm(sizes.head_dim, sizes.epsilon)
        self.output = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.mlp_norm = RmsNorm(sizes.hidden, sizes.epsilon)
        self.gate_up = nn.Linear(sizes.hidden, 2 * sizes.feed_forward, bias=False)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[n, hidden]` -> Q `[n, heads, head_dim]`, K and V `[n, kv_heads, head_dim]`; normed, before RoPE."""
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return self.q_norm(query), self.k_norm(key), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: `[n, hidden]` and `[n, heads, head_dim]` -> `[n, hidden]`."""
        x = x + self.output(attended.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class MotLayer(nn.Module):
    """Both sets of a layer."""

    def __init__(self, sizes: LlmSizes) -> None:
        super().__init__()
        self.und = ExpertLayer(sizes)
        self.gen = ExpertLayer(sizes)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a forward pass belong. Lengths and positions alone make it, no context is held.

    Attributes:
        rows: lengths, in the order of rows.
        angles: cosine and sine of RoPE, each `[tokens, 1, head_dim]` float32, in the order of rows.
        order: `[tokens]` int64, for each token in the order of rows its place among und tokens followed by gen
            tokens; None if there are only und tokens, which then are in the order of rows.
        back: the inverse of `order`.
    """

    rows: Rows
    angles: tuple[Tensor, Tensor]
    order: Tensor | None = None
    back: Tensor | None = None


@dataclass(frozen=True)
class Output:
    """What a forward pass gives.

    Attributes:
        hidden: `[n, hidden]`, the final hidden states of the tokens that were asked for; None if none were.
        layers: keys and values of all tokens by layer, in the order of rows; empty unless they were asked for.
    """

    hidden: Tensor | None
    layers: tuple[KeysValues, ...]


class LanguageModel(nn.Module):
    """The decoder. `attention` may be replaced by another implementation of `Attention`."""

    def __init__(self, sizes: LlmSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.attention: Attention = sdpa
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(MotLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.ModuleDict({name: RmsNorm(sizes.hidden, sizes.epsilon) for name in ("und", "gen")})
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def text_layout(self, seen: Sequence[Seen], lengths: Sequence[int]) -> Layout:
        """Rows of text: so many tokens each, at successive positions, causal."""
        positions = [row.position + at for row, length in zip(seen, lengths, strict=True) for at in range(length)]
        return self._layout(seen, lengths, torch.tensor(positions), causal=True)

    def block_layout(self, seen: Sequence[Seen], lengths: Sequence[int], *, latents: bool) -> Layout:
        """Rows of one image block each: all tokens at one position, and each sees all of its block.

        Args:
            seen: what each row has seen.
            lengths: tokens of each block, its two markers included.
            latents: the markers of all rows are the und tokens, start and end by turns, and what is between them
                the gen tokens. Else all are und tokens, markers first and last.
        """
        positions = torch.tensor([row.position for row in seen]).repeat_interleave(torch.tensor(lengths))
        layout = self._layout(seen, lengths, positions, causal=False)
        if not latents:
            return layout
        order, gen = [], 2 * len(lengths)
        for row, length in enumerate(lengths):
            inside = length - 2
            order += [torch.tensor([2 * row]), torch.arange(gen, gen + inside), torch.tensor([2 * row + 1])]
            gen += inside
        places = torch.cat(order).to(layout.rows.device)
        return replace(layout, order=places, back=places.argsort())

    def _layout(self, seen: Sequence[Seen], lengths: Sequence[int], positions: Tensor, *, causal: bool) -> Layout:
        device = self.embed.weight.device
        keys = tuple(row.length + length for row, length in zip(seen, lengths, strict=True))
        rows = Rows(tuple(lengths), keys, causal, device)
        return Layout(rows, self._angles(positions.to(device)))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float32, device=positions.device)
        rates = 1.0 / self.sizes.rope_theta ** (half / self.sizes.head_dim)
        angles = torch.cat([positions[:, None].float() * rates] * 2, dim=-1)[:, None]
        return angles.cos(), angles.sin()

    def forward(
        self,
        und: Tensor,
        gen: Tensor | None,
        layout: Layout,
        seen: Sequence[Seen],
        *,
        hidden: Literal["und", "gen"] | None,
        keep: bool,
    ) -> Output:
        """Run the layers.

        Args:
            und: `[n, hidden]`, embeddings of the und tokens.
            gen: `[m, hidden]`, embeddings of the gen tokens; None if there are none.
            layout: where they belong.
            seen: what each row has seen, as the layout was made for.
            hidden: of which tokens the final hidden states are wanted. What is not needed for them, nor for keys and
                values, is not computed.
            keep: whether keys and values are wanted.
        """
        tokens = {"und": und} if gen is None else {"und": und, "gen": gen}
        sizes = [part.shape[0] for part in tokens.values()]
        kept: list[KeysValues] = []
        last = len(self.layers) - 1
        for at, layer in enumerate(self.layers):
            query, key, value = self._project(layer, tokens, layout)
            if keep:
                kept.append((key, value))
            if at == last and hidden is None:
                return Output(None, tuple(kept))
            keys, values = _with_seen(key, value, layout.rows.queries, seen, at)
            attended = self.attention(query, keys, values, layout.rows)
            attended = attended if layout.back is None else attended[layout.back]
            parts = dict(zip(tokens, attended.split(sizes), strict=True))
            wanted = tokens if at != last else {name: x for name, x in tokens.items() if name == hidden}
            tokens = {name: layer.get_submodule(name).finish(x, parts[name]) for name, x in wanted.items()}
        assert hidden is not None
        return Output(self.norm[hidden](tokens[hidden]), tuple(kept))

    def _project(self, layer: nn.Module, tokens: dict[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V in the order of rows, with RoPE."""
        each = [layer.get_submodule(name).project(x) for name, x in tokens.items()]
        query, key, value = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*each, strict=True))
        if layout.order is not None:
            query, key, value = query[layout.order], key[layout.order], value[layout.order]
        return _rotate(query, layout.angles), _rotate(key, layout.angles), value.contiguous()


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE on `[tokens, heads, head_dim]`, computed in float32; the dtype stays."""
    cos, sin = angles
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _with_seen(key: Tensor, value: Tensor, lengths: Sequence[int], seen: Sequence[Seen], layer: int) -> KeysValues:
    """Keys and values of all rows, each with what the row has seen in front."""
    if not any(row.length for row in seen):
        return key, value
    keys, values = [], []
    own = zip(key.split(lengths), value.split(lengths), strict=True)
    for row, pair in zip(seen, own, strict=True):
        for k, v in (*row.pieces(layer), pair):
            keys.append(k)
            values.append(v)
    return torch.cat(keys), torch.cat(values)
