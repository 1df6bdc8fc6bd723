"""Connector between processes of one host: each producer has one block of shared memory, which consumers map.

The memory is a memfd without a name, so nothing is left behind when its processes are killed, in any order. A consumer
of the same user receives the file descriptor over a unix socket in the abstract namespace, i.e. without a file. The
consumer cannot write into the memory. A chunk is copied twice: by `put` into the memory, and by `get` out of the
memory. Only the ZeroMQ messages of a chunk, a few hundred bytes, need system calls.

Both processes must be in one network namespace, to which abstract socket names belong.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_omni_ext.connectors.arena import Arena
from vllm_omni_ext.connectors.base import Connector, ConnectorConfig, ProducerLost
from vllm_omni_ext.connectors.zmq_transport import ArenaProducer, Link, LinkedConsumer, bytes_of, copy_bytes, empty
from vllm_omni_ext.encoding import Malformed

F_SEAL_FUTURE_WRITE = 0x0010
"""Seal from linux/fcntl.h that Python does not define: mappings that are made after it are read-only."""

HANDING_OVER_S = 1.0
"""Seconds that a consumer waits for the file descriptor; the producer's thread sends it at once."""

_CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


@dataclass(frozen=True)
class SharedMemory(Connector):
    """The connector `shared_memory`: connects processes of one host."""

    def producer(self, edge: str) -> SharedProducer:
        return SharedProducer(edge, self.config)

    def consumer(self, edge: str) -> SharedConsumer:
        return SharedConsumer(edge, self.config)


def memory_socket(endpoint: str) -> str:
    """Return the address of the unix socket over which a producer sends the file descriptor of its memory.

    Args:
        endpoint: ZeroMQ address of the producer.
    """
    return f"\0{endpoint.removeprefix('ipc://@')}-memory"


class SharedProducer(ArenaProducer):
    """Allocates the shared memory, and sends its file descriptor to consumers."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        arena = Arena(config.capacity_bytes)
        name = f"omni-{secrets.token_hex(8)}"
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, arena.capacity)
        memory = np.frombuffer(mmap.mmap(self._fd, arena.capacity), np.uint8)
        # A consumer's mapping is read-only, and its pages cannot be removed.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
        bind = f"ipc://@{name}"
        self._counter = socket.socket(socket.AF_UNIX)
        self._counter.setblocking(False)
        self._counter.bind(memory_socket(bind))
        self._counter.listen()
        super().__init__(edge, config, arena, memory, bind=bind, also=self._counter)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            self._counter.close()
            os.close(self._fd)
            self._fd = -1
            self.memory = np.empty(0, np.uint8)  # frees the mapping

    def _connected(self) -> None:
        """Send the file descriptor of the memory to a consumer process of the same user."""
        try:
            connection, _ = self._counter.accept()
            with connection:
                given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(given)[1] != os.geteuid():
                    raise Malformed("the consumer process has another user id")
                socket.send_fds(connection, [b"."], [self._fd])
        except (OSError, Malformed) as error:
            self._count(Malformed(f"the memory was not sent: {error}"))

    def _sent(self, kept: Any) -> tuple[int, str, list[Any]]:
        return kept, "", []


class SharedConsumer(LinkedConsumer):
    """Maps the memory of each producer, and copies chunks out of it."""

    def _fetch(self, link: Link, request: str, index: int, deadline: float) -> torch.Tensor:
        chunk, _ = self._ask(link, request, index, deadline)
        if link.memory is None:
            try:
                link.memory = _map(link.endpoint)
            except OSError as error:
                raise ProducerLost(f"the producer's memory cannot be mapped: {error}") from error
        source = link.memory[chunk.place : chunk.place + chunk.nbytes]
        tensor = empty(chunk, source.nbytes)
        copy_bytes(bytes_of(tensor), source)
        self._ask(link, request, index, deadline)
        return tensor


def _map(endpoint: str) -> memoryview:
    """Map the memory of the producer at a ZeroMQ address, read-only.

    Raises:
        OSError: the producer does not send the file descriptor.
    """
    with socket.socket(socket.AF_UNIX) as counter:
        counter.settimeout(HANDING_OVER_S)
        counter.connect(memory_socket(endpoint))
        _, received, _, _ = socket.recv_fds(counter, 1, 1)
    if len(received) != 1:
        raise ConnectionError("no file descriptor was given; is the producer of the same user?")
    try:
        return memoryview(mmap.mmap(received[0], 0, prot=mmap.PROT_READ))
    finally:
        os.close(received[0])
