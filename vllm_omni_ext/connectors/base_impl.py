"""Common base of all producers and consumers: `ProducerState` or `ConsumerState`, with a lock, memory and copying."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.arena import ALIGNMENT, aligned
from vllm_omni_ext.connectors.base import (
    MAX_META_BYTES,
    MAX_NAME,
    Arrived,
    BackPressure,
    ChunkKey,
    ConnectorConfig,
    ConnectorError,
    Consumer,
    Part,
    Producer,
    Received,
    Stats,
)
from vllm_omni_ext.connectors.consumer_state import Arrival, ConsumerState
from vllm_omni_ext.connectors.producer_state import Action, Free, Held, Link, ProducerState
from vllm_omni_ext.connectors.tensors import describe

MAX_REASON = 4096
"""Characters of a failure's reason; more is cut off."""

log = logging.getLogger(__name__)


class Memory(Protocol):
    """Allocator for the payloads of a producer."""

    capacity: int
    used_bytes: int

    def take(self, size: int) -> int | None:
        """Allocate `size` bytes and return their place; None if no memory is free."""

    def free(self, place: int) -> None:
        """Free an allocated place."""


class Budget:
    """Counts bytes of payloads that stay in the caller's memory. A place is the payload's size in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used_bytes = 0

    def take(self, size: int) -> int | None:
        """Reserve `size` bytes, at least one cache line; None if the budget is exceeded."""
        size = max(aligned(size), ALIGNMENT)
        if self.used_bytes + size > self.capacity:
            return None
        self.used_bytes += size
        return size

    def free(self, place: int) -> None:
        """Return the bytes of a place to the budget."""
        self.used_bytes -= place


class StoringProducer(Producer):
    """Keeps chunks in a memory and executes the actions of its `ProducerState`.

    Args:
        leases: consumers read payloads in the producer's memory, see `producer_state`.
    """

    def __init__(self, edge: str, config: ConnectorConfig, memory: Memory, *, leases: bool) -> None:
        if not 0 < len(edge) <= MAX_NAME:
            raise ValueError(f"'{edge}' is no edge's name")
        self._edge = edge
        self._config = config
        self._memory = memory
        self._lock = threading.Lock()
        self._producer_state = ProducerState(edge, config, leases=leases)
        self._writing: set[ChunkKey] = set()
        self._closed = False
        self._dropped = 0
        self._moved = 0

    def put(self, key: ChunkKey, parts: Sequence[Part], *, meta: bytes = b"", last: bool = False) -> None:
        heads, nbytes = describe(parts)
        need = nbytes + len(meta)
        if len(meta) > MAX_META_BYTES:
            raise ValueError(f"{key}: {len(meta)} bytes of metadata; at most {MAX_META_BYTES} are allowed")
        if aligned(need) > self._memory.capacity:
            raise ValueError(f"{key}: {need} bytes can never fit; capacity_bytes is {self._memory.capacity}")
        place = self._begin(key, need, last)
        try:
            payload = self._keep(place, parts, heads, nbytes)
            head = wire.ChunkHeader(
                request=key.request,
                index=key.index,
                last=last,
                meta=bytes(meta),
                parts=heads,
                nbytes=nbytes,
                place=self._remote(place),
            )
            with self._lock:
                self._check_open()
                self._producer_state.check(key, last)  # again: the request may have ended meanwhile
                self._moved += nbytes
                actions = self._producer_state.put(Held(head, (place, payload)), time.monotonic())
                self._writing.discard(key)
                self._perform(actions)
        except BaseException:
            with self._lock:
                if key in self._writing:
                    self._writing.discard(key)
                    self._memory.free(place)
            raise
        self._performed()

    def fail(self, request: str, reason: str) -> None:
        with self._lock:
            self._perform(self._producer_state.fail(request, reason[:MAX_REASON], time.monotonic()))
        self._performed()

    def forget(self, request: str) -> None:
        with self._lock:
            self._perform(self._producer_state.forget(request, time.monotonic()))
        self._performed()

    def stats(self) -> Stats:
        with self._lock:
            return Stats(
                requests=len(self._producer_state),
                chunks=self._producer_state.chunks,
                held_bytes=self._memory.used_bytes,
                links=self._links(),
                dropped=self._dropped,
                moved_bytes=self._moved,
            )

    def _begin(self, key: ChunkKey, need: int, last: bool) -> int:
        with self._lock:
            self._check_open()
            self._perform(self._producer_state.expire(time.monotonic()))
            self._producer_state.check(key, last)
            if key in self._writing:
                raise ValueError(f"{key} is being put")
            place = self._memory.take(need)
            if place is None:
                held = self._memory.used_bytes
                raise BackPressure(f"{key}: no room for {need} bytes, {held} of {self._memory.capacity} are held")
            self._writing.add(key)
            return place

    def _heard(self, link: Link, message: wire.ToProducer) -> None:
        """Handle a message of an authorized consumer."""
        with self._lock:
            self._perform(self._producer_state.on_message(link, message, time.monotonic()))
        self._performed()

    def _lost(self, link: Link) -> None:
        """Handle the loss of a consumer's connection."""
        with self._lock:
            self._perform(self._producer_state.lost(link, time.monotonic()))
        self._performed()

    def _perform(self, actions: Iterable[Action]) -> None:
        """Execute `Free` actions and queue all others in order. Called with the lock."""
        for action in actions:
            if isinstance(action, Free):
                self._memory.free(action.chunk.payload[0])
            else:
                self._queue(action)

    def _shut(self) -> bool:
        """Close and drop all requests. False if the producer was closed before. Called with the lock."""
        before, self._closed = self._closed, True
        self._producer_state = ProducerState(self._edge, self._config, leases=False)
        return not before

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorError("the producer is closed")

    @abstractmethod
    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        """Store the parts and return the payload. Called without the lock."""

    def _remote(self, place: int) -> int:
        """Return the place as sent to consumers in `ChunkHeader.place`."""
        return place

    @abstractmethod
    def _links(self) -> int:
        """Number of connected consumers."""

    @abstractmethod
    def _queue(self, action: Action) -> None:
        """Queue a message or chunk for sending. Called with the lock."""

    @abstractmethod
    def _performed(self) -> None:
        """Start sending queued actions, if there are any. Called without the lock."""


