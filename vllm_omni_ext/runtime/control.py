"""Between the head and its API servers: messages and file descriptors in a pipe, and counters in shared memory.

Messages are tagged msgpack; never pickle. Replicas are written `talker/0`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from ctypes import Array, c_int, c_longlong
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_ext.runtime.operator_state import Change

COME_WITHIN_S = 5.0
"""Limit of the wait for descriptors after their message: they are sent directly after it."""

NOT_ACCEPTING = 2**31 - 1
"""Load of an API server that accepts no connections, so that it is never the least loaded one (vLLM's launcher)."""


class ReplicaStarting(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica will start."""

    replica: str


class ReplicaStarted(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: the process id of a replica that was announced before its process existed."""

    replica: str
    pid: int


class ReplicaReady(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica is ready. Two file descriptors follow, of the listeners it has connected to."""

    replica: str
    host: str
    pid: int
    restarts: int
    input: str
    output: str


class ReplicaConnected(msgspec.Struct, frozen=True, tag=True):
    """API server to head: the ready response of a connected replica. A restarted API server needs it."""

    replica: str
    ready_response: bytes


class Server(msgspec.Struct, frozen=True):
    """One API server; `restarts` counts its restarts."""

    index: int
    pid: int
    up: bool
    restarts: int


class Servers(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: the state of all API servers."""

    servers: tuple[Server, ...]


class ServerLost(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: another API server died at the Unix time `at`; the replicas must end its requests."""

    index: int
    at: float


class ReplicaEnded(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a replica has ended; `again` if it will be restarted."""

    replica: str
    reason: str
    again: bool


class ServerReady(msgspec.Struct, frozen=True, tag=True):
    """API server to head: the API server accepts requests."""


class ChangeRequested(msgspec.Struct, frozen=True, tag=True):
    """API server to head: an operator changes something. `number` is the API server's own, for `ChangeComplete`."""

    number: int
    change: Change


class ChangeMade(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: a change; the API server answers with `ChangeApplied` of the same version."""

    version: int
    change: Change


class ChangeApplied(msgspec.Struct, frozen=True, tag=True):
    """API server to head: it acts on a change from now on."""

    version: int


class ChangeComplete(msgspec.Struct, frozen=True, tag=True):
    """Head to API server: all API servers act on the change that this one has requested."""

    number: int


Message = (
    ReplicaStarting
    | ReplicaStarted
    | ReplicaReady
    | ReplicaConnected
    | ReplicaEnded
    | ServerReady
    | Servers
    | ServerLost
    | ChangeRequested
    | ChangeMade
    | ChangeApplied
    | ChangeComplete
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Read one message; msgspec.ValidationError for anything else."""
    message: Message = _decoder.decode(data)
    return message


def send_descriptors(pipe: Connection, descriptors: Sequence[int]) -> None:
    """Send file descriptors through a duplex pipe, after a message that announces them."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        reduction.sendfds(channel, list(descriptors))


def receive_descriptors(pipe: Connection, count: int) -> list[int]:
    """Receive announced file descriptors. The caller must close them.

    The descriptors may arrive a moment after their message, and an event loop that watches the pipe makes it
    non-blocking.
    """
    pipe.poll(COME_WITHIN_S)
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        return list(reduction.recvfds(channel, count))


class SharedCounters:
    """Counters with one slot per API server. Each server writes its own slot; the head clears the slot of a dead
    server.

    Attributes:
        loads: open connections per API server. The server with the fewest accepts the next connection.
        admitted: unfinished requests per API server, laid out as vLLM's admission control does: `--max-num-queued-reqs`
            limits the sum.
    """

    def __init__(self, servers: int) -> None:
        context: Any = get_mp_context()
        self.loads: Array[c_int] = context.RawArray(c_int, [NOT_ACCEPTING] * servers)
        self.admitted: Array[c_longlong] = context.RawArray(c_longlong, SharedAdmissionStats.num_counters(servers))

    def clear(self, server: int) -> None:
        """Clear the slot of an API server that has died: it accepts no connections and its requests have ended."""
        self.loads[server] = NOT_ACCEPTING
        self.admitted[server * SharedAdmissionStats.COUNTERS_PER_SLOT] = 0
