"""Computes the code predictor's steps, one position after the other, in memory that is allocated once.

The tensors are tiny, so the number of calls determines the cost of a frame. For fewer calls, weights are merged, vLLM's
fused kernels are used, results are written in place, views are created in advance, and attention has no mask: position
p attends to positions 0 to p. No step reads a value on the host, and no shape depends on a value, so that a whole frame
can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import _custom_ops as kernels

KERNEL_WIDTH = 16  # vLLM's CPU kernels process this many values at once; they reject or overrun other sizes
FIRST_ROWS = 16  # initial capacity in requests; grows on demand


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices are [in, out].

    Attributes:
        qkv: projections to queries, keys and values, concatenated.
        head_scale: weight of the norm of each query head, then of each key head, [heads + kv heads, head_dim].
        gate_up: gate and up projection, concatenated.
    """

    norm_in: Tensor
    norm_out: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_scale: Tensor
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """All weights of the code predictor; step s predicts code s + 1 of a frame.

    Attributes:
        heads: output projections, one [hidden, codes] per step.
        embeddings: code embeddings, [steps, codes, hidden].
        rope: rotary cosines, then sines, [positions, head_dim].
    """

    layers: Sequence[Layer]
    norm: Tensor
    heads: Sequence[Tensor]
    embeddings: Tensor
    rope: Tensor
    eps: float
    head_dim: int
    kv_heads: int


