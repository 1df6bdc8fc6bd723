"""Between any two hosts: tensors travel in ZeroMQ messages over TCP.

The sender copies nothing: frames point into the tensors, in slices. The receiver copies each slice once, into the
chunk's own memory. At most `window_bytes` of a request are sent ahead of its reading (one chunk always is), and what a
consumer's thread has not taken is limited by the socket's high-water mark.

The token in the address keeps strangers out. Everything is encrypted if the configuration has keys; without them use a
private network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.connectors.base import Arrived, Connector, ConnectorConfig, Part, ignore
from vllm_omni_ext.connectors.ends import Budget, Once
from vllm_omni_ext.connectors.ledger import Deliver
from vllm_omni_ext.connectors.links import SLICE_BYTES, LinkedConsumer, LinkedProducer
from vllm_omni_ext.connectors.mailbox import Arrival
from vllm_omni_ext.connectors.tensors import check, host_views, read
from vllm_omni_ext.wire import chunks as wire
from vllm_omni_ext.wire.coordination import Malformed


@dataclass(frozen=True)
class Tcp(Connector):
    """Connects processes on any hosts."""

    def producer(self, edge: str) -> TcpProducer:
        """See `Connector.producer`."""
        return TcpProducer(edge, self.config)

    def consumer(self, edge: str, arrived: Arrived = ignore) -> TcpConsumer:
        """See `Connector.consumer`."""
        return TcpConsumer(edge, self.config, arrived, window=self.config.window_bytes)


def listening(config: ConnectorConfig) -> str:
    """Where a producer binds."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"tcp://{host}:{config.port or '*'}"


class TcpProducer(LinkedProducer):
    """Sends payloads from where they are."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        super().__init__(edge, config, Budget(config.capacity_bytes), leases=False, bind=listening(config))

    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        return host_views(parts)

    def _send_chunk(self, action: Deliver) -> None:
        head = action.chunk.head
        self._send_message(action.link, head)
        for part, view in zip(head.parts, action.chunk.payload[1], strict=True):
            for start in range(0, part.nbytes, SLICE_BYTES):
                note = wire.Slice(request=head.request, index=head.index, start=part.offset + start)
                self._send_message(action.link, note, view[start : start + SLICE_BYTES])


@dataclass(slots=True)
class _Coming:
    """A chunk of which not everything has come yet."""

    head: wire.Head
    buffer: memoryview
    left: int


class TcpConsumer(LinkedConsumer):
    """Puts slices together."""

    _holds = True

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._coming: dict[str, _Coming] = {}  # by producer: it sends one chunk after the other
        super().__init__(edge, config, arrived, window=window)

    def _arrive(self, source: str, head: wire.Head) -> None:
        self._coming.pop(source, None)
        if head.nbytes > self._config.capacity_bytes:
            raise Malformed(f"a chunk of {head.nbytes} bytes; capacity_bytes is {self._config.capacity_bytes}")
        check(head.parts, head.nbytes)
        coming = _Coming(head, np.empty(head.nbytes, np.uint8).data, sum(part.nbytes for part in head.parts))
        self._coming[source] = coming
        self._deliver(source, coming)

    def _piece(self, source: str, part: wire.Slice, data: memoryview) -> None:
        coming = self._coming.get(source)
        if coming is None or (part.request, part.index) != (coming.head.request, coming.head.index):
            raise Malformed(f"a slice of {part.request}/{part.index}, whose head did not come")
        if part.start + data.nbytes > coming.head.nbytes or data.nbytes > coming.left:
            raise Malformed(f"a slice behind the end of {part.request}/{part.index}")
        coming.buffer[part.start : part.start + data.nbytes] = data
        coming.left -= data.nbytes
        self._deliver(source, coming)

    def _deliver(self, source: str, coming: _Coming) -> None:
        if not coming.left:
            del self._coming[source]
            self._mailbox.deliver(coming.head, coming.buffer, source)

    def _lose(self, address: str, reason: str) -> None:
        self._coming.pop(address, None)
        super()._lose(address, reason)

    def _fetch(self, arrival: Arrival, deadline: float, end: Once) -> tuple[Part, ...]:
        return read(arrival.head.parts, arrival.payload)
