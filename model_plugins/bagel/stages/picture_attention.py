"""Computes full attention inside pictures on a CPU, where vLLM's backend has only causal attention for prompts.

vLLM passes every backend the ranges of a prompt whose tokens attend to each other (`mm_req_doc_ranges`), but only its
backends for GPUs use them. Here the metadata of a step is divided at the borders of the ranges. Each piece becomes a
separate sequence with the same blocks of the KV cache, causal for text and not causal for a picture. This gives the
right result because a step writes all its keys and values before it reads any: a piece attends to no later piece, and a
picture's piece attends to all of the picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""For each sequence of a step, by its index, the (first, last) positions of its pictures."""


class Piece(NamedTuple):
    """Successive tokens of one sequence in a step.

    Attributes:
        row: index of the sequence.
        tokens: number of tokens of the piece.
        stop: number of tokens of the sequence up to the end of the piece, which is the number of its keys.
        causal: whether a token attends only to itself and earlier tokens; False: to all tokens of the piece too.
    """

    row: int
    tokens: int
    stop: int
    causal: bool


def divided(lengths: Sequence[int], stops: Sequence[int], ranges: Ranges) -> Iterator[Piece]:
    """Divide the tokens of a step at the borders of pictures, and yield the pieces in order.

    Args:
        lengths: tokens of each sequence in this step.
        stops: length of each sequence after this step.
        ranges: positions of pictures; positions outside this step are ignored.
    """
    for row, (length, stop) in enumerate(zip(lengths, stops, strict=True)):
        at = stop - length
        for first, last in sorted(ranges.get(row, ())):
            begin, end = max(first, at), min(last + 1, stop)
            if begin >= end:
                continue
            if begin > at:
                yield Piece(row, begin - at, begin, True)
            yield Piece(row, end - begin, end, False)
            at = end
        if at < stop or not length:
            yield Piece(row, stop - at, stop, True)


class PictureAttentionBuilder(CPUAttentionMetadataBuilder):
    """Divides a step's sequences with pictures into pieces, then builds vLLM's attention metadata of the pieces."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        step = common_attn_metadata
        if step.mm_req_doc_ranges and any(step.mm_req_doc_ranges.values()):
            starts = step.query_start_loc_cpu[: step.num_reqs + 1]
            lengths, stops = starts.diff().tolist(), step.seq_lens[: step.num_reqs].tolist()
            step = with_pieces(step, list(divided(lengths, stops, step.mm_req_doc_ranges)))
        return super().build(common_prefix_len, step, fast_build)


def with_pieces(step: CommonAttentionMetadata, pieces: Sequence[Piece]) -> CommonAttentionMetadata:
    """Return the metadata of a step in which each piece is a separate sequence; pieces share KV cache blocks."""
    if all(piece.causal for piece in pieces):
        return step
    starts = torch.tensor([0, *(piece.tokens for piece in pieces)]).cumsum(0).to(torch.int32)
    rows = torch.tensor([piece.row for piece in pieces])
    return step.replace(
        num_reqs=len(pieces),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        max_query_len=max(piece.tokens for piece in pieces),
        seq_lens=torch.tensor([piece.stop for piece in pieces], dtype=torch.int32),
        block_table_tensor=step.block_table_tensor[rows],
        causal=torch.tensor([piece.causal for piece in pieces], dtype=torch.int32),
    )


class PictureAttention(CPUAttentionBackend):
    """vLLM's backend for CPUs with full attention inside pictures."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return PictureAttentionBuilder