class CodeLoop:
    """Computes the codes of frames after the first code; `run` accepts any batch size."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._store = _Store(weights, FIRST_ROWS)
        self._memory: dict[int, _Memory] = {}
        steps, codes, _ = weights.embeddings.shape
        self._table = weights.embeddings.flatten(0, 1)
        self._starts = torch.arange(0, steps * codes, codes, device=self._table.device)

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of all activations."""
        return self._weights.norm

    def embedded(self, codes: Tensor) -> Tensor:
        """Return for each frame the sum of the embeddings of its codes, [frames, hidden].

        Args:
            codes: all codes of the frames but the first ones, [frames, steps].
        """
        return F.embedding_bag(codes + self._starts, self._table, mode="sum")

    def _memory_for(self, batch: int) -> _Memory:
        if batch > self._store.rows:
            self._memory.clear()
            self._store = _Store(self._weights, 1 << (batch - 1).bit_length())
        memory = self._memory[batch] = _Memory(self._weights, self._store, batch)
        return memory

    def run(self, hidden: Tensor, first: Tensor, choose: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        """Compute one frame per row; return the codes of each step, int64 [batch].

        Args:
            hidden: the talker's hidden states, input of position 0, [batch, hidden].
            first: embeddings of the first codes, input of position 1, [batch, hidden].
            choose: returns codes [batch] for logits [batch, codes] and the step.
        """
        w, batch = self._weights, hidden.shape[0]
        memory = self._memory.get(batch) or self._memory_for(batch)
        memory.stream.copy_(hidden)
        memory.advance(0)
        memory.stream.copy_(first)
        codes: list[Tensor] = []
        for step, (head, embedding) in enumerate(zip(w.heads, w.embeddings, strict=True)):
            memory.advance(step + 1)
            torch.mm(memory.x, head, out=memory.logits)
            codes.append(choose(memory.logits, step))
            if step + 1 < len(w.heads):
                torch.index_select(embedding, 0, codes[-1], out=memory.stream)
        return codes


class _Store:
    """Allocated memory for activations, keys and values of up to `rows` rows, shared by all batch sizes.

    The projections and normed heads of every position have their own memory. The attention reads keys and values there,
    so that they are not copied into a cache.
    """

    def __init__(self, weights: Weights, rows: int) -> None:
        layer, like = weights.layers[0], weights.norm
        self.rows = rows

        def room(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        width, positions = layer.qkv.shape[1], weights.rope.shape[0]
        self.stream, self.x = room(rows, len(like)), room(rows, len(like))
        self.logits = room(rows, weights.heads[0].shape[1])
        self.gate_up, self.act = room(rows, layer.gate_up.shape[1]), room(rows, layer.down.shape[0])
        self.projected = [room(positions, rows, width) for _ in weights.layers]
        self.normed = [room(positions, rows, width) for _ in weights.layers]
        self.positions = [torch.full((rows,), p, device=like.device) for p in range(positions)]


@dataclass(frozen=True, slots=True)
class _Place:
    """Views of one layer's memory at one position, for `batch` rows.

    Attributes:
        qkv: output of the projection, [batch, width].
        by_head: the memory of `qkv` as [batch, heads + 2 * kv heads, head_dim].
        normed: the heads after the norm, in the shape of `by_head`.
        scaled: queries and keys in `normed`, which are multiplied by `Layer.head_scale`.
        q, k: queries and keys in `normed`, which are rotated, [batch, heads * head_dim].
        query: `q` as [batch, kv heads, heads / kv heads, head_dim].
        keys, values: keys and values of positions 0 to `position`, [batch, kv heads, position + 1, head_dim].
    """

    qkv: Tensor
    by_head: Tensor
    normed: Tensor
    scaled: Tensor
    q: Tensor
    k: Tensor
    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, weights: Weights, projected: Tensor, normed: Tensor, position: int) -> _Place:
        """Return the views of one layer at one position; `projected` and `normed` are [positions, batch, width]."""
        normed_heads, head_dim = weights.layers[0].head_scale.shape
        kv_heads, heads = weights.kv_heads, normed_heads - weights.kv_heads
        qkv, flat, batch = projected[position], normed[position], projected.shape[1]
        by_head = flat.view(batch, -1, head_dim)
        seen = (each[: position + 1].view(position + 1, batch, -1, head_dim) for each in (normed, projected))
        keys, values = (each.permute(1, 2, 0, 3) for each in seen)
        return cls(
            qkv=qkv,
            by_head=qkv.view(batch, -1, head_dim),
            normed=by_head,
            scaled=by_head[:, :normed_heads],
            q=flat[:, : heads * head_dim],
            k=flat[:, heads * head_dim : normed_heads * head_dim],
            query=by_head[:, :heads].view(batch, kv_heads, heads // kv_heads, head_dim),
            keys=keys[:, heads:normed_heads],
            values=values[:, normed_heads:],
        )


class _Memory:
    """Views of the first rows of a `_Store`, for one batch size.

    `stream` is the residual stream. `x` is the output of the last projection; after `advance` it is the normed output.
    """

    def __init__(self, weights: Weights, store: _Store, batch: int) -> None:
        self._weights = weights
        self._batch = batch
        self.stream, self.x, self.logits = store.stream[:batch], store.x[:batch], store.logits[:batch]
        self._gate_up, self._act = store.gate_up[:batch], store.act[:batch]
        layers = [(a[:, :batch], b[:, :batch]) for a, b in zip(store.projected, store.normed, strict=True)]
        self._places = [[_Place.of(weights, *layer, p) for layer in layers] for p in range(len(weights.rope))]
        self._positions = [positions[:batch] for positions in store.positions]

    def advance(self, position: int) -> None:
        """Run all layers at `position`, with the input in `stream`; the output is in `x`."""
        w, x, stream = self._weights, self.x, self.stream
        for index, (layer, place) in enumerate(zip(w.layers, self._places[position], strict=True)):
            if index == 0:
                kernels.rms_norm(x, stream, layer.norm_in, w.eps)
            else:
                kernels.fused_add_rms_norm(x, stream, layer.norm_in, w.eps)
            self._attend(layer, position, place)
            kernels.fused_add_rms_norm(x, stream, layer.norm_out, w.eps)
            torch.mm(x, layer.gate_up, out=self._gate_up)
            torch.ops._C.silu_and_mul(self._act, self._gate_up)
            torch.mm(self._act, layer.down, out=x)
        kernels.fused_add_rms_norm(x, stream, w.norm, w.eps)

    def _attend(self, layer: Layer, position: int, place: _Place) -> None:
        w = self._weights
        _project(self.x, layer.qkv, layer.qkv_bias, place.qkv)
        # The kernel only reads contiguous rows, so it normalizes the values too; their result is not used.
        kernels.rms_norm(place.normed, place.by_head, None, w.eps)
        place.scaled.mul_(layer.head_scale)
        kernels.rotary_embedding(self._positions[position], place.q, place.k, w.head_dim, w.rope, True)
        # The query heads of a key head are treated as its queries, so that keys and values are not repeated.
        y = F.scaled_dot_product_attention(place.query, place.keys, place.values)
        _project(y.reshape(self._batch, -1), layer.out, layer.out_bias, self.x)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)
