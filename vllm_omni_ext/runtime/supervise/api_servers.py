"""Starts and restarts the API server processes, and sends them messages. Runs in the head process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from vllm.utils.system_utils import get_mp_context

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaInfo
from vllm_omni_ext.runtime.control import (
    ChangeApplied,
    Message,
    OperatorChange,
    OperatorChanges,
    ReplicaConnected,
    ReplicaEnded,
    ReplicaLeft,
    ReplicaReady,
    ReplicaStarted,
    ReplicaStarting,
    Server,
    ServerLost,
    ServerReady,
    Servers,
    SharedCounters,
    decode,
    encode,
    send_descriptors,
)
from vllm_omni_ext.runtime.launch.inherit import environment
from vllm_omni_ext.runtime.launch.launcher import START_METHOD, Deployment
from vllm_omni_ext.runtime.supervise.process_watcher import RestartTotals, restarts_of

Start = Callable[[Connections, Connection], tuple[Callable[..., None], tuple[Any, ...]]]
"""Function that returns (entry function, arguments) of an API server process that gets these connections and this end
of a pipe to the head."""


@dataclass
class _Running:
    process: Any
    pipe: Connection
    up: bool = True


class ApiServers:
    """Starts the API servers, and sends them the events of replicas, which it receives as a `ReplicaListener`.

    Use as a context manager; leaving it ends the API servers and the replicas. `wait`, entering and leaving run in the
    head's main thread, all other public methods in the replica supervisor's thread.

    Args:
        deployment: the replicas.
        views: address at which the coordinator publishes views, i.e. the states of all replicas.
        start: returns the entry function of each process.
    """

    def __init__(self, deployment: Deployment, views: str, start: Start) -> None:
        self._deployment = deployment
        self._views = views
        self._start = start
        self._servers: dict[int, _Running] = {}
        self._restarts = {client: restarts_of(deployment.plan.config) for client in range(deployment.clients)}
        self._about: dict[ReplicaId, ReplicaInfo] = {}
        self._starting: set[ReplicaId] = set()
        self._planned: tuple[ReplicaId, ...] = ()
        self._totals = RestartTotals()
        self._board = SharedCounters(deployment.clients)
        self._sending = threading.Lock()
        self._changes = OperatorChanges()
        self._changing = threading.Lock()
        """Lock, held while a change of an operator is sent to all API servers, and while an API server is started."""
        self._ready_responses: dict[ReplicaId, bytes] = {}
        self._reader: threading.Thread | None = None
        self._wake, self._waker = connection.Pipe(duplex=False)

    @property
    def processes(self) -> dict[int, Any]:
        """The process of each API server, by the server's index."""
        return {client: server.process for client, server in self._servers.items()}

    def __enter__(self) -> ApiServers:
        self._about = self._deployment.about()
        self._planned = tuple(self._about)
        for client in range(self._deployment.clients):
            self._launch(client, self._deployment.connections(client, views=self._views, board=self._board))
        self._deployment.launched = self._replica_started
        return self

    def _launch(self, client: int, connections: Connections) -> None:
        with environment({START_METHOD: "fork"} if self._deployment.fork else {}):
            context = get_mp_context()
            theirs, ours = context.Pipe()
            body, arguments = self._start(connections, theirs)
            process = context.Process(target=body, name=f"ApiServer_{client}", args=arguments)
            with self._deployment.forking():
                process.start()
            theirs.close()
        self._servers[client] = _Running(process, ours)

    def __exit__(self, *exc: object) -> None:
        # Ended together with the replicas: a replica without its API server waits seconds to send its last message.
        self._deployment.end(list(self.processes.values()))
        if self._reader is not None:
            self._waker.send_bytes(b"end")
            self._reader.join()
        for pipe in (*(server.pipe for server in self._servers.values()), self._wake, self._waker):
            pipe.close()

    def _replica_started(self, replica: ReplicaId, pid: int) -> None:
        """Send the API servers the process id of a replica whose process did not exist when they were started."""
        self._about[replica] = replace(self._about[replica], pid=pid)
        self._broadcast(ReplicaStarted(replica, pid))

    def wait(self) -> bool:
        """Wait until all API servers accept requests. Return False if one has ended instead."""
        try:
            for client, server in self._servers.items():
                while not isinstance(message := decode(server.pipe.recv_bytes()), ServerReady):
                    self._receive(client, message)
        except (EOFError, ConnectionResetError):
            return False
        self._reader = threading.Thread(target=self._read, name="omni-servers", daemon=True)
        self._reader.start()
        self._send_states()
        return True

    # -- messages of the replica supervisor -----------------------------------------------------------------------

    def listen(self, replica: ReplicaId, host: str | None = None) -> Sequence[tuple[str, str]]:
        """Open the API servers' listeners for a replica, and announce the replica to the API servers.

        Args:
            host: the address of this host that the replica can reach; None for a local replica.

        Returns:
            The addresses (input, output) of each API server to which the replica connects.

        Raises:
            OSError: this process cannot listen at that address.
        """
        addresses = self._deployment.listen(replica, host)
        self._starting.add(replica)
        self._broadcast(ReplicaStarting(replica))
        return addresses

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        """Send the API servers `ReplicaReady`, and the sockets with which they connect to the replica."""
        self._starting.discard(replica)
        self._about[replica] = about = replace(about, restarts=self._totals.add(replica, about.restarts))
        with self._changing:  # so that every API server receives this message and a change in the head's order
            self._changes.mark_awake(replica)  # a change that the process's end has crossed may have marked it asleep
            for client, server in self._servers.items():
                given, taken = self._deployment.listeners(replica, client)
                message = ReplicaReady(
                    replica, about.host, about.pid, about.restarts, input=given.address, output=taken.address
                )
                self._send(server, message, given.socket.fileno(), taken.socket.fileno())

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """Drop the data of a replica that has ended, and send `ReplicaEnded`; `again`: it will be restarted."""
        self._drop(replica)
        if again:
            self._starting.add(replica)
        self._broadcast(ReplicaEnded(replica, reason, again))

    def forgotten(self, replica: ReplicaId) -> None:
        """Drop the data of a replica that the coordinator has removed, and send `ReplicaLeft`."""
        self._drop(replica)
        self._broadcast(ReplicaLeft(replica))

    def _drop(self, replica: ReplicaId) -> None:
        self._starting.discard(replica)
        self._about.pop(replica, None)
        self._ready_responses.pop(replica, None)
        self._deployment.unlisten(replica)
        with self._changing:
            self._changes.mark_awake(replica)

    # -- when an API server dies ---------------------------------------------------------------------------------

    def lost(self, client: int) -> float | None:
        """Handle the death of an API server: the other API servers make the replicas abort its requests.

        Args:
            client: index of the API server.

        Returns:
            Pause before the restart of the API server, in seconds; None: no restart.
        """
        with self._changing:
            self._servers[client].up = False
            self._complete(self._changes.server_lost(client))
        self._board.clear(client)
        self._broadcast(ServerLost(client, time.time()))
        self._send_states()
        return self._restarts[client].failed(time.monotonic())

    def start_again(self, client: int) -> Any:
        """Restart an API server (index `client`) that has died. Return the new process."""
        about = dict(self._about)
        names = {*about, *self._starting, *self._planned}
        with self._changing:
            connections = self._deployment.connections(
                client,
                views=self._views,
                board=self._board,
                about=about,
                ready_responses={replica: self._ready_responses.get(replica, b"") for replica in about},
                starting=tuple(self._starting),
                restarts={name: total for name, total in self._totals.by_name.items() if name in names},
                operator_state=self._changes.state,
            )
            self._launch(client, connections)
        self._waker.send_bytes(b"look")
        self._send_states()
        return self._servers[client].process

    # -- messages ------------------------------------------------------------------------------------------------

    def _send_states(self) -> None:
        known = tuple(
            Server(client, server.process.pid, server.up, self._restarts[client].count)
            for client, server in sorted(self._servers.items())
        )
        self._broadcast(Servers(known))

    def _broadcast(self, message: Message) -> None:
        for server in self._servers.values():
            self._send(server, message)

    def _send(self, server: _Running, message: Message, *descriptors: int) -> None:
        if not server.up:
            return
        # A process that has ended is handled by its supervisor. Descriptors must directly follow their message.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), self._sending:
            server.pipe.send_bytes(encode(message))
            if descriptors:
                send_descriptors(server.pipe, descriptors)

    def _read(self) -> None:
        gone: set[Any] = set()
        while True:
            pipes = {server.pipe: client for client, server in self._servers.items()}
            gone &= pipes.keys()  # drops the old pipe of a restarted server, which closes it
            ready = connection.wait([*(pipes.keys() - gone), self._wake])
            if self._wake in ready:
                if self._wake.recv_bytes() == b"end":
                    return
                continue
            for pipe in ready:
                try:
                    self._receive(pipes[pipe], decode(pipe.recv_bytes()))  # type: ignore[union-attr, index]
                except (EOFError, ConnectionResetError):
                    gone.add(pipe)

    def _receive(self, client: int, message: Message) -> None:
        match message:
            case ReplicaConnected(replica, ready_response) if ready_response:  # empty: a replacing API server
                self._ready_responses[replica] = ready_response
            case OperatorChange(change_id, change):
                with self._changing:
                    self._changes.make(change_id, change, (other for other, each in self._servers.items() if each.up))
                    self._broadcast(message)
            case ChangeApplied(change_id):
                with self._changing:
                    self._complete(self._changes.applied(client, change_id))

    def _complete(self, changes: Iterable[str]) -> None:
        for change_id in changes:
            self._broadcast(ChangeApplied(change_id))
