"""Connector between processes of one host: each producer has one block of shared memory, which consumers map.

The memory is a memfd without a name, so nothing is left behind when its processes are killed, in any order. A consumer
of the same user receives the file descriptor over a unix socket in the abstract namespace, which has no file either;
it cannot write into the memory. Each side copies once: `put` into the memory, `get` out of it. The messages of a chunk
have a few hundred bytes, and only they need system calls.

Both processes must be in one network namespace, to which abstract socket names belong.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.arena import Arena
from vllm_omni_ext.connectors.base import Arrived, Connector, ConnectorConfig, Part, ignore
from vllm_omni_ext.connectors.base_impl import ReadLease
from vllm_omni_ext.connectors.consumer_state import Arrival
from vllm_omni_ext.connectors.tensors import check, read, write
from vllm_omni_ext.connectors.zmq_transport import LinkedConsumer, LinkedProducer
from vllm_omni_ext.encoding import Malformed

F_SEAL_FUTURE_WRITE = 0x0010
"""Value from linux/fcntl.h, which Python does not define: later mappings are read-only."""

HANDING_OVER_S = 1.0
"""How long a consumer waits for the file descriptor; the producer's thread sends it at once."""

_CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


@dataclass(frozen=True)
class SharedMemory(Connector):
    """Connects processes of one host."""

    def producer(self, edge: str) -> SharedProducer:
        return SharedProducer(edge, self.config)

    def consumer(self, edge: str, arrived: Arrived = ignore) -> SharedConsumer:
        return SharedConsumer(edge, self.config, arrived, window=0)


class SharedProducer(LinkedProducer):
    """Owns the memory."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        arena = Arena(config.capacity_bytes)
        name = f"omni-{secrets.token_hex(8)}"
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, arena.capacity)
        self._view = memoryview(mmap.mmap(self._fd, arena.capacity))
        # A reader's mapping can neither lose its pages nor be written to.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
        self._size = arena.capacity
        self._name = f"{name}-memory"
        self._counter = socket.socket(socket.AF_UNIX)
        self._counter.setblocking(False)
        self._counter.bind(f"\0{self._name}")
        self._counter.listen()
        bind = f"ipc://@{name}"
        super().__init__(edge, config, arena, leases=True, bind=bind, also=self._counter.fileno())

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            self._counter.close()
            os.close(self._fd)
            self._fd = -1
            self._view = memoryview(b"")  # the mapping is freed when the last running `put` ends

    def _ready(self, ready: dict[Any, int]) -> None:
        if self._counter.fileno() in ready:
            try:
                self._hand_over()
            except OSError as error:
                self._drop(Malformed(f"a client asked for the memory and disconnected: {error}"))

    def _hand_over(self) -> None:
        connection, _ = self._counter.accept()
        with connection:
            given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(given)[1] == os.geteuid():
                socket.send_fds(connection, [b"."], [self._fd])
            else:
                self._drop(Malformed("another user asks for the memory"))

    def _welcome(self) -> wire.Welcome:
        return wire.Welcome(memory=self._name, size=self._size)

    def _keep(self, place: int, parts: Sequence[Part], heads: Sequence[wire.PartHead], nbytes: int) -> Any:
        write(parts, heads, self._view[place : place + nbytes])


class SharedConsumer(LinkedConsumer):
    """Maps the memory of each producer."""

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        self._memories: dict[str, memoryview] = {}
        super().__init__(edge, config, arrived, window=window)

    def close(self) -> None:
        super().close()
        self._memories.clear()

    def _welcomed(self, source: str, welcome: wire.Welcome) -> None:
        try:
            self._memories[source] = _map(welcome.memory, welcome.size)
        except OSError as error:
            self._lose(source, f"the producer's memory cannot be mapped: {error}")

    def _lose(self, address: str, reason: str) -> None:
        self._memories.pop(address, None)  # chunks that have arrived keep the mapping alive
        super()._lose(address, reason)

    def _arrive(self, source: str, head: wire.ChunkHeader) -> None:
        memory = self._memories.get(source)
        if memory is None or head.place + head.nbytes > len(memory):
            raise Malformed(f"a chunk outside of the producer's memory: {head.place} and {head.nbytes} bytes")
        check(head.parts, head.nbytes)
        self._consumer_state.deliver(head, memory, source)

    def _fetch(self, arrival: Arrival, deadline: float, end: ReadLease) -> tuple[Part, ...]:
        head = arrival.head
        copy = np.empty(head.nbytes, np.uint8)
        np.copyto(copy, np.frombuffer(arrival.payload, np.uint8, head.nbytes, head.place))
        return read(head.parts, copy)


def _map(name: str, size: int) -> memoryview:
    """Map the memory of the producer with this socket name, read-only. OSError if the descriptor is not sent."""
    with socket.socket(socket.AF_UNIX) as counter:
        counter.settimeout(HANDING_OVER_S)
        counter.connect(f"\0{name}")
        _, received, _, _ = socket.recv_fds(counter, 1, 1)
    if len(received) != 1:
        raise ConnectionError("no file descriptor was given; is the producer of the same user?")
    try:
        return memoryview(mmap.mmap(received[0], size, prot=mmap.PROT_READ))
    finally:
        os.close(received[0])
