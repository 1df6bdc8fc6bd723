"""Connector between any two hosts: tensors are sent in ZeroMQ messages over TCP.

The sender copies nothing: frames point into the tensors, in slices. The receiver copies each slice once, into the
chunk's own memory. At most `window_bytes` of a request are sent before the consumer reads them (but at least one
chunk). The socket's high-water mark limits the frames that wait for a consumer's thread.

The token in the address authorizes consumers. All traffic is encrypted if the configuration has keys; without keys
use a private network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import Arrived, Connector, ConnectorConfig, Part, ignore
from vllm_omni_ext.connectors.base_impl import Budget, ReadLease
from vllm_omni_ext.connectors.consumer_state import Arrival
from vllm_omni_ext.connectors.producer_state import Deliver
from vllm_omni_ext.connectors.tensors import check, host_views, read
from vllm_omni_ext.connectors.zmq_transport import SLICE_BYTES, LinkedConsumer, LinkedProducer
from vllm_omni_ext.encoding import Malformed


@dataclass(frozen=True)
class Tcp(Connector):
    """Connects processes on any hosts."""

    def producer(self, edge: str) -> TcpProducer:
        return TcpProducer(edge, self.config)

    def consumer(self, edge: str, arrived: Arrived = ignore) -> TcpConsumer:
        return TcpConsumer(edge, self.config, arrived, window=self.config.window_bytes)


def listening(config: ConnectorConfig) -> str:
    """Return the ZeroMQ address that a producer binds; port `*` is any of the configuration's `ports`."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"tcp://{host}:{config.port or '*'}"


class TcpProducer(LinkedProducer):
    """Sends payloads directly from the tensors' memory."""

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
    """A chunk that has not arrived completely."""

    head: wire.ChunkHeader
    buffer: memoryview
    left: int


class TcpConsumer(LinkedConsumer):
    """Assembles chunks from slices."""

    _holds = True

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._coming: dict[str, _Coming] = {}  # by producer, which sends one chunk after the other
        super().__init__(edge, config, arrived, window=window)

    def _arrive(self, source: str, head: wire.ChunkHeader) -> None:
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
            self._consumer_state.deliver(coming.head, coming.buffer, source)

    def _lose(self, address: str, reason: str) -> None:
        self._coming.pop(address, None)
        super()._lose(address, reason)

    def _fetch(self, arrival: Arrival, deadline: float, end: ReadLease) -> tuple[Part, ...]:
        return read(arrival.head.parts, arrival.payload)
