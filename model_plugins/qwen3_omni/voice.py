"""Divides a reply's frames into parts for code2wav, and joins the sound of its answers. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vllm_omni_ext.connectors.chunks import ChunkCounter, ChunkSchedule
from vllm_omni_ext.connectors.playback import Playback
from vllm_omni_ext.plugins.flow import Produced, Submit
from vllm_omni_ext.wire.envelope import StageError

CODE2WAV = "code2wav"
POOLING_TASK: Literal["token_embed"] = "token_embed"
"""Pooling task of every code2wav request. Model Runner V2, vLLM's default on GPUs, accepts only its own tasks (not
"plugin"). This task reads no prefix cache and leaves the pooler's output unchanged, on both runners."""

MOST_NEW = 64
"""Number of steps after which their frames are copied into one array, which takes a fraction of a millisecond."""

FIRST_BESIDE_OTHERS = 2
"""Least frames of the first part while the talker has other requests. A first part of one frame is played in 57 ms; on
a busy machine, the next part was late for 10 % to 33 % of the answers. With two frames it was late for 0 of 144."""

Frames = np.ndarray[Any, np.dtype[np.int64]]


class FrameLog:
    """Stores the frames of a reply."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: Frames = np.zeros((0, 0), np.int64)
        self._new: list[Any] = []

    def add(self, frames: Any) -> None:
        """Append frames, integers [n, groups]."""
        self._new.append(frames)
        self.count += int(frames.shape[0])  # `len` of a tensor takes several calls of Python functions
        if len(self._new) >= MOST_NEW:
            self._store()

    def between(self, start: int, stop: int) -> Frames:
        """Return frames `start` to `stop`, [stop - start, groups], as a view; stored rows do not change later."""
        if self._new:
            self._store()
        return self._rows[start:stop]

    def _store(self) -> None:
        new = [np.asarray(frames, np.int64) for frames in self._new]
        self._rows = np.concatenate([self._rows, *new] if len(self._rows) else new)
        self._new.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """New sound for the client.

    Attributes:
        samples: samples that the client has not received yet.
        frames: number of frames spoken up to the end of this piece.
        last: no sound follows.
    """

    samples: Any
    frames: int
    last: bool


@dataclass(slots=True)  # a frozen class would take twice as long to construct
class _Pending:
    part: int
    start: int
    stop: int
    last: bool


class VoiceError(ValueError):
    """Code2wav has rejected a part, or sent an invalid answer."""


class VocoderStream:
    """Divides a reply's frames into parts for code2wav and joins the samples of the answers."""

    def __init__(self, schedule: ChunkSchedule, sample_rate: int) -> None:
        self.frames = FrameLog()
        self._sample_rate = sample_rate
        self._playback = Playback(schedule.rate) if schedule.rate else None
        self._chunks = ChunkCounter(schedule)
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self._submitted = 0
        self._closed = False
        self._samples = 0
        self._again = 0  # samples of a replay that the client has already received
        self._playing_since: float | None = None

    def take(self, frames: Any, *, last: bool, at: float, load: float = 1.0) -> Submit | None:
        """Add the talker's frames of one step at time `at`; return the next part if it is due.

        Args:
            last: the talker has ended.
            load: number of requests on the talker's replica.
        """
        before = self.frames.count
        if frames is not None:
            self.frames.add(frames)
        count = self.frames.count
        elapsed = None if self._playing_since is None else at - self._playing_since
        least = FIRST_BESIDE_OTHERS if load > 1 and self._playback is not None and not self._submitted else 1
        if self._chunks.add(count - before, last=last, elapsed=elapsed, least=least) is None:
            return None
        start, self._submitted, self._closed = self._submitted, count, last
        due = None if self._playback is None else self._playback.due(start, at)
        return self._submit(start, due)

    def again(self) -> Submit:
        """Return all frames submitted so far as the first part of a new stream, on another replica."""
        self._pending.clear()
        self._next, self._again = 0, self._samples
        return self._submit(0, None if self._playback is None else self._playback.again())

    def _submit(self, start: int, due: float | None) -> Submit:
        part, self._next = self._next, self._next + 1
        self._pending.append(_Pending(part, start, self._submitted, self._closed))
        prompt = self.frames.between(start, self._submitted).ravel().tolist()
        return Submit(stage=CODE2WAV, part=part, prompt=prompt, pooling_task=POOLING_TASK, last=self._closed, due=due)

    def receive(self, event: Produced) -> Piece | None:
        """Handle an answer of code2wav; return new sound, or None if the client has received all of it.

        Raises:
            VoiceError: an error of code2wav, an answer without samples, or an answer out of order.
        """
        if isinstance(event.payload, StageError):
            raise VoiceError(event.payload.reason)
        if not self._pending or event.part != self._pending[0].part:
            expected = self._pending[0].part if self._pending else "nothing"
            raise VoiceError(f"part {event.part} was answered where {expected} was expected")
        pending = self._pending.popleft()
        count = 0 if event.payload is None else len(event.payload)
        if event.payload is None or (pending.stop > pending.start and not count):
            raise VoiceError("there are no samples for the frames")
        known = min(self._again, count)
        self._again -= known
        self._samples += count - known
        if count == known and not pending.last:
            return None
        new = event.payload[known:] if known else event.payload
        if self._playing_since is None:
            self._playing_since = event.at
        if self._playback is not None:
            self._playback.delivered((count - known) / self._sample_rate, pending.stop, event.at)
        return Piece(new, pending.stop, pending.last)
