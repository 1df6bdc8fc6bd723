"""Connector between hosts with Mooncake's transfer engine: over TCP, or RDMA with `protocol: rdma`.

A producer keeps its chunks in registered memory. A consumer requests the memory address of a chunk by a ZeroMQ message,
reads the chunk one-sidedly into a registered receive buffer, and copies it once, from there into a tensor.

The engine listens on all interfaces, despite its host setting, without authentication: use a private network or a
network namespace. There is one engine per process and network device; it ends with the process. A running read cannot
be cancelled: after the deadline of its `get`, the receive buffer is used again only when the engine has ended the read.
The engine aborts a read after MC_TRANSFER_TIMEOUT seconds (default 30).
"""

from __future__ import annotations

import mmap
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from vllm_omni_ext.connectors.arena import Arena
from vllm_omni_ext.connectors.base import Connector, ConnectorConfig, ConnectorError, DeadlinePassed, ProducerLost
from vllm_omni_ext.connectors.tcp import listening
from vllm_omni_ext.connectors.zmq_transport import ArenaProducer, Link, LinkedConsumer, bytes_of, copy_bytes, empty
from vllm_omni_ext.errors import ConfigError

HANDSHAKE = "P2PHANDSHAKE"
"""Mooncake's mode in which processes connect by address, without a metadata server."""


@dataclass(frozen=True)
class Mooncake(Connector):
    """The connector `mooncake`: connects processes through Mooncake's transfer engine."""

    def __post_init__(self) -> None:
        _library()

    def producer(self, edge: str) -> MooncakeProducer:
        return MooncakeProducer(edge, self.config)

    def consumer(self, edge: str) -> MooncakeConsumer:
        return MooncakeConsumer(edge, self.config)


def _library() -> Any:
    try:
        from mooncake import engine
    except ImportError as error:
        raise ConfigError(
            f"connector.name: mooncake cannot be imported ({error}); pip install 'vllm-omni-ext[mooncake]', without "
            "CUDA 'vllm-omni-ext[mooncake-cpu]', and the system's packages libibverbs1 and ibverbs-providers (libmlx5)"
        ) from error
    return engine


@cache
def _engine(host: str, protocol: str, device: str) -> tuple[Any, str]:
    """Return (this process's transfer engine, session name under which other processes reach the engine)."""
    engine = _library().TransferEngine()
    if engine.initialize(host, HANDSHAKE, protocol, device) != 0:
        raise ConnectorError(f"mooncake's engine does not start on {host} with {protocol} {device}")
    return engine, f"{host}:{engine.get_rpc_port()}"


class Registered:
    """Zeroed memory that is registered with the transfer engine until `close`."""

    def __init__(self, config: ConnectorConfig, size: int) -> None:
        self.engine, self.session = _engine(config.host, config.protocol, config.device)
        self._map = mmap.mmap(-1, size)
        self.array = np.frombuffer(self._map, np.uint8)
        self.address = int(self.array.ctypes.data)
        if self.engine.register_memory(self.address, size) != 0:
            raise ConnectorError(f"mooncake does not register {size} bytes of memory")

    def close(self) -> None:
        """Unregister the memory. May be called twice."""
        if self.address:
            self.engine.unregister_memory(self.address)
            self.address = 0


class MooncakeProducer(ArenaProducer):
    """Keeps chunks in registered memory, from which consumers read them."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        arena = Arena(config.capacity_bytes)
        self._registered = Registered(config, arena.capacity)
        super().__init__(edge, config, arena, self._registered.array, bind=listening(config))

    def close(self) -> None:
        super().close()
        self._registered.close()

    def _sent(self, kept: Any) -> tuple[int, str, list[Any]]:
        return self._registered.address + kept, self._registered.session, []


class MooncakeConsumer(LinkedConsumer):
    """Reads chunks through a receive buffer of `window_bytes`; larger chunks are read in pieces."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        super().__init__(edge, config)
        self._registered = Registered(config, config.window_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"omni-mooncake-{edge}")
        self._reading: Future[int] | None = None

    def close(self) -> None:
        """Close all connections; wait for a running read. May be called twice."""
        super().close()
        self._thread.shutdown(cancel_futures=True)
        self._registered.close()

    def _fetch(self, link: Link, request: str, index: int, deadline: float) -> torch.Tensor:
        chunk, _ = self._ask(link, request, index, deadline)
        tensor = empty(chunk, self._config.capacity_bytes)
        target, most = bytes_of(tensor), self._config.window_bytes
        for start in range(0, chunk.nbytes, most):
            piece = target[start : start + most]
            self._transfer(chunk.memory, chunk.place + start, len(piece), deadline)
            copy_bytes(piece, self._registered.array)
        self._ask(link, request, index, deadline)
        return tensor

    def _transfer(self, session: str, place: int, size: int, deadline: float) -> None:
        """Read `size` bytes at `place` in the memory of the engine `session` into the receive buffer."""
        if self._reading is not None:  # the read of an earlier `get` whose deadline passed
            self._wait(self._reading, deadline)
        read = self._registered.engine.transfer_sync_read
        self._reading = reading = self._thread.submit(read, session, self._registered.address, place, size)
        self._wait(reading, deadline)
        if (code := reading.result()) != 0:
            raise ProducerLost(f"mooncake could not read it ({code})")

    def _wait(self, reading: Future[int], deadline: float) -> None:
        if not wait((reading,), max(0.0, deadline - time.monotonic())).done:
            raise DeadlinePassed("was not transferred in time")
        self._reading = None
