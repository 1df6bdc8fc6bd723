"""Decodes the parts of streams with the vocoder, keeps the streams' states between parts, and frees the states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder, VocoderState
from vllm_omni_ext.wire.stage_input import END, PartHeader

Answer: TypeAlias = Tensor | str
"""Samples, or the reason why there are none."""


@dataclass
class _Stream:
    state: VocoderState
    used: float
    parts: int = 0


@dataclass
class _Job:
    """The parts of one stream that are decoded in one call; `members` are their indices in the call."""

    stream: _Stream
    members: list[int]
    chunks: list[Tensor]
    last: bool = False


class VocoderStreams:
    """Decodes parts of streams, several streams and several parts of a stream in one call.

    A stream's state is freed after its last part, after an END header, after a part out of order, and when no part has
    arrived for `idle_s` seconds (checked in every call).

    Args:
        idle_s: seconds without a part after which a stream's state is freed.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, vocoder: Vocoder, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._vocoder = vocoder
        self._idle_s = idle_s
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self.frames = 0
        """Number of frames decoded so far, in all streams."""

    def __len__(self) -> int:
        return len(self._streams)

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
        jobs: dict[str, _Job] = {}
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

    def _enlist(self, i: int, header: PartHeader, chunk: Tensor | str, jobs: dict[str, _Job], now: float) -> str | None:
        """Add a part to its stream's job; if it is not the stream's next part, free the stream and return a reason."""
        if header.part == 0:
            self._streams[header.stream] = _Stream(self._vocoder.new_state(), now)
        stream, job = self._streams.get(header.stream), jobs.get(header.stream)
        if stream is None or (job is not None and job.last):
            return f"part {header.part} came for a stream that is not open"
        if isinstance(chunk, str) or header.part != stream.parts:
            del self._streams[header.stream]
            return chunk if isinstance(chunk, str) else f"part {header.part} came where {stream.parts} was due"
        stream.parts, stream.used = header.part + 1, now
        job = job or jobs.setdefault(header.stream, _Job(stream, [], []))
        job.members.append(i)
        job.chunks.append(chunk)
        job.last = header.last
        return None

    def _run(self, jobs: Sequence[_Job], answers: list[Answer]) -> None:
        before = [job.stream.state.frames for job in jobs]
        waves = self._vocoder.decode(
            [torch.cat(job.chunks) for job in jobs], [job.stream.state for job in jobs], [job.last for job in jobs]
        )
        for job, wave, frames in zip(jobs, waves, before, strict=True):
            first = start = self._vocoder.samples_after(frames)
            for i, chunk in zip(job.members, job.chunks, strict=True):
                frames += len(chunk)
                end = self._vocoder.samples_after(frames)
                answers[i] = wave[start - first : end - first]
                start = end
            self.frames += sum(map(len, job.chunks))
