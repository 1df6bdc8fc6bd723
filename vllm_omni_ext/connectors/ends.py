"""What the ends of all connectors have in common: ledger or mailbox with a lock, memory and the copying around them."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

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
from vllm_omni_ext.connectors.ledger import Action, Free, Held, Ledger, Link
from vllm_omni_ext.connectors.mailbox import Arrival, Mailbox
from vllm_omni_ext.connectors.tensors import describe
from vllm_omni_ext.wire import chunks as wire

MAX_REASON = 4096
"""Characters of a failure's reason; more is cut off."""

log = logging.getLogger(__name__)


class Memory(Protocol):
    """Where a producer keeps payloads."""

    capacity: int
    used_bytes: int

    def take(self, size: int) -> int | None:
        """A place of that size; None if there is none."""

    def free(self, place: int) -> None:
        """Give a place back."""


class Budget:
    """Counts what is kept wherever the caller has put it. A place is its size."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used_bytes = 0

    def take(self, size: int) -> int | None:
        """Room for `size` bytes, at least a line; None if there is none."""
        size = max(aligned(size), ALIGNMENT)
        if self.used_bytes + size > self.capacity:
            return None
        self.used_bytes += size
        return size

    def free(self, place: int) -> None:
        """Give room back."""
        self.used_bytes -= place


class StoringProducer(Producer):
    """Keeps chunks in a memory and acts on what the ledger says.

    Args:
        leases: consumers read the payload where it is, see `ledger`.
    """

    def __init__(self, edge: str, config: ConnectorConfig, memory: Memory, *, leases: bool) -> None:
        if not 0 < len(edge) <= MAX_NAME:
            raise ValueError(f"'{edge}' is no edge's name")
        self._edge = edge
        self._config = config
        self._memory = memory
        self._lock = threading.Lock()
        self._ledger = Ledger(edge, config, leases=leases)
        self._writing: set[ChunkKey] = set()
        self._closed = False
        self._dropped = 0
        self._moved = 0

    def put(self, key: ChunkKey, parts: Sequence[Part], *, meta: bytes = b"", last: bool = False) -> None:
        """See `Producer.put`."""
        heads, nbytes = describe(parts)
        need = nbytes + len(meta)
        if len(meta) > MAX_META_BYTES:
            raise ValueError(f"{key}: {len(meta)} bytes of metadata; at most {MAX_META_BYTES} are allowed")
        if aligned(need) > self._memory.capacity:
            raise ValueError(f"{key}: {need} bytes can never fit; capacity_bytes is {self._memory.capacity}")
        place = self._begin(key, need, last)
        try:
            payload = self._keep(place, parts, heads, nbytes)
            head = wire.Head(
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
                self._ledger.check(key, last)  # the request may have ended meanwhile
                self._moved += nbytes
                actions = self._ledger.put(Held(head, (place, payload)), time.monotonic())
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
        """See `Producer.fail`."""
        with self._lock:
            self._perform(self._ledger.fail(request, reason[:MAX_REASON], time.monotonic()))
        self._performed()

    def forget(self, request: str) -> None:
        """See `Producer.forget`."""
        with self._lock:
            self._perform(self._ledger.forget(request, time.monotonic()))
        self._performed()

    def stats(self) -> Stats:
        """See `Producer.stats`."""
        with self._lock:
            return Stats(
                requests=len(self._ledger),
                chunks=self._ledger.chunks,
                held_bytes=self._memory.used_bytes,
                links=self._links(),
                dropped=self._dropped,
                moved_bytes=self._moved,
            )

    def _begin(self, key: ChunkKey, need: int, last: bool) -> int:
        with self._lock:
            self._check_open()
            self._perform(self._ledger.expire(time.monotonic()))
            self._ledger.check(key, last)
            if key in self._writing:
                raise ValueError(f"{key} is being put")
            place = self._memory.take(need)
            if place is None:
                held = self._memory.used_bytes
                raise BackPressure(f"{key}: no room for {need} bytes, {held} of {self._memory.capacity} are held")
            self._writing.add(key)
            return place

    def _heard(self, link: Link, message: wire.ToProducer) -> None:
        """A consumer has said something that it may say."""
        with self._lock:
            self._perform(self._ledger.heard(link, message, time.monotonic()))
        self._performed()

    def _lost(self, link: Link) -> None:
        """A consumer is gone."""
        with self._lock:
            self._perform(self._ledger.lost(link, time.monotonic()))
        self._performed()

    def _perform(self, actions: Iterable[Action]) -> None:
        """Free what is to be freed, and queue the rest in order. Called with the lock."""
        for action in actions:
            if isinstance(action, Free):
                self._memory.free(action.chunk.payload[0])
            else:
                self._queue(action)

    def _shut(self) -> bool:
        """Close and let go of everything. False if it was closed before. Called with the lock."""
        before, self._closed = self._closed, True
        self._ledger = Ledger(self._edge, self._config, leases=False)
        return not before

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorError("the producer is closed")

    @abstractmethod
    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        """Take the parts over; returns the payload. Called without the lock."""

    def _remote(self, place: int) -> int:
        """What a consumer has to know of a place."""
        return place

    @abstractmethod
    def _links(self) -> int:
        """Connected consumers."""

    @abstractmethod
    def _queue(self, action: Action) -> None:
        """Remember something to send. Called with the lock."""

    @abstractmethod
    def _performed(self) -> None:
        """Something may have been queued. Called without the lock."""


class MailboxConsumer(Consumer):
    """Waits in a mailbox; subclasses bring messages there and read payloads.

    Args:
        window: see `Mailbox`.
    """

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._config = config
        self._edge = edge
        self._mailbox = Mailbox(edge, say=self._say, arrived=_logged(arrived), window=window)
        self._moved = 0
        self._dropped = 0

    def open(self, request: str, source: str) -> None:
        """See `Consumer.open`."""
        self._check_address(source)
        self._mailbox.open(request, source)

    def get(self, key: ChunkKey, deadline_s: float | None = None) -> Received:
        """See `Consumer.get`."""
        deadline = time.monotonic() + (self._config.deadline_s if deadline_s is None else deadline_s)
        arrival, reading = self._mailbox.begin(key, deadline)
        end = Once(lambda: self._mailbox.end(reading))
        try:
            parts = self._fetch(arrival, deadline, end)
        finally:
            if not end.later:
                end()
        self._moved += arrival.head.nbytes
        return Received(key, parts, arrival.head.meta, arrival.head.last)

    def forget(self, request: str) -> None:
        """See `Consumer.forget`."""
        self._mailbox.forget(request)

    def stats(self) -> Stats:
        """See `Consumer.stats`."""
        arrivals = self._mailbox.arrivals()
        return Stats(
            requests=len(self._mailbox),
            chunks=len(arrivals),
            held_bytes=sum(arrival.head.nbytes for arrival in arrivals) if self._holds else 0,
            links=self._links(),
            dropped=self._dropped,
            moved_bytes=self._moved,
        )

    _holds = False
    """Whether payloads that have arrived are in this process's own memory."""

    @abstractmethod
    def _check_address(self, source: str) -> None:
        """ValueError if it is no address of this connector."""

    @abstractmethod
    def _say(self, source: str, message: wire.ToProducer) -> None:
        """Send a message; does not wait."""

    @abstractmethod
    def _fetch(self, arrival: Arrival, deadline: float, end: Once) -> tuple[Part, ...]:
        """The parts of a chunk. While `end` was not called, the producer keeps its payload."""

    @abstractmethod
    def _links(self) -> int:
        """Connected producers."""


class Once:
    """What is to be done at the end of reading; `later` says that somebody else will."""

    def __init__(self, action: Any) -> None:
        self._action = action
        self.later = False

    def __call__(self) -> None:
        self._action()


def _logged(arrived: Arrived) -> Arrived:
    def call(request: str) -> None:
        try:
            arrived(request)
        except Exception:  # it is the listener that failed, not the connection it was told of
            log.exception("the listener of %s failed", request)

    return call