class ReceivingConsumer(Consumer):
    """Waits for chunks in a `ConsumerState`; subclasses deliver messages to it and read payloads.

    Args:
        window: see `ConsumerState`.
    """

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._config = config
        self._edge = edge
        self._consumer_state = ConsumerState(edge, send=self._send_to_source, arrived=_logged(arrived), window=window)
        self._moved = 0
        self._dropped = 0

    def open(self, request: str, source: str) -> None:
        self._check_address(source)
        self._consumer_state.open(request, source)

    def get(self, key: ChunkKey, timeout_s: float | None = None) -> Received:
        deadline = time.monotonic() + (self._config.timeout_s if timeout_s is None else timeout_s)
        arrival, reading = self._consumer_state.begin(key, deadline)
        end = ReadLease(lambda: self._consumer_state.end(reading))
        try:
            parts = self._fetch(arrival, deadline, end)
        finally:
            if not end.later:
                end()
        self._moved += arrival.head.nbytes
        return Received(key, parts, arrival.head.meta, arrival.head.last)

    def forget(self, request: str) -> None:
        self._consumer_state.forget(request)

    def stats(self) -> Stats:
        arrivals = self._consumer_state.arrivals()
        return Stats(
            requests=len(self._consumer_state),
            chunks=len(arrivals),
            held_bytes=sum(arrival.head.nbytes for arrival in arrivals) if self._holds else 0,
            links=self._links(),
            dropped=self._dropped,
            moved_bytes=self._moved,
        )

    _holds = False
    """Whether payloads of arrived chunks are in this process's memory."""

    @abstractmethod
    def _check_address(self, source: str) -> None:
        """Raise ValueError if `source` is not an address of this connector."""

    @abstractmethod
    def _send_to_source(self, source: str, message: wire.ToProducer) -> None:
        """Send a message without waiting."""

    @abstractmethod
    def _fetch(self, arrival: Arrival, deadline: float, end: ReadLease) -> tuple[Part, ...]:
        """Read the parts of a chunk. The producer keeps the payload until `end` is called."""

    @abstractmethod
    def _links(self) -> int:
        """Number of connected producers."""


class ReadLease:
    """Ends the reading of a payload when called. `later`: a callback of the transfer ends it, not `get`."""

    def __init__(self, action: Any) -> None:
        self._action = action
        self.later = False

    def __call__(self) -> None:
        self._action()


def _logged(arrived: Arrived) -> Arrived:
    def call(request: str) -> None:
        try:
            arrived(request)
        except Exception:  # an error of the listener must not end the connection
            log.exception("the listener of %s failed", request)

    return call
