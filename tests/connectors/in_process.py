"""Both ends in one process: chunks are passed by reference, nothing is copied or sent.

Requests that nobody has open are dropped at the next `put` after `retention_s`; there is no thread that could do it
earlier.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.connectors.base import Arrived, Connector, ConnectorConfig, Part, ignore
from vllm_omni_ext.connectors.base_impl import Budget, ReadLease, ReceivingConsumer, StoringProducer
from vllm_omni_ext.connectors.consumer_state import Arrival
from vllm_omni_ext.connectors.producer_state import Action, Deliver, Say
from vllm_omni_ext.wire import chunks as wire

SCHEME = "inproc://"

_numbers = itertools.count()
_producers: weakref.WeakValueDictionary[str, LocalProducer] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class InProcess(Connector):
    """Connects threads of one process."""

    def producer(self, edge: str) -> LocalProducer:
        """See `Connector.producer`."""
        return LocalProducer(edge, self.config)

    def consumer(self, edge: str, arrived: Arrived = ignore) -> LocalConsumer:
        """See `Connector.consumer`."""
        return LocalConsumer(edge, self.config, arrived, window=0)


class LocalProducer(StoringProducer):
    """Calls its consumers."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        super().__init__(edge, config, Budget(config.capacity_bytes), leases=False)
        self._address = f"{SCHEME}{next(_numbers)}"
        self._consumers: weakref.WeakSet[LocalConsumer] = weakref.WeakSet()
        self._outbox: deque[Say | Deliver] = deque()
        _producers[self._address] = self

    @property
    def address(self) -> str:
        """See `Producer.address`."""
        return self._address

    def close(self) -> None:
        """See `Producer.close`."""
        with self._lock:
            self._shut()
            consumers = list(self._consumers)
            self._consumers.clear()
            self._outbox.clear()
        _producers.pop(self._address, None)
        for consumer in consumers:
            consumer.lost(self._address, "the producer was closed")

    def hear(self, consumer: LocalConsumer, message: wire.ToProducer) -> bool:
        """Take a consumer's message; False if this producer is closed."""
        with self._lock:
            if self._closed:
                return False
            self._consumers.add(consumer)
        self._heard(consumer, message)
        return True

    def leave(self, consumer: LocalConsumer) -> None:
        """A consumer was closed."""
        with self._lock:
            self._consumers.discard(consumer)
        self._lost(consumer)

    def knows(self, consumer: LocalConsumer) -> bool:
        """Whether the consumer has spoken to this producer."""
        return consumer in self._consumers

    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        return tuple(parts)

    def _links(self) -> int:
        return len(self._consumers)

    def _queue(self, action: Action) -> None:
        if not isinstance(action, Say | Deliver):
            raise TypeError(action)
        self._outbox.append(action)

    def _performed(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                action = self._outbox.popleft()
            if isinstance(action, Deliver):
                action.link.hear(self._address, action.chunk.head, action.chunk.payload[1])  # type: ignore[attr-defined]
            else:
                action.link.hear(self._address, action.message, None)  # type: ignore[attr-defined]


class LocalConsumer(ReceivingConsumer):
    """Is called by its producers."""

    def hear(self, source: str, message: wire.ToConsumer, payload: Any) -> None:
        """Take a producer's message."""
        match message:
            case wire.ChunkHeader():
                parts = tuple(
                    part if head.dtype else memoryview(part).cast("B")
                    for part, head in zip(payload, message.parts, strict=True)
                )
                self._consumer_state.deliver(message, parts, source)
            case wire.Failed():
                self._consumer_state.failed(message.request, source, message.reason)
            case wire.Gone():
                self._consumer_state.gone(message.request, source)

    def lost(self, source: str, reason: str) -> None:
        """A producer was closed."""
        self._consumer_state.lost(source, reason)

    def close(self) -> None:
        """See `Consumer.close`."""
        if self._consumer_state.close():
            for producer in list(_producers.values()):
                producer.leave(self)

    def _check_address(self, source: str) -> None:
        if not source.startswith(SCHEME):
            raise ValueError(f"'{source}' is no address of a producer in this process")

    def _send_to_source(self, source: str, message: wire.ToProducer) -> None:
        producer = _producers.get(source)
        if producer is None or not producer.hear(self, message):
            self.lost(source, "there is no such producer in this process")

    def _fetch(self, arrival: Arrival, deadline: float, end: ReadLease) -> tuple[Part, ...]:
        parts: tuple[Part, ...] = arrival.payload
        return parts

    def _links(self) -> int:
        return sum(producer.knows(self) for producer in list(_producers.values()))
