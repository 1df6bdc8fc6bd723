"""Interface of an attention kernel for rows (sequences) of different lengths, and its implementation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Lengths of rows (sequences) that are concatenated in packed tensors; a row attends only to its own keys.

    Attributes:
        queries: number of queries of each row.
        keys: number of keys of each row: the keys of its context, then one key for each query.
        causal: True: a query attends to the keys up to its own. False: it attends to all keys of its row.
        device: device of the packed tensors.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    device: torch.device

    @cached_property
    def query_starts(self) -> Tensor:
        """Index of each row's first query, and of the end: `[rows + 1]` int32, for variable-length kernels."""
        return self._starts(self.queries)

    @cached_property
    def key_starts(self) -> Tensor:
        """Index of each row's first key, and of the end: `[rows + 1]` int32."""
        return self._starts(self.keys)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)


Attention = Callable[[Tensor, Tensor, Tensor, Rows], Tensor]
"""Computes attention within rows: query `[sum(rows.queries), heads, head_dim]`, key and value `[sum(rows.keys),
kv_heads, head_dim]`, result in the shape and dtype of the query. `heads // kv_heads` query heads share a key head."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
    """Compute attention with PyTorch, one call per row: an `Attention` for every device and dtype."""
    pieces = [
        _attend(q, k, v, rows.causal)
        for q, k, v in zip(query.split(rows.queries), key.split(rows.keys), value.split(rows.keys), strict=True)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    length, before = query.shape[0], key.shape[0] - query.shape[0]
    mask = None
    if causal and before and length > 1:
        mask = torch.ones(length, key.shape[0], dtype=torch.bool, device=query.device).tril(before)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=causal and not before and length > 1,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out[0].transpose(0, 1)
