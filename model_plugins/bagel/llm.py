"""The language model: a Qwen2 decoder in which every layer has two sets of weights and one attention.

"und" weights are for text, for the ViT's output and for the two markers around any image; "gen" weights are for latent
tokens. The tokens of a set are computed together, so that each matrix is read once for any number of rows (sequences).
They are brought into the order of the rows only for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.bagel.attention import Attention, Rows, sdpa
from vllm_omni_ext.model_plugins.bagel.context import Seen
from vllm_omni_ext.model_plugins.bagel.sizes import LlmSizes

KeysValues = tuple[Tensor, Tensor]


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension: computed in float32, rounded, then weighted, as in Qwen2."""

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`; shape and dtype stay the same."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.rms_norm(x, self.weight.shape, None, self.epsilon) * self.weight


class ExpertLayer(nn.Module):
    """One set of a layer's weights. Q, K and V are one matrix; gate and up projection of the MLP are one matrix."""

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
        """Return Q `[n, heads, head_dim]`, K and V `[n, kv_heads, head_dim]` of `[n, hidden]`; normed, before RoPE."""
        qkv = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return self.q_norm(query), self.k_norm(key), value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the layer after attention: `x` `[n, hidden]`, `attended` `[n, heads, head_dim]` -> `[n, hidden]`."""
        x = x + self.output(attended.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class MotLayer(nn.Module):
    """One decoder layer, with both sets of weights: "und" and "gen"."""

    def __init__(self, sizes: LlmSizes) -> None:
        super().__init__()
        self.und = ExpertLayer(sizes)
        self.gen = ExpertLayer(sizes)

    def project(self, und: Tensor, gen: Tensor, order: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Return Q, K and V of all tokens in the order of rows, with RoPE.

        Args:
            und, gen: hidden states `[n, hidden]` of the und tokens and of the gen tokens.
            order, cos, sin: see `Layout.order` and `Layout.angles`.
        """
        each = zip(self.und.project(und), self.gen.project(gen), strict=True)
        query, key, value = (torch.cat(parts)[order] for parts in each)
        return _rotate(query, (cos, sin)), _rotate(key, (cos, sin)), value


@dataclass(frozen=True)
class Layout:
    """Positions and order of the tokens of a forward pass. It depends only on lengths and positions, and refers to no
    context.

    Attributes:
        rows: lengths of the rows.
        angles: cosine and sine of RoPE, each `[tokens, 1, head_dim]` float32, in the order of rows.
        order: `[tokens]` int64, for each token in the order of rows its index in the und tokens followed by the gen
            tokens. None without gen tokens: the und tokens are in the order of rows.
        back: the inverse permutation of `order`.
    """

    rows: Rows
    angles: tuple[Tensor, Tensor]
    order: Tensor | None = None
    back: Tensor | None = None


@dataclass(frozen=True)
class Output:
    """The result of a forward pass.

    Attributes:
        hidden: `[n, hidden]`, final hidden states of the requested tokens; None if none were requested.
        layers: keys and values of all tokens by layer, in the order of rows; empty unless requested.
    """

    hidden: Tensor | None
    layers: tuple[KeysValues, ...]


class LanguageModel(nn.Module):
    """The decoder. Its `attention` may be set to another implementation of `Attention`.

    Attributes:
        project, finish: a layer's computation before and after attention for latent tokens: `MotLayer.project` and
            `ExpertLayer.finish`, or the same compiled.
    """

    def __init__(self, sizes: LlmSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.attention: Attention = sdpa
        self.project: Callable[..., Any]
        self.finish: Callable[..., Any]
        self.do_not_compile_layers()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(MotLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.ModuleDict({name: RmsNorm(sizes.hidden, sizes.epsilon) for name in ("und", "gen")})
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def compile_layers(self, **options: Any) -> None:
        """Compile the layers' computation for latent tokens, once for all layers and all numbers of tokens.

        Args:
            options: options of `torch.compile`.
        """
        self.project = torch.compile(MotLayer.project, dynamic=True, fullgraph=True, **options)
        self.finish = torch.compile(ExpertLayer.finish, dynamic=True, fullgraph=True, **options)

    def do_not_compile_layers(self) -> None:
        """Undo `compile_layers`."""
        self.project, self.finish = MotLayer.project, ExpertLayer.finish

    def text_layout(self, seen: Sequence[Seen], lengths: Sequence[int]) -> Layout:
        """Return the layout of text rows, with successive positions and causal attention.

        Args:
            seen: for each row, the context to which it attends in addition to its own tokens.
            lengths: number of tokens of each row.
        """
        positions = [row.position + at for row, length in zip(seen, lengths, strict=True) for at in range(length)]
        return self._layout(seen, lengths, torch.tensor(positions), causal=True)

    def block_layout(self, seen: Sequence[Seen], lengths: Sequence[int], *, latents: bool) -> Layout:
        """Return the layout of rows with one image block in each.

        An image block is the tokens of an image with its two markers. All tokens of a block have one position and
        attend to each other.

        Args:
            seen: for each row, the context to which it attends in addition to its block.
            lengths: number of tokens of each block, including its two markers.
            latents: True: the markers of all rows (start, end, start, ...) are computed with the weights for
                understanding, and the latent tokens between them with those for generation. False: all tokens are
                computed with the weights for understanding.
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
            layout: layout of these tokens.
            seen: for each row, the context to which it attends in addition to its own tokens, as in the layout.
            hidden: the set of tokens whose final hidden states are returned; the last layer computes no others. None:
                no hidden states are returned.
            keep: whether keys and values are returned.
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
            finish = ExpertLayer.finish if gen is None else self.finish
            tokens = {name: finish(layer.get_submodule(name), x, parts[name]) for name, x in wanted.items()}
        assert hidden is not None
        return Output(self.norm[hidden](tokens[hidden]), tuple(kept))

    def _project(self, layer: nn.Module, tokens: dict[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V in the order of rows, with RoPE."""
        if layout.order is not None:
            query, key, value = self.project(layer, tokens["und"], tokens["gen"], layout.order, *layout.angles)
        else:
            query, key, value = layer.get_submodule("und").project(tokens["und"])
            query, key = _rotate(query, layout.angles), _rotate(key, layout.angles)
        return query, key, value.contiguous()


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to `[tokens, heads, head_dim]` in float32; the dtype stays the same."""
    cos, sin = angles
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def _with_seen(key: Tensor, value: Tensor, lengths: Sequence[int], seen: Sequence[Seen], layer: int) -> KeysValues:
    """Return keys and values of all rows, those of a row's context before those of its own tokens.

    Args:
        key, value: keys and values of the rows' own tokens.
        lengths: number of own tokens of each row.
        seen: context of each row.
        layer: number of the layer.
    """
    if not any(row.length for row in seen):
        return key, value
    keys, values = [], []
    own = zip(key.split(lengths), value.split(lengths), strict=True)
    for row, pair in zip(seen, own, strict=True):
        for k, v in (*row.pieces(layer), pair):
            keys.append(k)
            values.append(v)
    return torch.cat(keys), torch.cat(values)
