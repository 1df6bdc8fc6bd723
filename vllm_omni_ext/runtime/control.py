"""Communication of the head with its API servers: messages and file descriptors in pipes, counters in shared memory.

The head is the first process of `vllm serve MODEL --omni`; it starts the API server processes and the replicas (engine
processes). The head keeps the state that operators change: the sleeping replicas, and the LoRA adapters that requests
may name. Every API server has a copy. To change the state, an API server sends an `OperatorChange` to the head. The
head sends it to all API servers; each applies it and returns `ChangeApplied`. When all have returned it, the head sends
`ChangeApplied` to all, and the operator's call returns. Messages are tagged msgpack; never pickle.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from ctypes import Array, c_int, c_longlong
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from msgspec.structs import replace
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_ext.ids import ReplicaId

COME_WITHIN_S = 5.0
"""Timeout of `receive_descriptors` in seconds. The head sends descriptors directly after the message about them."""

NOT_ACCEPTING = 2**31 - 1
"""Value in `SharedCounters.loads` for an API server that accepts no connections. In vLLM's launcher, the server with
the lowest value accepts the next connection."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of the frontend that requests may name as their model.

    Attributes:
        name: the model name in requests.
        path: directory of the adapter.
        number: vLLM's `lora_int_id`, the adapter's id in engines.
        base: name of the adapter's base model, if given.
        three_d: vLLM's `is_3d_lora_weight`.
    """

    name: str
    number: int
    path: str
    base: str | None = None
    three_d: bool = False


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


class ReplicasSlept(_Tagged, frozen=True):
    """Operator's change: replicas are being put to sleep or paused (`asleep` is true), or have been woken (false)."""

    replicas: tuple[ReplicaId, ...]
    asleep: bool


class AdapterLoaded(_Tagged, frozen=True):
    """Operator's change: a LoRA adapter has been loaded, so requests may name it as their model."""

    adapter: Adapter


class AdapterUnloaded(_Tagged, frozen=True):
    """Operator's change: requests may not name a LoRA adapter any more; it may also be one of `--lora-modules`."""

    name: str


Change = ReplicasSlept | AdapterLoaded | AdapterUnloaded


class OperatorState(msgspec.Struct, frozen=True):
    """The sleeping replicas and the LoRA adapters of a deployment, after all changes by operators since its start.

    Attributes:
        asleep: replicas that sleep.
        adapters: adapters that were loaded, by name.
        unloaded: names of adapters that were unloaded.
    """

    asleep: frozenset[ReplicaId] = frozenset()
    adapters: dict[str, Adapter] = msgspec.field(default_factory=dict)
    unloaded: frozenset[str] = frozenset()

    def after(self, change: Change) -> OperatorState:
        """Return a new state, with a change applied."""
        match change:
            case ReplicasSlept(replicas, asleep):
                return replace(self, asleep=self.asleep | {*replicas} if asleep else self.asleep - {*replicas})
            case AdapterLoaded(adapter):
                adapters = {**self.adapters, adapter.name: adapter}
                return replace(self, adapters=adapters, unloaded=self.unloaded - {adapter.name})
            case AdapterUnloaded(name):
                adapters = {other: adapter for other, adapter in self.adapters.items() if other != name}
                return replace(self, adapters=adapters, unloaded=self.unloaded | {name})


NOTHING_CHANGED = OperatorState()


class OperatorChanges:
    """The head's `OperatorState`, and the pending changes, each with the API servers that have not applied it yet.

    A change is pending until all API servers have applied it or have died.
    """

    def __init__(self) -> None:
        self.state = NOTHING_CHANGED
        self._missing: dict[str, set[int]] = {}

    def make(self, change_id: str, change: Change, servers: Iterable[int]) -> None:
        """Apply a change to the state, and make it pending.

        Args:
            change_id: unique id of the change.
            servers: indices of the API servers that must apply the change (`applied`).
        """
        self.state = self.state.after(change)
        self._missing[change_id] = set(servers)

    def applied(self, server: int, change_id: str) -> list[str]:
        """Record that an API server has applied a change. Return the ids of the changes that are no longer pending."""
        self._missing.get(change_id, set()).discard(server)
        return self._complete()

    def server_lost(self, server: int) -> list[str]:
        """Stop waiting for an API server that has died. Return the ids of the changes that are no longer pending."""
        for missing in self._missing.values():
            missing.discard(server)
        return self._complete()

    def mark_awake(self, replica: ReplicaId) -> None:
        """Mark a replica as awake: its process has ended, or its next process is ready, which starts awake."""
        self.state = self.state.after(ReplicasSlept((replica,), asleep=False))

    def _complete(self) -> list[str]:
        complete = [change_id for change_id, missing in self._missing.items() if not missing]
        for change_id in complete:
            del self._missing[change_id]
        return complete


