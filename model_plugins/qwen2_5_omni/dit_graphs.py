"""Records layers of the diffusion transformer (`dit.py`) as CUDA graphs.

A run is a range of consecutive layers in which a position attends to its own block only. A pass applies a run to some
blocks of utterances; it copies hidden states, rotations and modulations into buffers with fixed addresses. Passes of
more blocks than `MOST_BLOCKS`, and layers that attend to neighbouring blocks, run without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_omni_ext.engine.graphs import Recorder, bucket_of, buckets

logger = init_logger(__name__)

MOST_BLOCKS = 32
"""Blocks of the largest recorded pass: parts of 48 codes of 8 utterances in the released shape."""

Through: TypeAlias = Callable[[range, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Applies layers. Takes the range of their numbers, hidden states [blocks, rows, block_size, hidden], rotary cosines
and sines [blocks, block_size, head_dim], the mask of frames that exist, bool [blocks, block_size], and modulations
[layers, 6, hidden]; returns hidden states. `rows` is 2: predictions with and without the codes."""


class DiTGraphs:
    """Records passes through successive layers as CUDA graphs, and replays them.

    Args:
        through: the pass to record.
        recorder: records the graphs.
        runs: for each pass the indices of its layers, which attend to their own block only.
        like: hidden states of one block [1, rows, block_size, hidden], for shape, dtype and device of the buffers.
        head_dim: size of a head.
        layers: number of all layers.
    """

    def __init__(
        self, through: Through, recorder: Recorder, *, runs: Sequence[range], like: Tensor, head_dim: int, layers: int
    ) -> None:
        self._through, self._recorder, self._runs = through, recorder, runs
        _, rows, size, width = like.shape
        self._hidden = like.new_zeros(MOST_BLOCKS, rows, size, width)
        self._cos, self._sin = (like.new_zeros(MOST_BLOCKS, size, head_dim) for _ in range(2))
        self._exists = torch.ones(MOST_BLOCKS, size, dtype=torch.bool, device=like.device)
        self._modulation = like.new_zeros(layers, 6, width)
        self._held: list[Tensor | None] = [None, None]
        self._replays: dict[tuple[range, int], Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._replays)

    @torch.inference_mode()
    def record(self) -> None:
        """Record a graph for each run and each number of blocks in `buckets(MOST_BLOCKS)`, the largest first."""
        for size in buckets(MOST_BLOCKS):
            for run in self._runs:
                try:
                    self._replays[run, size] = self._recorded(run, size)
                except RuntimeError as error:
                    logger.warning("token2wav: no CUDA graph for %d blocks, which will be slower: %s", size, error)

    def _recorded(self, run: range, size: int) -> Callable[[], None]:
        hidden, cos, sin, exists = (each[:size] for each in (self._hidden, self._cos, self._sin, self._exists))

        def body() -> None:
            hidden.copy_(self._through(run, hidden, cos, sin, exists, self._modulation))

        return self._recorder.record(body)

    def replay(
        self, run: range, hidden: Tensor, cos: Tensor, sin: Tensor, exists: Tensor, modulation: Tensor
    ) -> Tensor | None:
        """Apply a run of layers by replaying a graph. The other arguments are those of `Through`.

        Padding blocks of the graph are computed too, and change no other block.

        Returns:
            hidden states, in a view of a buffer that the next call overwrites; None if no graph is large enough.
        """
        count = len(hidden)
        size = bucket_of(count, [blocks for known, blocks in self._replays if known == run])
        if size is None:
            return None
        if self._held[0] is not cos:  # most runs of an evaluation have the blocks of the run before
            for buffer, given in ((self._cos, cos), (self._sin, sin), (self._exists, exists)):
                buffer[:count].copy_(given)
        if self._held[1] is not modulation:
            self._modulation.copy_(modulation)
        self._held = [cos, modulation]
        self._hidden[:count].copy_(hidden)
        self._replays[run, size]()
        return self._hidden[:count]
