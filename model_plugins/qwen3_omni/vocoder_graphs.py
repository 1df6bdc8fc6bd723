"""Records the vocoder's passes as CUDA graphs: fixed numbers of frames and streams, in buffers with fixed addresses.

A stream's state is a separate tensor, created with the stream and freed with it. A pass copies the states of its
streams (a few MB each) into the graph's buffer and back, so that any streams can share any graph. Other numbers of
frames are divided into recorded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_omni_ext.engine.graphs import Recorder, bucket_of, buckets

logger = init_logger(__name__)

FRAMES = (25, 16, 8, 4, 2, 1)
"""Numbers of frames for which passes of running streams are recorded: the usual sizes of parts."""

FIRST_FRAMES = (1,)
"""Numbers of frames for which passes of new streams are recorded."""

MOST_STREAMS = 32
MOST_FRAMES = 128
"""Limits of one recorded pass: streams, and frames of all streams. They limit its memory (released shape, float32:
0.5 GB, and 5 MB per stream)."""

Filled: TypeAlias = tuple[int, ...]
"""For each upsampling layer, how many of its kept inputs are real, not zeros before the stream's start. The shapes of a
pass depend on these numbers."""

Pass: TypeAlias = Callable[[Tensor, Tensor, Tensor, Filled], Tensor]
"""A pass: takes codes `[B, T, groups]`, states `[B, numel]` (updated in place), positions `[B]` and `Filled`; returns
samples `[B, samples]` float32."""


@dataclass(frozen=True)
class _Key:
    frames: int
    streams: int
    filled: Filled


class VocoderGraphs:
    """Records passes of the vocoder as graphs, and replays them.

    Args:
        compute: the pass to record.
        recorder: records the graphs.
        like: a tensor with the dtype and device of the states.
        numel: number of elements of a stream's state.
        groups: codes per frame.
        streams: largest number of streams in a pass; `MOST_STREAMS` limits it.
    """

    def __init__(
        self, compute: Pass, recorder: Recorder, *, like: Tensor, numel: int, groups: int, streams: int
    ) -> None:
        self._compute, self._recorder, self._groups = compute, recorder, groups
        self._sizes = buckets(min(streams, MOST_STREAMS))
        most, device = self._sizes[0], like.device
        self._states = torch.zeros((most, numel), dtype=like.dtype, device=device)
        self._numbers = torch.zeros(most + MOST_FRAMES * groups, dtype=torch.int64, device=device)
        self._replays: dict[_Key, tuple[Callable[[], None], Tensor]] = {}

    def __len__(self) -> int:
        return len(self._replays)

    @torch.inference_mode()
    def record(self, begins: Filled, goes_on: Filled) -> None:
        """Record all passes, the largest first.

        Args:
            begins: `Filled` of a stream without frames so far.
            goes_on: `Filled` of a stream that has passed its start.
        """
        keys = [_Key(frames, size, goes_on) for frames in FRAMES for size in self._sizes]
        keys += [_Key(frames, size, begins) for frames in FIRST_FRAMES for size in self._sizes if begins != goes_on]
        for key in sorted(keys, key=lambda key: key.frames * key.streams, reverse=True):
            if key.frames * key.streams > MOST_FRAMES:
                continue
            try:
                self._replays[key] = self._recorded(key)
            except RuntimeError as error:
                logger.warning("code2wav: no CUDA graph for %s, which will be slower: %s", key, error)

    def _recorded(self, key: _Key) -> tuple[Callable[[], None], Tensor]:
        most, streams = self._sizes[0], key.streams
        codes = self._numbers[most : most + streams * key.frames * self._groups].view(streams, key.frames, self._groups)
        states, positions = self._states[:streams], self._numbers[:streams]
        waves = self._compute(codes, states, positions, key.filled).clone()

        def body() -> None:
            waves.copy_(self._compute(codes, states, positions, key.filled))

        return self._recorder.record(body), waves

    def frames(self, left: int, filled: Filled) -> int | None:
        """Return the largest number of frames, at most `left`, of a recorded pass with `filled`; None without one."""
        return max((key.frames for key in self._replays if key.filled == filled and key.frames <= left), default=None)

    def most_streams(self, frames: int, filled: Filled) -> int:
        """Return the most streams of a captured graph with this many frames and this `filled`; 0 without one."""
        return max((k.streams for k in self._replays if (k.frames, k.filled) == (frames, filled)), default=0)

    def run(self, codes: Tensor, states: Sequence[Tensor], positions: Sequence[int], filled: Filled) -> Tensor | None:
        """Return samples `[B, samples]` of `codes` `[B, T, groups]` on the host; None if no recorded pass fits.

        Args:
            states: state of each stream, `[numel]`; updated in place.
            positions: number of frames that each stream had consumed before.
        """
        count, frames, _ = codes.shape
        size = bucket_of(count, [k.streams for k in self._replays if (k.frames, k.filled) == (frames, filled)])
        if size is None:
            return None
        replay, waves = self._replays[_Key(frames, size, filled)]
        most = self._sizes[0]
        sent = torch.zeros(most + size * frames * self._groups, dtype=torch.int64)
        sent[:count] = torch.tensor(positions)
        sent[most : most + codes.numel()] = codes.flatten()
        self._numbers[: len(sent)].copy_(sent, non_blocking=True)  # unpinned memory: copied on return
        torch.stack(list(states), out=self._states[:count])
        replay()
        torch._foreach_copy_(list(states), list(self._states[:count].unbind()))
        return waves[:count].clone()
