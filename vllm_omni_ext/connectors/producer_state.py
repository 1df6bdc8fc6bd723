"""State of a producer: requests, chunks and their readers. Pure: no lock, memory or socket.

A chunk's payload is freed when the request was forgotten. If consumers read payloads in the producer's memory
(`leases`), every consumer that had the request open must also have released it or disconnected.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import BackPressure, ChunkFailed, ChunkKey, ConnectorConfig, Forgotten

Link: TypeAlias = Hashable
"""One consumer's connection."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message."""

    link: Link
    message: wire.ToConsumer


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a chunk."""

    link: Link
    chunk: Held


@dataclass(frozen=True, slots=True)
class Free:
    """Free a payload that no consumer reads any more."""

    chunk: Held


Action: TypeAlias = Say | Deliver | Free


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A stored chunk; the type of `payload` depends on the connector."""

    head: wire.ChunkHeader
    payload: Any


@dataclass(slots=True)
class _Reader:
    """One consumer of a request, with its flow control."""

    window: int  # most bytes sent and not read; 0: without limit
    ahead: int = 0  # bytes sent and not read
    waiting: deque[int] = field(default_factory=deque)  # indexes of chunks that wait for the window


@dataclass(slots=True)
class _Request:
    chunks: dict[int, Held] = field(default_factory=dict)
    readers: dict[Link, _Reader] = field(default_factory=dict)
    last: int | None = None
    failed: str | None = None
    gone: bool = False

    @property
    def over(self) -> bool:
        return self.gone or self.failed is not None


