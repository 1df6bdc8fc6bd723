"""Keeps the states of streams between their parts, in a stage that decodes parts, and frees the states."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vllm_omni_ext.wire.stage_input import END, PartHeader

Answer: TypeAlias = Tensor | str
"""Samples, or the reason why there are none."""


@dataclass
class Stream:
    """A stream whose last part has not come; `state` is the decoder's."""

    state: Any
    used: float
    parts: int = 0


@dataclass
class Job:
    """The parts of one stream that are decoded in one call; `members` are their indices in the call."""

    stream: Stream
    members: list[int]
    chunks: list[Tensor]
    last: bool = False


class PartStreams(ABC):
    """Decodes parts of streams, several streams and several parts of a stream in one call.

    A stream's state is freed after its last part, after an END header, after a part out of order, and when no part has
    arrived for `idle_s` seconds (checked in every call).

    Args:
        idle_s: seconds without a part after which a stream's state is freed.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @abstractmethod
    def _open(self, header: PartHeader) -> Any:
        """Return the state of a new stream; ValueError, with a reason for the client, if there can be none."""

    @abstractmethod
    def _run(self, jobs: Sequence[Job], answers: list[Answer]) -> None:
        """Decode the chunks of all jobs, and write the answer of each part to its index in `answers`."""

    def decode(self, headers: Sequence[PartHeader], chunks: Sequence[Tensor | str]) -> list[Answer]:
        """Decode the parts of one step, in any order.

        Args:
            chunks: for each part its codes, int64 `[frames, groups]`, or the reason why they cannot be decoded.

        Returns:
            for each part the samples that became final with it, `[samples]` float32, or the reason why there are none.
        """
        now = self._clock()
        self._drop_idle(now)
        answers: list[Answer] = [""] * len(headers)
        jobs: dict[str, Job] = {}
        for i in sorted(range(len(headers)), key=lambda i: (headers[i].part == END, headers[i].part)):
            if headers[i].part == END:
                self._streams.pop(headers[i].stream, None)
                answers[i] = torch.empty(0)
            elif (problem := self._enlist(i, headers[i], chunks[i], jobs, now)) is not None:
                answers[i] = problem
        self._run(list(jobs.values()), answers)
        for name in [name for name, job in jobs.items() if job.last]:
            self._streams.pop(name, None)
        return answers

    def _drop_idle(self, now: float) -> None:
        for name in [name for name, stream in self._streams.items() if now - stream.used > self._idle_s]:
            del self._streams[name]

    def _enlist(self, i: int, header: PartHeader, chunk: Tensor | str, jobs: dict[str, Job], now: float) -> str | None:
        """Add part `i` of the step to its stream's job (the stream's parts of this step).

        If it is not the stream's next part, free the stream and return the error text.
        """
        if header.part == 0:
            try:
                self._streams[header.stream] = Stream(self._open(header), now)
            except ValueError as error:
                self._streams.pop(header.stream, None)
                return str(error)
        stream, job = self._streams.get(header.stream), jobs.get(header.stream)
        if stream is None or (job is not None and job.last):
            return f"part {header.part} came for a stream that is not open"
        if isinstance(chunk, str) or header.part != stream.parts:
            del self._streams[header.stream]
            return chunk if isinstance(chunk, str) else f"part {header.part} came where {stream.parts} was due"
        stream.parts, stream.used = header.part + 1, now
        job = job or jobs.setdefault(header.stream, Job(stream, [], []))
        job.members.append(i)
        job.chunks.append(chunk)
        job.last = header.last
        return None
