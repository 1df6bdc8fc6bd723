"""State of a consumer: its open requests, the chunks that have arrived and the waiting threads. Thread-safe; no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_ext.connectors import messages as wire
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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk that can be read; the type of `payload` depends on the connector."""

    head: wire.ChunkHeader
    payload: Any
    source: str


@dataclass(slots=True)
class _Open:
    source: str
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)  # indexes of chunks that were read and are not kept here
    last: int | None = None
    failure: ConnectorError | None = None
    reading: int = 0  # threads that are between `begin` and `end`
    closing: wire.Forget | wire.Release | None = None  # sent when no thread is reading


class ConsumerState:
    """Open requests of one consumer.

    Args:
        edge: chunks of other edges are refused.
        send: sends a message to a source; called without the lock, must not wait.
        arrived: see `base.Arrived`.
        window: most bytes per request that the producer sends before they are read; 0: payloads stay in the producer's
            memory, and chunks that have arrived can be read again without a message.
    """

    def __init__(
        self, edge: str, *, send: Callable[[str, wire.ToProducer], None], arrived: Arrived, window: int
    ) -> None:
        self._edge = edge
        self._send = send
        self._arrived = arrived
        self._window = window
        self._changed = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._leaving = 0  # ended requests that a thread is still reading
        self._closed = False

    def __len__(self) -> int:
        return len(self._open) + self._leaving

    def arrivals(self) -> list[Arrival]:
        """All chunks that have arrived and were not forgotten."""
        with self._changed:
            return [arrival for request in self._open.values() for arrival in request.arrivals.values()]

    def open(self, name: str, source: str) -> None:
        """Open a request at the producer `source`."""
        with self._changed:
            self._check_alive()
            known = self._open.get(name)
            if known is not None and not isinstance(known.failure, ProducerLost):
                if known.source != source:
                    raise ValueError(f"{name} is open at another producer")
                return
            self._open[name] = _Open(source)
        self._send(source, wire.Open(request=name, window=self._window))

    def deliver(self, head: wire.ChunkHeader, payload: Any, source: str) -> None:
        """Add a chunk that has arrived."""
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
            self._send(source, wire.Taken(request=head.request, nbytes=head.nbytes))
        self._arrived(head.request)

    def failed(self, name: str, source: str, reason: str) -> None:
        """The producer has marked the request as failed."""
        self._over(name, source, ChunkFailed(f"{name}: the producer failed: {reason}", reason=reason))

    def gone(self, name: str, source: str) -> None:
        """The producer has forgotten the request."""
        self._over(name, source, Forgotten(f"{name} was forgotten by its producer"))

    def lost(self, source: str, reason: str) -> None:
        """The connection to the producer is lost. Chunks that have arrived can still be read."""
        with self._changed:
            hit = [name for name, r in self._open.items() if r.source == source and r.failure is None]
            for name in hit:
                self._open[name].failure = ProducerLost(f"{name}: {reason}")
            self._changed.notify_all()
        for name in hit:
            self._arrived(name)

    def begin(self, key: ChunkKey, deadline: float) -> tuple[Arrival, _Open]:
        """Wait for a chunk until `deadline` (monotonic) and begin to read it.

        Returns (chunk, request); the caller must pass the request to `end` after reading.
        """
        if key.edge != self._edge:
            raise ValueError(f"{key}: this is the consumer of edge '{self._edge}'")
        with self._changed:
            request = self._find(key)
            wanted = False
            while (arrival := request.arrivals.get(key.index)) is None:
                self._check(key, request)
                if not wanted and (key.index in request.read or (self._window and request.arrivals)):
                    wanted = True  # the chunk was read before, or unread chunks fill the window
                    self._send(request.source, wire.Want(request=key.request, index=key.index))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlinePassed(f"{key} did not come in time")
                self._changed.wait(left)
            if self._window:
                del request.arrivals[key.index]
                request.read.add(key.index)
            request.reading += 1
        if self._window:
            self._send(arrival.source, wire.Taken(request=key.request, nbytes=arrival.head.nbytes))
        return arrival, request

    def end(self, request: _Open) -> None:
        """End the reading of a chunk."""
        with self._changed:
            request.reading -= 1
            closing = None if request.reading else request.closing
            if closing is not None:
                self._leaving -= 1
        if closing is not None:
            self._send(request.source, closing)

    def forget(self, name: str) -> None:
        """End a request; the producer is notified when no thread is reading any more."""
        with self._changed:
            request = self._open.pop(name, None)
            if request is None:
                return
            request.failure = Forgotten(f"{name} was forgotten here")
            now = self._part(request, wire.Forget(request=name))
        if now:
            self._send(request.source, wire.Forget(request=name))

    def close(self) -> bool:
        """Close and end every wait. False if the state was closed before."""
        with self._changed:
            before, self._closed = self._closed, True
            self._open.clear()
            self._changed.notify_all()
        return not before

    def _over(self, name: str, source: str, failure: ConnectorError) -> None:
        with self._changed:
            request = self._open.get(name)
            if request is None or request.source != source or request.failure is not None:
                return  # forgotten here: the producer has been or will be notified
            request.failure = failure
            now = self._part(request, wire.Release(request=name))
        if now:
            self._send(source, wire.Release(request=name))
        self._arrived(name)

    def _part(self, request: _Open, closing: wire.Forget | wire.Release) -> bool:
        """End a request; True if no thread is reading and the producer must be notified now."""
        request.arrivals.clear()
        self._changed.notify_all()
        if request.reading and request.closing is None:
            self._leaving += 1
        if request.reading:
            request.closing = closing
        return not request.reading

    def _find(self, key: ChunkKey) -> _Open:
        self._check_alive()
        request = self._open.get(key.request)
        if request is None:
            raise ValueError(f"{key.request} is not open")
        return request

    def _check(self, key: ChunkKey, request: _Open) -> None:
        """Raise if the chunk cannot arrive any more."""
        self._check_alive()
        if request.failure is not None:
            raise copy(request.failure)  # several threads may raise the same failure
        if request.last is not None and key.index > request.last:
            raise NoSuchChunk(f"{key}: chunk {request.last} is the last")

    def _check_alive(self) -> None:
        if self._closed:
            raise ConnectorError("the consumer is closed")
