"""Passes of the vocoder as CUDA graphs: fixed numbers of frames and streams, in memory that stays.

A stream's state is its own tensor, made with the stream and freed with it. A pass copies the states of its streams into
memory of the graph and back, a few MB each, so that any streams can share any graph. Numbers of frames that are not
recorded are put together from those that are.
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
"""Numbers of frames that are recorded for streams under way: the sizes in which parts come."""

FIRST_FRAMES = (1,)
"""The same for streams that begin."""

MOST_STREAMS = 32
MOST_FRAMES = 128
"""Bounds of one recorded pass, and so of its memory (released shape, float32: 0.5 GB, and 5 MB a stream)."""

Filled: TypeAlias = tuple[int, ...]
"""How many kept inputs of each upsampling layer are real: the shapes of a pass depend on it."""

Pass: TypeAlias = Callable[[Tensor, Tensor, Tensor, Filled], Tensor]
"""Samples `[B, samples]` float32 of codes `[B, T, groups]`, states `[B, numel]`, which it updates, and positions."""


@dataclass(frozen=True)
class _Key:
    frames: int
    streams: int
    filled: Filled


class VocoderGraphs:
    """Records passes and repeats them.

    Args:
        compute: the pass that is recorded.
        like: has the dtype and device of the states.
        numel: numbers of a stream's state.
        streams: streams that may share a pass, at most `MOST_STREAMS`.
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
        """Record all passes, the largest first, for streams that begin and streams under way."""
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
        """The most frames, up to `left`, of a recorded pass for streams of this kind; None if there is none."""
        return max((key.frames for key in self._replays if key.filled == filled and key.frames <= left), default=None)

    def most_streams(self, frames: int, filled: Filled) -> int:
        """The most streams of a recorded pass of so many frames; 0 if there is none."""
        return max((k.streams for k in self._replays if (k.frames, k.filled) == (frames, filled)), default=0)

    def run(self, codes: Tensor, states: Sequence[Tensor], positions: Sequence[int], filled: Filled) -> Tensor | None:
        """Samples `[B, samples]` of `codes` `[B, T, groups]` on the host; None if there is no graph for them.

        Args:
            states: of each stream, `[numel]`; updated.
            positions: frames that each stream had consumed before.
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
        self._numbers[: len(sent)].copy_(sent, non_blocking=True)  # read at once: the memory is not pinned
        torch.stack(list(states), out=self._states[:count])
        replay()
        torch._foreach_copy_(list(states), list(self._states[:count].unbind()))
        return waves[:count].clone()
