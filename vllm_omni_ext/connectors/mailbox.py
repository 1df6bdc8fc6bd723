"""What has arrived for a consumer, and who waits for it: the state behind every `Consumer`. Thread-safe; no socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.connectors.base import (
    Arrived,
    ChunkFailed,
    ChunkKey,
    ConnectorError,
    DeadlinePassed,
    Forgotten,
    NoSuchChunk,
    ProducerLost,
)
from vllm_omni_ext.wire import chunks as wire


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk that can be read; what `payload` is, the connector knows."""

    head: wire.Head
    payload: Any
    source: str


@dataclass(slots=True)
class _Open:
    source: str
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)  # and not kept here
    last: int | None = None
    failure: ConnectorError | None = None
    reading: int = 0  # threads that are between `begin` and `end`
    farewell: wire.Forget | wire.Release | None = None  # sent when nobody is reading


class Mailbox:
    """Open requests of one consumer.

    Args:
        edge: chunks of other edges are refused.
        say: sends a message to a source; is called without the lock and does not wait.
        arrived: see `base.Arrived`.
        window: bytes that may be sent ahead, for each request; 0: payloads stay with the producer, and what has arrived
            may be read again without asking it.
    """

    def __init__(
        self, edge: str, *, say: Callable[[str, wire.ToProducer], None], arrived: Arrived, window: int
    ) -> None:
        self._edge = edge
        self._say = say
        self._arrived = arrived
        self._window = window
        self._changed = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._leaving = 0  # requests that are over, but somebody is reading
        self._closed = False

    def __len__(self) -> int:
        return len(self._open) + self._leaving

    def arrivals(self) -> list[Arrival]:
        """What has arrived and was not forgotten."""
        with self._changed:
            return [arrival for request in self._open.values() for arrival in request.arrivals.values()]

    def open(self, name: str, source: str) -> None:
        """Ask `source` for a request."""
        with self._changed:
            self._check_alive()
            known = self._open.get(name)
            if known is not None and not isinstance(known.failure, ProducerLost):
                if known.source != source:
                    raise ValueError(f"{name} is open at another producer")
                return
            self._open[name] = _Open(source)
        self._say(source, wire.Open(request=name, window=self._window))

    def deliver(self, head: wire.Head, payload: Any, source: str) -> None:
        """A chunk has arrived."""
        with self._changed:
            request = self._open.get(head.request)
            if request is None or request.source != source or request.failure is not None:
                return
            unasked = head.index in request.arrivals
            request.arrivals[head.index] = Arrival(head, payload, source)
            if head.last:
                request.last = head.index
            self._changed.notify_all()
        if unasked and self._window:
            self._say(source, wire.Taken(request=head.request, nbytes=head.nbytes))
        self._arrived(head.request)

    def failed(self, name: str, source: str, reason: str) -> None:
        """The producer has given the request up."""
        self._over(name, source, ChunkFailed(f"{name}: the producer failed: {reason}", reason=reason))

    def gone(self, name: str, source: str) -> None:
        """The producer has forgotten the request."""
        self._over(name, source, Forgotten(f"{name} was forgotten by its producer"))

    def lost(self, source: str, reason: str) -> None:
        """There is no connection to the producer any more. What has arrived can still be read."""
        with self._changed:
            hit = [name for name, r in self._open.items() if r.source == source and r.failure is None]
            for name in hit:
                self._open[name].failure = ProducerLost(f"{name}: {reason}")
            self._changed.notify_all()
        for name in hit:
            self._arrived(name)

    def begin(self, key: ChunkKey, deadline: float) -> tuple[Arrival, _Open]:
        """Wait for a chunk until `deadline` (monotonic) and begin to read it; `end` must follow, with the second."""
        if key.edge != self._edge:
            raise ValueError(f"{key}: this is the consumer of edge '{self._edge}'")
        with self._changed:
            request = self._find(key)
            wanted = False
            while (arrival := request.arrivals.get(key.index)) is None:
                self._check(key, request)
                if not wanted and (key.index in request.read or (self._window and request.arrivals)):
                    wanted = True  # it was read before, or what nobody has read yet fills the window
                    self._say(request.source, wire.Want(request=key.request, index=key.index))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlinePassed(f"{key} did not come in time")
                self._changed.wait(left)
            if self._window:
                del request.arrivals[key.index]
                request.read.add(key.index)
            request.reading += 1
        if self._window:
            self._say(arrival.source, wire.Taken(request=key.request, nbytes=arrival.head.nbytes))
        return arrival, request

    def end(self, request: _Open) -> None:
        """The chunk has been read."""
        with self._changed:
            request.reading -= 1
            farewell = None if request.reading else request.farewell
            if farewell is not None:
                self._leaving -= 1
        if farewell is not None:
            self._say(request.source, farewell)

    def forget(self, name: str) -> None:
        """End a request; the producer is told when nobody is reading any more."""
        with self._changed:
            request = self._open.pop(name, None)
            if request is None:
                return
            request.failure = Forgotten(f"{name} was forgotten here")
            now = self._part(request, wire.Forget(request=name))
        if now:
            self._say(request.source, wire.Forget(request=name))

    def close(self) -> bool:
        """Every wait ends. False if it was closed before."""
        with self._changed:
            before, self._closed = self._closed, True
            self._open.clear()
            self._changed.notify_all()
        return not before

    def _over(self, name: str, source: str, failure: ConnectorError) -> None:
        with self._changed:
            request = self._open.get(name)
            if request is None or request.source != source or request.failure is not None:
                return  # forgotten here, which the producer has been told or will be
            request.failure = failure
            now = self._part(request, wire.Release(request=name))
        if now:
            self._say(source, wire.Release(request=name))
        self._arrived(name)

    def _part(self, request: _Open, farewell: wire.Forget | wire.Release) -> bool:
        """End a request; True if nobody is reading, and the producer is to be told now."""
        request.arrivals.clear()
        self._changed.notify_all()
        if request.reading and request.farewell is None:
            self._leaving += 1
        if request.reading:
            request.farewell = farewell
        return not request.reading

    def _find(self, key: ChunkKey) -> _Open:
        self._check_alive()
        request = self._open.get(key.request)
        if request is None:
            raise ValueError(f"{key.request} is not open")
        return request

    def _check(self, key: ChunkKey, request: _Open) -> None:
        """Raise if the chunk will not come."""
        self._check_alive()
        if request.failure is not None:
            raise copy(request.failure)  # several threads may raise it
        if request.last is not None and key.index > request.last:
            raise NoSuchChunk(f"{key}: chunk {request.last} is the last")

    def _check_alive(self) -> None:
        if self._closed:
            raise ConnectorError("the consumer is closed")