class ProducerState:
    """Requests, chunks and readers of one producer."""

    def __init__(self, edge: str, config: ConnectorConfig, *, leases: bool) -> None:
        self._edge = edge
        self._config = config
        self._leases = leases
        self._requests: dict[str, _Request] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()  # requests without readers, and since when; oldest first
        self._forgotten: OrderedDict[str, float] = OrderedDict()
        self.chunks = 0

    def __len__(self) -> int:
        return len(self._requests)

    def check(self, key: ChunkKey, last: bool) -> None:
        """Raise the error of `Producer.put` if this chunk cannot be stored."""
        if key.edge != self._edge:
            raise ValueError(f"{key}: this is the producer of edge '{self._edge}'")
        if key.request in self._forgotten:
            raise Forgotten(f"{key.request} was forgotten")
        request = self._requests.get(key.request)
        if request is None:
            if len(self._requests) >= self._config.max_requests:
                raise BackPressure(f"{key}: {len(self._requests)} requests are held, as many as allowed")
            return
        if request.failed is not None:
            raise ChunkFailed(f"{key.request} has failed: {request.failed}", reason=request.failed)
        if key.index in request.chunks:
            raise ValueError(f"{key} was put before")
        if request.last is not None and (last or key.index > request.last):
            raise ValueError(f"{key}: chunk {request.last} was marked as the last")
        if last and any(index > key.index for index in request.chunks):
            raise ValueError(f"{key} cannot be the last: there are later ones")

    def put(self, held: Held, now: float) -> list[Action]:
        """Add a chunk that has passed `check`."""
        head = held.head
        request = self._known(head.request, now)
        request.chunks[head.index] = held
        self.chunks += 1
        if head.last:
            request.last = head.index
        actions: list[Action] = []
        for link, reader in request.readers.items():
            reader.waiting.append(head.index)
            actions += self._send_on(link, request, reader)
        self._touch(head.request, request, now)
        return actions

    def fail(self, name: str, reason: str, now: float) -> list[Action]:
        """Mark a request as failed. The first reason is kept."""
        if name in self._forgotten:
            return []
        request = self._known(name, now)
        if request.over:
            return []
        request.failed = reason
        return self._end(name, request, wire.Failed(request=name, reason=reason), now)

    def forget(self, name: str, now: float) -> list[Action]:
        """Free all data of a request as soon as no consumer reads it."""
        request = self._requests.get(name)
        if request is None or request.gone:
            return []
        request.gone = True
        self._remember(name, now)
        if request.failed is not None:  # its readers were notified already
            return self._settle(name, request, now)
        return self._end(name, request, wire.Gone(request=name), now)

    def on_message(self, link: Link, message: wire.ToProducer, now: float) -> list[Action]:
        """Handle a consumer's message."""
        match message:
            case wire.Open():
                return self._open(link, message, now)
            case wire.Want():
                return self._wanted(link, message)
            case wire.Taken():
                return self._taken(link, message)
            case wire.Forget() | wire.Release():
                return self._left(link, message.request, now, forgets=isinstance(message, wire.Forget))
        return []

    def lost(self, link: Link, now: float) -> list[Action]:
        """A consumer has disconnected; its requests are kept for another consumer."""
        names = [name for name, request in self._requests.items() if link in request.readers]
        return [action for name in names for action in self._left(link, name, now, forgets=False)]

    def expire(self, now: float) -> list[Action]:
        """Drop requests that no consumer has had open for `retention_s`."""
        actions: list[Action] = []
        due = now - self._config.retention_s
        while self._idle and next(iter(self._idle.values())) <= due:
            actions += self.forget(next(iter(self._idle)), now)
        while self._forgotten and next(iter(self._forgotten.values())) <= due:
            self._forgotten.popitem(last=False)
        return actions

    def next_expiry(self) -> float | None:
        """When `expire` must be called next; None: never."""
        first = [next(iter(times.values())) for times in (self._idle, self._forgotten) if times]
        return min(first) + self._config.retention_s if first else None

    def ending(self) -> set[Link]:
        """Consumers that have not yet released all ended requests."""
        return {link for request in self._requests.values() if request.over for link in request.readers}

    def _known(self, name: str, now: float) -> _Request:
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = _Request()
            self._touch(name, request, now)
        return request

    def _open(self, link: Link, message: wire.Open, now: float) -> list[Action]:
        name = message.request
        if name in self._forgotten:
            return [Say(link, wire.Gone(request=name))]
        if name not in self._requests and len(self._requests) >= self._config.max_requests:
            return [Say(link, wire.Failed(request=name, reason=f"more than {self._config.max_requests} requests"))]
        request = self._known(name, now)
        if request.failed is not None:
            return [Say(link, wire.Failed(request=name, reason=request.failed))]
        reader = request.readers[link] = _Reader(message.window, waiting=deque(sorted(request.chunks)))
        self._idle.pop(name, None)
        return self._send_on(link, request, reader)

    def _send_on(self, link: Link, request: _Request, reader: _Reader) -> list[Action]:
        actions: list[Action] = []
        while reader.waiting:
            held = request.chunks[reader.waiting[0]]
            if reader.window and reader.ahead and reader.ahead + held.head.nbytes > reader.window:
                break
            reader.waiting.popleft()
            reader.ahead += held.head.nbytes
            actions.append(Deliver(link, held))
        return actions

    def _wanted(self, link: Link, message: wire.Want) -> list[Action]:
        request = self._requests.get(message.request)
        reader = request.readers.get(link) if request is not None else None
        held = request.chunks.get(message.index) if request is not None and not request.over else None
        if reader is None or held is None:
            return []
        if message.index in reader.waiting:
            reader.waiting.remove(message.index)
        reader.ahead += held.head.nbytes
        return [Deliver(link, held)]

    def _taken(self, link: Link, message: wire.Taken) -> list[Action]:
        request = self._requests.get(message.request)
        reader = request.readers.get(link) if request is not None else None
        if request is None or reader is None or request.over:
            return []
        reader.ahead = max(0, reader.ahead - message.nbytes)
        return self._send_on(link, request, reader)

    def _left(self, link: Link, name: str, now: float, *, forgets: bool) -> list[Action]:
        request = self._requests.get(name)
        if request is None:
            if forgets:
                self._remember(name, now)
            return []
        request.readers.pop(link, None)
        if request.over:
            if forgets and not request.readers:
                request.gone = True
                self._remember(name, now)
            return self._settle(name, request, now)
        if not request.readers:
            if forgets:
                return self.forget(name, now)
            self._touch(name, request, now)
        return []

    def _end(self, name: str, request: _Request, message: wire.ToConsumer, now: float) -> list[Action]:
        actions: list[Action] = [Say(link, message) for link in request.readers]
        if not self._leases:
            request.readers.clear()
        return actions + self._settle(name, request, now)

    def _settle(self, name: str, request: _Request, now: float) -> list[Action]:
        """Free an ended request's payloads if no consumer reads them. A failed request is kept until forgotten."""
        if request.readers:
            return []
        actions: list[Action] = [Free(held) for held in request.chunks.values()]
        self.chunks -= len(request.chunks)
        request.chunks.clear()
        if request.gone:
            del self._requests[name]
            self._idle.pop(name, None)
        else:
            self._touch(name, request, now)
        return actions

    def _touch(self, name: str, request: _Request, now: float) -> None:
        if not request.readers:
            self._idle[name] = now
            self._idle.move_to_end(name)

    def _remember(self, name: str, now: float) -> None:
        """Remember that a request was forgotten: later puts raise `Forgotten` instead of storing unneeded chunks."""
        self._forgotten[name] = now
        self._forgotten.move_to_end(name)
        if len(self._forgotten) > self._config.max_requests:
            self._forgotten.popitem(last=False)
