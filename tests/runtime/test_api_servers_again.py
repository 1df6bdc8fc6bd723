"""API servers that die, again and again, and threads that speak to them at once. They are real processes here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.network_utils import ZmqListener

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import end_processes
from vllm_omni_ext.runtime.client.board import NOT_ACCEPTING
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaInfo
from vllm_omni_ext.runtime.launch.descriptors import receive_descriptors, send_descriptors
from vllm_omni_ext.runtime.supervise import api_servers
from vllm_omni_ext.runtime.supervise.api_servers import ApiServers
from vllm_omni_ext.wire.control import (
    ReplicaConnected,
    ReplicaReady,
    ReplicaStarting,
    ServerLost,
    ServerReady,
    Servers,
    decode,
    encode,
)

pytestmark = pytest.mark.engine
FORK = multiprocessing.get_context("fork")
THINKER, TALKER, NEW = ReplicaId("thinker", 0), ReplicaId("talker", 0), ReplicaId("talker", 1)
ABOUT = ReplicaInfo(host="here", pid=7, restarts=2)
WITHIN_S = 10.0
QUIET_S = 0.2
ADDRESS = "ipc:///nowhere/{}-{}-{}"
VIEWS = "tcp://views"


class Deployment:
    """Its replicas are names. Each listener is one end of a pipe that holds the name of its replica and client."""

    def __init__(self, clients: int, **config: Any) -> None:
        self.clients = clients
        self.plan = SimpleNamespace(config=OmniConfig(restart_backoff_s=0.0, **config))
        self.fork = True
        self.listening: dict[ReplicaId, list[tuple[ZmqListener, ZmqListener]]] = {}
        for replica in (THINKER, TALKER):
            self.listen(replica, None)

    def about(self) -> dict[ReplicaId, ReplicaInfo]:
        return {replica: ReplicaInfo(host="here", pid=1) for replica in (THINKER, TALKER)}

    def connections(self, client: int, *, about: Any = None, **fields: Any) -> Connections:
        about = self.about() if about is None else about
        plan: Any = None
        return Connections(plan=plan, configs={}, listeners={}, folder="", client_index=client, about=about, **fields)

    def listen(self, replica: ReplicaId, host: str | None) -> list[tuple[str, str]]:
        self.listening[replica] = [
            (self._listener(replica, client, "i"), self._listener(replica, client, "o"))
            for client in range(self.clients)
        ]
        return [(given.address, taken.address) for given, taken in self.listening[replica]]

    def _listener(self, replica: ReplicaId, client: int, end: str) -> ZmqListener:
        said, heard = socket.socketpair()
        said.sendall(f"{replica} {client} {end}".encode())
        said.close()
        return ZmqListener(ADDRESS.format(replica, client, end), heard)

    def unlisten(self, replica: ReplicaId) -> None:
        for listener in (one for pair in self.listening.pop(replica, ()) for one in pair):
            listener.socket.close()

    def listeners(self, replica: ReplicaId, client: int) -> tuple[ZmqListener, ZmqListener]:
        return self.listening[replica][client]

    def forking(self) -> Any:
        return contextlib.nullcontext()

    def end(self, processes: list[Any]) -> None:
        end_processes(processes, WITHIN_S)


class Told:
    """What API servers were told, as each of them reports it."""

    def __init__(self, clients: int) -> None:
        self._pipes = [FORK.Pipe(duplex=False) for _ in range(clients)]

    def report(self, server: int, what: Any) -> None:
        self._pipes[server][1].send(what)

    def next(self, server: int) -> Any:
        """The next thing this server was told."""
        assert self._pipes[server][0].poll(WITHIN_S), f"API server {server} was told nothing more"
        return self._pipes[server][0].recv()

    def nothing_more(self, server: int) -> bool:
        return not self._pipes[server][0].poll(QUIET_S)


def serve(connections: Connections, control: Connection, told: Told) -> None:
    """Body of an API server: says that it is ready, and passes on what it is told."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert connections.board is not None  # shared memory: it travels with the process only
    told.report(connections.client_index, replace(connections, board=None))
    for replica in connections.about:
        said = (
            b"said by %s" % str(replica).encode()
            if connections.ready_responses is None
            else connections.ready_responses[replica]
        )
        control.send_bytes(encode(ReplicaConnected(str(replica), said)))
    control.send_bytes(encode(ServerReady()))
    while True:
        message: Any = decode(control.recv_bytes())
        if isinstance(message, ReplicaReady):
            names = []
            for descriptor in receive_descriptors(control, 2):
                with socket.socket(fileno=descriptor) as listener:
                    names.append(listener.recv(99).decode())
            control.send_bytes(encode(ReplicaConnected(message.replica, b"said by " + message.replica.encode())))
            message = (message, names)
        told.report(connections.client_index, message)


