"""Streams of one-step requests: which engine request is which part of whose stream."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.pooling_params import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from vllm_omni_ext.orchestrator.engine_requests import engine_request
from vllm_omni_ext.orchestrator.flow import Feed
from vllm_omni_ext.wire.parts import FILLER, PartMark


@dataclass(frozen=True, slots=True)
class Part:
    """One part on its way. `number` counts from 0 in its stream."""

    request_id: str
    stage: str
    number: int
    last: bool


@dataclass
class _Stream:
    name: str
    pooling: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)


class Parts:
    """All streams of one orchestrator, at most one for each request and stage."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._asked: dict[str, Part] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._streams)

    def request(self, request_id: str, feed: Feed) -> EngineCoreRequest:
        """The engine request for a part. Part 0 begins a stream; what was on its way of an older one is forgotten."""
        key = request_id, feed.stage
        if feed.part == 0:
            self._forget(key)
            self._streams[key] = _Stream(f"{request_id}/{next(self._numbers)}", feed.pooling)
        stream = self._streams[key]
        mark = PartMark(stream.name, feed.part, feed.last, empty=not feed.prompt)
        engine_id = f"{stream.name}/{feed.part}"
        stream.asked.add(engine_id)
        self._asked[engine_id] = Part(request_id, feed.stage, feed.part, feed.last)
        return _request(engine_id, feed.prompt or FILLER, feed.pooling, mark)

    def answered(self, output: EngineCoreOutput) -> Part | None:
        """Which part an output answers; None if it is no part's. The output then has the id of the request."""
        part = self._asked.pop(output.request_id, None)
        if part is not None:
            self._streams[part.request_id, part.stage].asked.discard(output.request_id)
            output.request_id = part.request_id
        return part

    def end(self, request_id: str, stage: str) -> tuple[list[str], EngineCoreRequest | None]:
        """Forget a stream: the engine requests that are on their way, and one that makes the stage forget it too."""
        stream = self._forget((request_id, stage))
        if stream is None:
            return [], None
        mark = PartMark.end(stream.name)
        return sorted(stream.asked), _request(f"{stream.name}/end", FILLER, stream.pooling, mark)

    def finished(self, request_id: str, stage: str) -> None:
        """The last part was answered; the stage has forgotten the stream already."""
        self._forget((request_id, stage))

    def _forget(self, key: tuple[str, str]) -> _Stream | None:
        stream = self._streams.pop(key, None)
        for engine_id in () if stream is None else stream.asked:
            del self._asked[engine_id]
        return stream


def _request(engine_id: str, prompt: list[int], pooling: Mapping[str, Any], mark: PartMark) -> EngineCoreRequest:
    params = PoolingParams(**pooling, extra_kwargs=mark.as_extra())
    return engine_request(engine_id, list(prompt), pooling=params)
