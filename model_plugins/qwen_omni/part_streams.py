"""Base class that decodes codec streams in the last stage, and keeps a stream's state from part to part.

A stream is the sound of one answer. It is sent as parts: separate engine requests with consecutive frames, numbered by
a `wire.stage_input.PartHeader`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vllm_omni_ext.wire.envelope import StageError
from vllm_omni_ext.wire.stage_input import END, PartHeader

Answer: TypeAlias = Tensor | str | StageError
"""The result of one part: its samples, float32 [samples], or an error, as text or as a message."""


MOST_COUNTED = 1 / 8
"""Largest part of `idle_s` by which one call of `PartStreams.decode` can make streams older."""


class NoRoom(ValueError):
    """The stage has no room for a stream because of other streams; a later attempt may succeed."""


@dataclass(eq=False)
class Stream:
    """A stream whose last part has not been decoded.

    Attributes:
        state: the decoder's state, as `PartStreams._open` has returned it.
        used: time of the latest part, as `PartStreams._now` counts it.
        parts: number of parts received so far.
        parked: the state is in host memory.
    """

    state: Any
    used: float
    parts: int = 0
    parked: bool = False


@dataclass
class Job:
    """The parts of one stream that are decoded in one call of `PartStreams.decode`.

    Attributes:
        members: index of each part in the arguments of the call, in stream order.
        chunks: codes of each part, int64 [frames, groups].
        last: the stream ends with these parts.
    """

    stream: Stream
    members: list[int]
    chunks: list[Tensor]
    last: bool = False


class PartStreams(ABC):
    """Decodes the parts of all streams of an engine step in one call; a subclass defines the decoder.

    A stream's state is freed after its last part, after a header whose `part` is `END`, after a part out of order, and
    when no part has arrived for `idle_s` seconds (checked in every call). Of the time between two calls at most an
    eighth of `idle_s` counts: the stage may have been asleep, and streams continue after that. The answer to a later
    part of a freed stream has `StageError.lost`, and the stream is sent again: the stage before may have been asleep.

    More streams may be open than requests run, e.g. if the stage before has more replicas. The states of `most` streams
    are on the device. Those of the other streams, which were used least recently, are in host memory (parked).

    Args:
        idle_s: seconds without a part, while the stage decodes, after which a stream's state is freed.
        most: number of streams for whose states memory on the device is planned.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, *, idle_s: float, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._most = most
        self._clock = clock
        self._called = clock()
        self._now = 0.0
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @abstractmethod
    def _open(self, header: PartHeader) -> Any:
        """Return the decoder's state of a new stream.

        Args:
            header: header of the stream's part 0, with its parameters.

        Raises:
            ValueError: the stream cannot be decoded; the client receives the message.
            NoRoom: it cannot be decoded now.
        """

    def _size(self, state: Any) -> float:
        """Return the memory of a state, as a multiple of the memory that is planned for a stream."""
        return 1.0

    @abstractmethod
    def _move(self, state: Any, *, to_host: bool) -> None:
        """Move the tensors of a stream's state to host memory, or back to the device."""

    @abstractmethod
    def _run(self, jobs: Sequence[Job], answers: list[Answer]) -> None:
        """Decode the chunks of all jobs, and write the answer of each chunk to `answers`.

        Args:
            jobs: the parts of each stream in this call; `Job.members` are the indices of their answers.
            answers: of all parts of the call.
        """

    def decode(self, headers: Sequence[PartHeader], chunks: Sequence[Tensor | str]) -> list[Answer]:
        """Decode the parts of one engine step.

        Args:
            headers: header of each part, in any order.
            chunks: for each part its codes, int64 `[frames, groups]`, or the error text of invalid codes.

        Returns:
            for each part the samples that became final with it, `[samples]` float32, or an error. The result for a
            header whose `part` is `END` is empty.
        """
        self._count_time()
        self._drop_idle()
        answers: list[Answer] = [""] * len(headers)
        jobs: dict[str, Job] = {}
        for i in sorted(range(len(headers)), key=lambda i: (headers[i].part == END, headers[i].part)):
            if headers[i].part == END:
                self._streams.pop(headers[i].stream, None)
                answers[i] = torch.empty(0)
            elif (problem := self._enlist(i, headers[i], chunks[i], jobs)) is not None:
                answers[i] = problem
        for some in self._divided(jobs.values()):
            self._unpark([job.stream for job in some])
            self._run(some, answers)
        for name in [name for name, job in jobs.items() if job.last]:
            self._streams.pop(name, None)
        return answers

    def _divided(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Divide jobs into lists whose states fit on the device together."""
        some: list[Job] = []
        size = 0.0
        for job in jobs:
            more = self._size(job.stream.state)
            if some and size + more > self._most:
                yield some
                some, size = [], 0.0
            some.append(job)
            size += more
        if some:
            yield some

    def _unpark(self, needed: Sequence[Stream]) -> None:
        """Move the states of streams to the device, and those of other streams off it if there are too many."""
        parked = [stream for stream in needed if stream.parked]
        self._park(sum(self._size(stream.state) for stream in parked), needed)
        for stream in parked:
            self._move(stream.state, to_host=False)
            stream.parked = False

    def _park(self, more: float, needed: Sequence[Stream] = ()) -> None:
        """Move states to host memory until there is room for `more` on the device; those of `needed` streams stay."""
        here = [stream for stream in self._streams.values() if not stream.parked]
        size = more + sum(self._size(stream.state) for stream in here)
        for stream in sorted(here, key=lambda each: each.used):
            if size <= self._most:
                return
            if stream not in needed:
                self._move(stream.state, to_host=True)
                stream.parked = True
                size -= self._size(stream.state)

    def _count_time(self) -> None:
        """Add the time since the last call to `_now`, but not the time of a sleep."""
        called = self._clock()
        self._now += min(called - self._called, self._idle_s * MOST_COUNTED)
        self._called = called

    def _drop_idle(self) -> None:
        for name in [name for name, stream in self._streams.items() if self._now - stream.used > self._idle_s]:
            del self._streams[name]

    def _enlist(self, i: int, header: PartHeader, chunk: Tensor | str, jobs: dict[str, Job]) -> Answer | None:
        """Add part `i` of the call to the `Job` of its stream; part 0 opens the stream.

        Returns:
            None; or an error if the part is invalid or is not the next one of its stream, which is then freed.
        """
        if header.part == 0:
            self._park(1)
            try:
                self._streams[header.stream] = Stream(self._open(header), self._now)
            except ValueError as error:
                self._streams.pop(header.stream, None)
                return StageError(str(error), retry=isinstance(error, NoRoom))
        stream, job = self._streams.get(header.stream), jobs.get(header.stream)
        if stream is None or (job is not None and job.last):
            return StageError(f"part {header.part} came for a stream that is not open", lost=stream is None)
        if isinstance(chunk, str) or header.part != stream.parts:
            del self._streams[header.stream]
            return chunk if isinstance(chunk, str) else f"part {header.part} came where {stream.parts} was due"
        stream.parts, stream.used = header.part + 1, self._now
        job = job or jobs.setdefault(header.stream, Job(stream, [], []))
        job.members.append(i)
        job.chunks.append(chunk)
        job.last = header.last
        return None