class Running:
    """API servers that answer, and what they were told."""

    def __init__(self, stack: contextlib.ExitStack, clients: int, **config: Any) -> None:
        self.deployment, self.told = Deployment(clients, **config), Told(clients)
        deployment: Any = self.deployment

        def start(connections: Connections, control: Connection) -> Any:
            return serve, (connections, control, self.told)

        self.servers = stack.enter_context(ApiServers(deployment, VIEWS, start))
        self.first = [self.told.next(client) for client in range(clients)]
        assert self.servers.wait()
        for client in range(clients):
            assert self.up(client) == [True] * clients

    def up(self, client: int) -> list[bool]:
        """What a server is told next: which servers are up."""
        message = self.told.next(client)
        assert isinstance(message, Servers), message
        assert [server.index for server in message.servers] == list(range(self.deployment.clients))
        return [server.up for server in message.servers]

    def kill(self, client: int) -> float | None:
        process = self.servers.processes[client]
        process.kill()
        process.join(WITHIN_S)
        return self.servers.lost(client)

    def known(self, replica: ReplicaId, within_s: float = WITHIN_S) -> bool:
        """Whether the head has been told what a replica has said."""
        deadline = time.monotonic() + within_s
        while replica not in self.servers._ready_responses and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return replica in self.servers._ready_responses


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def test_only_live_api_servers_are_told_of_a_death(stack: contextlib.ExitStack) -> None:
    running = Running(stack, 3)
    servers, told = running.servers, running.told
    before = time.time()
    assert running.kill(1) == 0.0
    for client in (0, 2):
        lost = told.next(client)
        assert isinstance(lost, ServerLost) and lost.index == 1 and before <= lost.at <= time.time()
        assert running.up(client) == [True, False, True]
    servers.listen(NEW)
    servers.ready(NEW, ABOUT)
    for client in (0, 2):
        assert told.next(client) == ReplicaStarting(str(NEW))
        assert told.next(client)[1] == [f"{NEW} {client} i", f"{NEW} {client} o"]
    assert told.nothing_more(1)


def test_counters_of_a_dead_api_server_are_cleared(stack: contextlib.ExitStack) -> None:
    running = Running(stack, 2)
    board = running.servers._board
    board.loads[:], board.admitted[8] = [3, 2], 5
    running.kill(1)
    assert list(board.loads) == [3, NOT_ACCEPTING] and sum(board.admitted) == 0


def test_restarted_api_server_gets_ready_responses_of_earlier_replicas(stack: contextlib.ExitStack) -> None:
    """Its server dies, another one follows it and says that it knows nothing; a third one must still be told."""
    running = Running(stack, 1)
    assert running.known(THINKER)
    first = dict(running.servers._ready_responses)
    running.servers._ready_responses.pop(THINKER)
    running.kill(0)
    running.servers.start_again(0)
    assert running.told.next(0).ready_responses[THINKER] == b""
    running.servers._ready_responses.update(first)
    assert isinstance(running.told.next(0), Servers)
    running.servers.listen(NEW)
    running.servers.ready(NEW, ABOUT)
    assert running.known(NEW), "what the second one said was read before this"
    assert running.servers._ready_responses[THINKER] == b"said by thinker/0"


def test_many_restarts_leave_no_open_files(stack: contextlib.ExitStack) -> None:
    running = Running(stack, 2, restart_limit=100)

    def again(times: int) -> int:
        for _ in range(times):
            running.kill(0)
            running.servers.start_again(0)
            assert isinstance(running.told.next(0), Connections)
            assert running.up(0) == [True, True]
        return len(os.listdir("/proc/self/fd"))

    before = again(2)
    assert again(6) <= before + 1


def test_nothing_comes_between_a_message_and_its_descriptors(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else has something to say: what is read with them would be lost."""
    running, speaks = Running(stack, 1), threading.Event()
    running.servers.listen(NEW)

    def interrupted(*given: Any) -> None:
        speaks.set()
        time.sleep(QUIET_S)
        send_descriptors(*given)

    def interrupt() -> None:
        speaks.wait(WITHIN_S)
        running.servers._tell_servers()

    monkeypatch.setattr(api_servers, "send_descriptors", interrupted)
    other = threading.Thread(target=interrupt)
    other.start()
    running.servers.ready(NEW, ABOUT)
    other.join()
    told = [running.told.next(0) for _ in range(3)]
    assert told[1][1] == [f"{NEW} 0 i", f"{NEW} 0 o"] and isinstance(told[2], Servers)


def test_closing_ends_all_api_servers() -> None:
    with contextlib.ExitStack() as stack:
        running = Running(stack, 3)
        processes = list(running.servers.processes.values())
        assert all(process.is_alive() for process in processes)
    assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 3
