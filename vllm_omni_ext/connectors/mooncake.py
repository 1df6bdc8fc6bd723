"""Connector between hosts with Mooncake's transfer engine: over TCP, or RDMA with `protocol: rdma`.

A producer keeps its chunks in registered memory. Consumers receive the addresses in messages (as in `tcp`, but without
payloads). They read chunks one-sidedly into registered memory of their own, from which the chunks are copied once.

The engine listens on all interfaces, despite its host setting, without authentication: use a private network or a
network namespace. There is one engine per process and network device; it ends with the process. A running read cannot
be cancelled: after the deadline of its `get`, its part of the receive buffer is reused only when the engine has ended
the read. The engine aborts a read after MC_TRANSFER_TIMEOUT seconds (default 30).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.arena import Arena
from vllm_omni_ext.connectors.base import (
    Arrived,
    BackPressure,
    Connector,
    ConnectorConfig,
    ConnectorError,
    DeadlinePassed,
    Part,
    ProducerLost,
    ignore,
)
from vllm_omni_ext.connectors.base_impl import ReadLease
from vllm_omni_ext.connectors.consumer_state import Arrival
from vllm_omni_ext.connectors.tcp import listening
from vllm_omni_ext.connectors.tensors import check, read, write
from vllm_omni_ext.connectors.zmq_transport import LinkedConsumer, LinkedProducer
from vllm_omni_ext.encoding import Malformed
from vllm_omni_ext.errors import ConfigError

READS_AT_ONCE = 4
"""Threads of a consumer for reads of the engine, which block."""

HANDSHAKE = "P2PHANDSHAKE"
"""Mooncake's mode in which processes connect by address, without a metadata server."""


@dataclass(frozen=True)
class Mooncake(Connector):
    """Connects processes through the transfer engine."""

    def __post_init__(self) -> None:
        _library()

    def producer(self, edge: str) -> MooncakeProducer:
        return MooncakeProducer(edge, self.config)

    def consumer(self, edge: str, arrived: Arrived = ignore) -> MooncakeConsumer:
        return MooncakeConsumer(edge, self.config, arrived, window=0)


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
    """Return this process's engine and the session name under which other processes reach it."""
    engine = _library().TransferEngine()
    if engine.initialize(host, HANDSHAKE, protocol, device) != 0:
        raise ConnectorError(f"mooncake's engine does not start on {host} with {protocol} {device}")
    return engine, f"{host}:{engine.get_rpc_port()}"


class Registered:
    """Zeroed memory that is registered with the engine until `close`."""

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


class MooncakeProducer(LinkedProducer):
    """Keeps chunks in registered memory, from which consumers read them."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        arena = Arena(config.capacity_bytes)
        self._registered = Registered(config, arena.capacity)
        self._base = self._registered.address
        self._view = self._registered.array.data
        super().__init__(edge, config, arena, leases=True, bind=listening(config))

    def close(self) -> None:
        super().close()
        self._registered.close()

    def _welcome(self) -> wire.Welcome:
        return wire.Welcome(memory=self._registered.session)

    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        write(parts, heads, self._view[place : place + nbytes])

    def _remote(self, place: int) -> int:
        return self._base + place


class MooncakeConsumer(LinkedConsumer):
    """Reads chunks through a receive buffer of `window_bytes`."""

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._sessions: dict[str, str] = {}
        self._landing = Arena(config.window_bytes)
        self._landed = threading.Lock()
        self._registered = Registered(config, self._landing.capacity)
        self._readers = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix=f"omni-mooncake-{edge}")
        super().__init__(edge, config, arrived, window=window)

    def close(self) -> None:
        """As `Consumer.close`; waits for running reads."""
        super().close()
        self._readers.shutdown(cancel_futures=True)
        self._registered.close()

    def _welcomed(self, source: str, welcome: wire.Welcome) -> None:
        self._sessions[source] = welcome.memory

    def _lose(self, address: str, reason: str) -> None:
        self._sessions.pop(address, None)
        super()._lose(address, reason)

    def _arrive(self, source: str, head: wire.ChunkHeader) -> None:
        session = self._sessions.get(source)
        if session is None:
            raise Malformed("a chunk of a producer that has not sent the address of its memory")
        check(head.parts, head.nbytes)
        self._consumer_state.deliver(head, session, source)

    def _fetch(self, arrival: Arrival, deadline: float, end: ReadLease) -> tuple[Part, ...]:
        head = arrival.head
        copy = np.empty(head.nbytes, np.uint8)
        done = 0
        while done < head.nbytes:  # a chunk larger than the receive buffer is read in pieces
            size = min(head.nbytes - done, self._landing.capacity)
            self._transfer(arrival, done, copy[done : done + size], deadline, end)
            done += size
        return read(head.parts, copy)

    def _transfer(self, arrival: Arrival, start: int, target: Any, deadline: float, end: ReadLease) -> None:
        size = target.nbytes
        with self._landed:
            place = self._landing.take(size)
        if place is None:
            raise BackPressure(f"no room for {size} bytes to land in; window_bytes is {self._landing.capacity}")
        future: Future[int] = self._readers.submit(
            self._registered.engine.transfer_sync_read,
            arrival.payload,
            self._registered.address + place,
            arrival.head.place + start,
            size,
        )
        try:
            code = future.result(max(0.0, deadline - time.monotonic()))
        except Late:
            end.later = True
            future.add_done_callback(lambda _: self._abandon(place, end))
            raise DeadlinePassed(f"{arrival.head.request}/{arrival.head.index} was not transferred in time") from None
        if code == 0:
            target[:] = self._registered.array[place : place + size]
        self._leave(place)
        if code != 0:
            raise ProducerLost(f"{arrival.head.request}/{arrival.head.index}: mooncake could not read it ({code})")

    def _abandon(self, place: int, end: ReadLease) -> None:
        self._leave(place)
        end()

    def _leave(self, place: int) -> None:
        with self._landed:
            self._landing.free(place)
