"""What code2wav was given of a reply, and what came back. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vllm_omni_ext.connectors.chunks import ChunkSchedule, ChunkWriter
from vllm_omni_ext.orchestrator.flow import Feed, Produced

CODE2WAV = "code2wav"
POOLING_TASK: Literal["token_embed"] = "token_embed"
"""The task every request names. vLLM's V2 model runner, its default on GPUs, accepts only its own tasks (not "plugin");
this one reads no prefix cache and leaves the output as the pooler returns it, on both runners."""

Frames = np.ndarray[Any, np.dtype[np.int64]]


class FrameLog:
    """The frames of a reply, in an array that grows."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: Frames = np.zeros((0, 0), np.int64)

    def add(self, frames: Any) -> None:
        """Append frames, integers [n, groups]."""
        new = np.asarray(frames)
        stop = self.count + len(new)
        if stop > len(self._rows):
            grown = np.zeros((2 * stop, new.shape[1]), np.int64)
            if self.count:
                grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : stop] = new
        self.count = stop

    def between(self, start: int, stop: int) -> Frames:
        """Frames `start` to `stop`, [stop - start, groups]: a view of rows that never change again."""
        return self._rows[start:stop]


@dataclass(frozen=True, slots=True)
class Piece:
    """Sound that may go to the client.

    Attributes:
        samples: those that it has not got yet.
        frames: how many frames are spoken with it.
        last: nothing follows.
    """

    samples: Any
    frames: int
    last: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    part: int
    start: int
    stop: int
    last: bool


class VoiceError(ValueError):
    """An answer of code2wav that is none."""


class Voice:
    """Cuts a reply's frames into parts for code2wav and puts the samples together again."""

    def __init__(self, schedule: ChunkSchedule) -> None:
        self.frames = FrameLog()
        self._writer = ChunkWriter[int](schedule)
        self._asked: deque[_Asked] = deque()
        self._next = 0
        self._given = 0
        self._closed = False
        self._samples = 0
        self._again = 0  # samples still to come that the client has got already
        self._playing_since: float | None = None

    def take(self, frames: Any, *, last: bool, at: float) -> Feed | None:
        """Take what the talker made in one step at time `at`; return the next part if it is due."""
        before = self.frames.count
        if frames is not None:
            self.frames.add(frames)
        elapsed = None if self._playing_since is None else at - self._playing_since
        chunk = self._writer.write(range(before, self.frames.count), last=last, elapsed=elapsed)
        if chunk is None:
            return None
        start, self._given, self._closed = self._given, self._given + len(chunk.items), last
        return self._feed(start)

    def again(self) -> Feed:
        """Everything given so far, for a replica that knows nothing of it."""
        self._asked.clear()
        self._next, self._again = 0, self._samples
        return self._feed(0)

    def _feed(self, start: int) -> Feed:
        part, self._next = self._next, self._next + 1
        self._asked.append(_Asked(part, start, self._given, self._closed))
        prompt = self.frames.between(start, self._given).ravel().tolist()
        return Feed(CODE2WAV, part, prompt, {"task": POOLING_TASK}, self._closed)

    def heard(self, event: Produced) -> Piece | None:
        """Take an answer; None if all of it is known to the client.

        Raises:
            VoiceError: a refusal, an answer without samples, or one that is not the next.
        """
        if isinstance(event.payload, str):
            raise VoiceError(event.payload)
        if not self._asked or event.part != self._asked[0].part:
            due = self._asked[0].part if self._asked else "nothing"
            raise VoiceError(f"part {event.part} was answered where {due} was due")
        asked = self._asked.popleft()
        if event.payload is None or (asked.stop > asked.start and not len(event.payload)):
            raise VoiceError("there are no samples for the frames")
        new = event.payload[self._again :]
        self._again = max(0, self._again - len(event.payload))
        self._samples += len(new)
        if not len(new) and not asked.last:
            return None
        if self._playing_since is None:
            self._playing_since = event.at
        return Piece(new, asked.stop, asked.last)
