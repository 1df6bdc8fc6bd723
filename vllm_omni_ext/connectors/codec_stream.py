"""Divides the frames of an answer into parts for a codec stage, and joins the sound of the stage's answers. Pure.

A plugin's flow gives the frames of its autoregressive stage to `CodecStream.take`, and the outputs of its codec stage
to `CodecStream.receive`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from vllm_omni_ext.connectors.chunks import ChunkCounter, ChunkSchedule
from vllm_omni_ext.connectors.playback import Playback
from vllm_omni_ext.plugins.flow import Produced, Submit
from vllm_omni_ext.wire.envelope import StageError

MOST_NEW = 64
"""Number of steps after which their frames are copied into one array, which takes a fraction of a millisecond."""

FIRST_BESIDE_OTHERS = 2
"""Least frames of the first part while the replica that makes the frames has other requests.

Measured: a first part of one frame of 80 ms is played in 57 ms; on a busy machine, the next part was late for 10 % to
33 % of the answers. With two frames it was late for 0 of 144."""

MOST_JOINED = 8
"""Largest number of frames in an output of the stage that makes them (`plugins.flow.Open.group`)."""

Frames = np.ndarray[Any, np.dtype[np.int64]]


class FrameLog:
    """Stores the frames of an answer."""

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
        samples: samples that the client has not received yet, as the codec stage returned them.
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


class CodecError(ValueError):
    """The codec stage has rejected a part, or sent an invalid answer.

    Args:
        retry: a later attempt may succeed (`StageError.retry`).
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class CodecStream:
    """Divides the frames of one answer into parts for a codec stage, and joins the samples of its answers.

    The codec stage accepts parts. The prompt of a part is its frames, flattened; the stage answers each part with the
    samples that became final with it, a sequence of the same length after every division into parts.

    Args:
        stage: name of the codec stage.
        schedule: number of frames in each part. With a rate, in frames per second, parts are due when a listener
            needs them, and a part becomes smaller if the listener could run out of sound before it is full. If the
            schedule is not streamed, a part is due after the time in which the frames of a whole part are played.
        sample_rate: Hz.
        stream: name of the stream (see `plugins.flow.Submit`).
        pooling_task: vLLM's task of a pooling stage; None: the stage takes sampling parameters.
        payload: the plugin's message with each part.
        look_ahead: number of frames that the codec needs after a frame for its samples. Until the last part, the
            answers then end `look_ahead` frames before the frames so far; the first part has at least one frame more.
    """

    def __init__(
        self,
        stage: str,
        schedule: ChunkSchedule,
        sample_rate: int,
        *,
        stream: str = "",
        pooling_task: str | None = None,
        payload: msgspec.Struct | None = None,
        look_ahead: int = 0,
    ) -> None:
        self.frames = FrameLog()
        self._part_of: dict[str, Any] = {
            "stage": stage,
            "stream": stream,
            "pooling_task": pooling_task,
            "payload": payload,
        }
        self._sample_rate = sample_rate
        self._look_ahead = look_ahead
        self._look_ahead_s = look_ahead / schedule.rate if schedule.rate else 0.0
        self._schedule = schedule
        played = schedule.rate if schedule.streamed else 0.0
        self._playback = Playback(played) if played else None
        self._chunks = ChunkCounter(schedule, divide=True)
        joined = min(MOST_JOINED, schedule.sizes[-1] or MOST_JOINED) if played or not schedule.streamed else 1
        self.joined: dict[str, Any] = {"group": joined, "rate": played}
        """Arguments of the `plugins.flow.Open` of the stage that makes the frames."""
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self._submitted = 0
        self._closed = False
        self._samples = 0
        self._again = 0  # samples of a replay that the client has already received
        self._playing_since: float | None = None

    def take(self, frames: Any, *, last: bool, at: float, load: float = 1.0) -> Submit | None:
        """Add the frames of one output at time `at`; return the next part if it is due.

        Args:
            frames: integers [n, groups]; None: the output has none.
            last: no frame follows. The last part may be empty.
            at: seconds of a monotonic clock, as `Produced.at`.
            load: number of requests on the replica that makes the frames, as `Produced.load`.

        Raises:
            ValueError: frames after the last ones.
        """
        before = self.frames.count
        if frames is not None:
            self.frames.add(frames)
        count = self.frames.count
        elapsed = None if self._playing_since is None else at - self._playing_since + self._look_ahead_s
        least = 1
        if not self._submitted:
            others = load > 1 and self._playback is not None
            least = self._look_ahead + (FIRST_BESIDE_OTHERS if others else 1)
        size = self._chunks.add(count - before, last=last, elapsed=elapsed, least=least)
        if size is None:
            return None
        start, self._submitted, self._closed = self._submitted, self._submitted + size, last
        return self._submit(start, self._due(start, at))

    def again(self) -> Submit:
        """Return all frames submitted so far as part 0, for `Flow.replay`; known samples are dropped by `receive`."""
        self._pending.clear()
        self._next, self._again = 0, self._samples
        return self._submit(0, None if self._playback is None else self._playback.again())

    def _due(self, start: int, at: float) -> float | None:
        if self._playback is not None:
            return self._playback.due(max(0, start - self._look_ahead), at)
        # The same time after `at` for each part, or a short last part would be due before the part in front of it.
        return at + self._schedule.size(0) / self._schedule.rate if self._schedule.rate else None

    def _submit(self, start: int, due: float | None) -> Submit:
        part, self._next = self._next, self._next + 1
        self._pending.append(_Pending(part, start, self._submitted, self._closed))
        prompt = self.frames.between(start, self._submitted).ravel().tolist()
        return Submit(part=part, prompt=prompt, last=self._closed, due=due, **self._part_of)

    def receive(self, event: Produced) -> Piece | None:
        """Handle an answer of the codec stage; return new sound, or None if the client has received all of it.

        Args:
            event: its payload is the samples of a part, one-dimensional.

        Raises:
            CodecError: an error of the codec stage, an answer without samples, or an answer out of order.
        """
        if isinstance(event.payload, StageError):
            raise CodecError(event.payload.reason, retry=event.payload.retry)
        if not self._pending or event.part != self._pending[0].part:
            expected = self._pending[0].part if self._pending else "nothing"
            raise CodecError(f"part {event.part} was answered where {expected} was expected")
        pending = self._pending.popleft()
        count = 0 if event.payload is None else len(event.payload)
        if event.payload is None or (pending.stop > pending.start and not count):
            raise CodecError("there are no samples for the frames")
        known = min(self._again, count)
        self._again -= known
        self._samples += count - known
        if count == known and not pending.last:
            return None
        spoken = pending.stop if pending.last else pending.stop - self._look_ahead
        new = event.payload[known:] if known else event.payload
        if self._playing_since is None:
            self._playing_since = event.at
        if self._playback is not None:
            self._playback.delivered((count - known) / self._sample_rate, spoken, event.at)
        return Piece(new, spoken, pending.last)
