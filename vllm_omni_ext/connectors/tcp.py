"""Connector between any two hosts: tensors are sent in ZeroMQ messages over TCP.

The sender copies nothing: frames point to slices of the tensors. The receiver copies each slice once, into the new
tensor.

The token in the address authorizes consumers. All traffic is encrypted if the configuration has keys; without keys
use a private network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni_ext.connectors.base import Connector, ConnectorConfig
from vllm_omni_ext.connectors.zmq_transport import (
    SLICE_BYTES,
    Link,
    LinkedConsumer,
    LinkedProducer,
    bytes_of,
    copy_bytes,
    empty,
)
from vllm_omni_ext.encoding import Malformed


@dataclass(frozen=True)
class Tcp(Connector):
    """The connector `tcp`: connects processes on any hosts."""

    def producer(self, edge: str) -> TcpProducer:
        return TcpProducer(edge, self.config, bind=listening(self.config))

    def consumer(self, edge: str) -> TcpConsumer:
        return TcpConsumer(edge, self.config)


def listening(config: ConnectorConfig) -> str:
    """Return the ZeroMQ address that a producer binds; port `*` is any of the configuration's `ports`."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"tcp://{host}:{config.port or '*'}"


class TcpProducer(LinkedProducer):
    """Keeps the tensors that are put, and sends chunks directly from their memory."""

    def _keep(self, data: Any) -> Any:
        return data

    def _sent(self, kept: Any) -> tuple[int, str, list[Any]]:
        return 0, "", [kept[start : start + SLICE_BYTES] for start in range(0, len(kept), SLICE_BYTES)]


class TcpConsumer(LinkedConsumer):
    """Receives chunks in slices, and copies the slices into one tensor."""

    def _fetch(self, link: Link, request: str, index: int, deadline: float) -> torch.Tensor:
        chunk, body = self._ask(link, request, index, deadline)
        if (there := sum(len(piece) for piece in body)) != chunk.nbytes:
            raise Malformed(f"{there} bytes of a chunk of {chunk.nbytes}")
        tensor = empty(chunk, there)
        target, start = bytes_of(tensor), 0
        for piece in body:
            copy_bytes(target[start : start + len(piece)], piece.buffer)
            start += len(piece)
        return tensor