class ReplicaStarting(_Tagged, frozen=True):
    """Head to API server: a replica is about to start, so requests may wait for it."""

    replica: ReplicaId


class ReplicaStarted(_Tagged, frozen=True):
    """Head to API server: the process id of a replica. Sent if the replica's process did not exist when the API server
    started, because replicas that share a device start one after the other.
    """

    replica: ReplicaId
    pid: int


class ReplicaReady(_Tagged, frozen=True):
    """Head to API server: a replica is ready, and the API server must connect to it.

    The replica has connected to two listening sockets, whose file descriptors follow the message.

    Attributes:
        host, pid: the replica's host, and its process id.
        restarts: number of restarts of processes with the replica's name.
        input, output: ZeroMQ addresses of the listening sockets for requests and outputs.
    """

    replica: ReplicaId
    host: str
    pid: int
    restarts: int
    input: str
    output: str


class ReplicaConnected(_Tagged, frozen=True):
    """API server to head: the API server has connected to a replica.

    An engine sends its ready response (vLLM's) only once. The head keeps `ready_response` for API servers that are
    restarted later.
    """

    replica: ReplicaId
    ready_response: bytes


class ReplicaEnded(_Tagged, frozen=True):
    """Head to API server: a replica's process has ended; `again`: it will be restarted."""

    replica: ReplicaId
    reason: str
    again: bool


class ReplicaLeft(_Tagged, frozen=True):
    """Head to API server: the coordinator has removed a replica that had joined from a headless node.

    The API server closes its connection. Its own views do not always show the removal: an API server that is restarted
    while the replica leaves is connected to the replica, and its first view does not contain the replica.
    """

    replica: ReplicaId


class Server(msgspec.Struct, frozen=True):
    """State of one API server; `up`: its process runs, `restarts`: number of its restarts."""

    index: int
    pid: int
    up: bool
    restarts: int


class Servers(_Tagged, frozen=True):
    """Head to API server: the state of all API servers."""

    servers: tuple[Server, ...]


class ServerLost(_Tagged, frozen=True):
    """Head to API server: API server `index` died at the Unix time `at` (s). The receiver makes all replicas abort the
    requests of the dead API server.
    """

    index: int
    at: float


class ServerReady(_Tagged, frozen=True):
    """API server to head: the API server accepts requests."""


class OperatorChange(_Tagged, frozen=True):
    """API server to head, then head to all API servers: apply an operator's change. `id` is a unique text."""

    id: str
    change: Change


class ChangeApplied(_Tagged, frozen=True):
    """The change `id` has been applied: API server to head, by the sender; head to API server, by all API servers."""

    id: str


Message = (
    ReplicaStarting
    | ReplicaStarted
    | ReplicaReady
    | ReplicaConnected
    | ReplicaEnded
    | ReplicaLeft
    | ServerReady
    | Servers
    | ServerLost
    | OperatorChange
    | ChangeApplied
)
_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> Message:
    """Decode one message; msgspec.DecodeError if the data is not a message."""
    message: Message = _decoder.decode(data)
    return message


def send_descriptors(pipe: Connection, descriptors: Sequence[int]) -> None:
    """Send file descriptors through a duplex pipe. The caller has just sent a message that announces them."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        reduction.sendfds(channel, list(descriptors))


def receive_descriptors(pipe: Connection, count: int) -> list[int]:
    """Receive the `count` file descriptors that a received message has announced. The caller must close them.

    Waits for the descriptors, because they may arrive after their message and an event loop may have made the pipe
    non-blocking.
    """
    pipe.poll(COME_WITHIN_S)
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        return list(reduction.recvfds(channel, count))


class SharedCounters:
    """Counters in shared memory. Each API server writes its own slot; the head clears the slot of a dead one.

    Attributes:
        loads: open connections per API server. The server with the fewest accepts the next connection.
        admitted: unfinished requests per API server, in the layout of vLLM's `SharedAdmissionStats`.
            `--max-num-queued-reqs` limits their sum.
    """

    def __init__(self, servers: int) -> None:
        context: Any = get_mp_context()
        self.loads: Array[c_int] = context.RawArray(c_int, [NOT_ACCEPTING] * servers)
        self.admitted: Array[c_longlong] = context.RawArray(c_longlong, SharedAdmissionStats.num_counters(servers))

    def clear(self, server: int) -> None:
        """Reset the counters of an API server that has died: no connections, no unfinished requests."""
        self.loads[server] = NOT_ACCEPTING
        self.admitted[server * SharedAdmissionStats.COUNTERS_PER_SLOT] = 0
