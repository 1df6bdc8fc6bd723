"""The head and its API servers: real processes, real pipes, nothing behind them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.launch.descriptors import receive_descriptors
from vllm_omni_ext.runtime.supervise.api_servers import ApiServers
from vllm_omni_ext.wire.control import (
    ChangeAsked,
    ChangeKnown,
    ChangeMade,
    ChangeSettled,
    ReplicaConnected,
    ReplicaEnded,
    ReplicaReady,
    ReplicaStarted,
    ReplicaStarting,
    ServerLost,
    ServerReady,
    Servers,
    decode,
    encode,
)
from vllm_omni_ext.wire.operator_state import ReplicasSlept

pytestmark = pytest.mark.engine
TALKER, LATE = ReplicaId("talker", 0), ReplicaId("talker", 1)
ABOUT = ReplicaInfo(host="here", pid=5, restarts=1)
PATIENCE_S = 10.0
LIFETIME_S = 60
SLEPT = ReplicasSlept(("talker/0",), asleep=True)


class Deployment:
    """Holds the listeners; `made` has what each API server was started with."""

    fork = True

    def __init__(self, clients: int, **config: Any) -> None:
        self.plan: Any = SimpleNamespace(config=OmniConfig(restart_backoff_s=0.5, **config))
        self.clients = clients
        self.listening: dict[ReplicaId, list[tuple[Any, Any]]] = {}
        self.made: list[tuple[int, dict[str, Any]]] = []
        self.error: OSError | None = None

    def about(self) -> dict[ReplicaId, ReplicaInfo]:
        return {TALKER: ABOUT}

    def connections(self, client: int, **said: Any) -> Any:
        self.made.append((client, said))
        return SimpleNamespace(client_index=client)

    def forking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def listen(self, replica: ReplicaId, host: str | None = None) -> list[tuple[str, str]]:
        if self.error is not None:
            raise self.error
        self.listening[replica] = [
            (_Listener(f"in {client}"), _Listener(f"out {client}")) for client in range(self.clients)
        ]
        return [(given.address, taken.address) for given, taken in self.listening[replica]]

    def listeners(self, replica: ReplicaId, client: int) -> tuple[Any, Any]:
        return self.listening[replica][client]

    def unlisten(self, replica: ReplicaId) -> None:
        for pair in self.listening.pop(replica, []):
            for listener in pair:
                listener.socket.close()

    def end(self, processes: list[Any]) -> None:
        for process in processes:
            process.kill()
            process.join()


class _Listener:
    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.create_server(("127.0.0.1", 0))


def server(connections: Any, control: Connection, report: Connection, behaviour: str) -> None:
    """An API server that reports what it is told: (its number, the message), and for listeners their ports.

    `behaviour`: "dies" at once, "asks" for a change, is "silent" about changes.
    """
    signal.alarm(LIFETIME_S)
    if behaviour == "dies":
        os._exit(1)
    control.send_bytes(encode(ReplicaConnected("talker/0", f"hello {connections.client_index}".encode())))
    control.send_bytes(encode(ServerReady()))
    if behaviour == "asks":
        control.send_bytes(encode(ChangeAsked(7, SLEPT)))
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            message = decode(control.recv_bytes())
            ports = []
            if isinstance(message, ReplicaReady):
                for number in receive_descriptors(control, 2):
                    with socket.socket(fileno=number) as listener:
                        ports.append(listener.getsockname()[1])
                control.send_bytes(encode(ReplicaConnected(message.replica, b"late")))
            report.send((connections.client_index, message, ports))
            if isinstance(message, ChangeMade) and behaviour != "silent":
                control.send_bytes(encode(ChangeKnown(message.version)))


class Bench:
    def __init__(self, clients: int = 2, behaviour: Callable[[int], str] = lambda client: "", **config: Any) -> None:
        self.deployment: Any = Deployment(clients, **config)
        self.reports, report = get_context("fork").Pipe(duplex=False)

        def start(connections: Any, control: Connection) -> Any:
            return server, (connections, control, report, behaviour(connections.client_index))

        self.servers = ApiServers(self.deployment, "views", start)

    def heard(self, kind: type, count: int) -> dict[int, Any]:
        """The next messages of this kind, by API server; others are skipped."""
        found: dict[int, Any] = {}
        while len(found) < count:
            assert self.reports.poll(PATIENCE_S)
            client, message, ports = self.reports.recv()
            if isinstance(message, kind):
                found[client] = (message, ports) if ports else message
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with made.servers:
        assert made.servers.wait()
        yield made
    assert all(process.exitcode is not None for process in made.servers.processes.values())


def test_every_api_server_is_told_of_every_replica(bench: Bench) -> None:
    for message in bench.heard(Servers, 2).values():
        pids = {client: process.pid for client, process in bench.servers.processes.items()}
        assert [(each.index, each.pid, each.up, each.restarts) for each in message.servers] == [
            (client, pids[client], True, 0) for client in (0, 1)
        ]


def test_a_replica_starts_is_ready_and_ends(bench: Bench) -> None:
    assert bench.servers.listen(LATE) == [("in 0", "out 0"), ("in 1", "out 1")]
    assert bench.heard(ReplicaStarting, 2) == dict.fromkeys((0, 1), ReplicaStarting("talker/1"))
    bench.servers.ready(LATE, ReplicaInfo(host="there", pid=9, restarts=2))
    for client, (message, ports) in bench.heard(ReplicaReady, 2).items():
        assert message == ReplicaReady("talker/1", "there", 9, 2, f"in {client}", f"out {client}")
        mine = bench.deployment.listeners(LATE, client)
        assert ports == [listener.socket.getsockname()[1] for listener in mine], "each gets its own listeners"
    bench.servers.ended(LATE, "killed", again=True)
    assert bench.heard(ReplicaEnded, 2) == dict.fromkeys((0, 1), ReplicaEnded("talker/1", "killed", True))
    assert LATE not in bench.deployment.listening


def test_a_head_that_cannot_listen_tells_nobody(bench: Bench) -> None:
    bench.deployment.error = OSError("no such address")
    with pytest.raises(OSError, match="no such address"):
        bench.servers.listen(LATE)
    bench.servers.ended(LATE, "no such address", again=False)
    assert set(bench.heard(ReplicaEnded, 2)) == {0, 1}


def test_api_server_that_exits_during_startup_is_noticed() -> None:
    made = Bench(behaviour=lambda client: "dies" if client else "")
    with made.servers:
        assert made.servers.wait() is False


def kill(bench: Bench, client: int) -> None:
    process = bench.servers.processes[client]
    process.kill()
    process.join()


def test_death_of_an_api_server_is_announced_to_the_others(bench: Bench) -> None:
    bench.heard(Servers, 2)
    kill(bench, 0)
    before = time.time()
    assert bench.servers.lost(0) == 0.5
    lost = bench.heard(ServerLost, 1)[1]
    assert lost.index == 0 and before <= lost.at <= time.time()
    assert [each.up for each in bench.heard(Servers, 1)[1].servers] == [False, True]
    bench.servers.listen(LATE)
    bench.servers.ready(LATE, ABOUT)
    assert set(bench.heard(ReplicaReady, 1)) == {1}


def test_message_to_an_api_server_that_just_died_is_no_error(bench: Bench) -> None:
    kill(bench, 0)
    bench.servers.listen(LATE)
    bench.servers.ready(LATE, ABOUT)
    bench.servers.ended(LATE, "killed", again=False)
    assert set(bench.heard(ReplicaEnded, 1)) == {1}


def test_restarted_api_server_knows_all_replicas(bench: Bench) -> None:
    other = ReplicaId("talker", 2)
    bench.servers.listen(LATE)
    bench.servers.ready(LATE, ABOUT)
    bench.heard(ReplicaReady, 2)
    bench.servers.listen(other)
    deadline = time.monotonic() + PATIENCE_S
    while bench.servers._ready_responses.get(LATE) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(bench, 0)
    bench.servers.lost(0)
    process = bench.servers.start_again(0)
    assert process is bench.servers.processes[0] and process.is_alive()
    client, said = bench.deployment.made[-1]
    assert client == 0 and set(said["about"]) == {TALKER, LATE} and said["starting"] == (other,)
    assert said["ready_responses"][LATE] == b"late" and said["ready_responses"][TALKER].startswith(b"hello")
    message = bench.heard(Servers, 2)[0]
    assert [(each.up, each.restarts) for each in message.servers] == [(True, 1), (True, 0)]


def test_state_of_a_forgotten_replica_is_released(bench: Bench) -> None:
    bench.servers.listen(LATE)
    bench.servers.forgotten(LATE)
    assert LATE in bench.deployment.listening, "it is starting: the name was given anew"
    bench.servers.ready(LATE, ABOUT)
    bench.servers.forgotten(LATE)
    assert LATE not in bench.deployment.listening
    kill(bench, 0)
    bench.servers.lost(0)
    bench.servers.start_again(0)
    assert set(bench.deployment.made[-1][1]["about"]) == {TALKER}


def test_the_limit_of_restarts() -> None:
    made = Bench(restart_limit=1)
    with made.servers:
        assert made.servers.wait()
        kill(made, 0)
        assert made.servers.lost(0) == 0.5
        made.servers.start_again(0)
        kill(made, 0)
        assert made.servers.lost(0) is None


def test_a_process_that_is_made_later_is_told_and_known_to_a_server_that_follows() -> None:
    bench = Bench()
    with bench.servers as servers:
        assert servers.wait()
        bench.deployment.launched(TALKER, 77)
        assert bench.heard(ReplicaStarted, 2) == dict.fromkeys((0, 1), ReplicaStarted("talker/0", 77))
        kill(bench, 1)
        servers.lost(1)
        servers.start_again(1)
        client, said = bench.deployment.made[-1]
        assert client == 1 and said["about"] == {TALKER: ReplicaInfo(host="here", pid=77, restarts=1)}


def test_restarted_api_server_is_told_of_restarts_that_happened_while_it_was_down(bench: Bench) -> None:
    bench.servers.listen(LATE)
    bench.servers.ready(LATE, ABOUT)
    kill(bench, 0)
    bench.servers.lost(0)
    bench.servers.listen(TALKER)
    bench.servers.ready(TALKER, replace(ABOUT, restarts=2))
    bench.servers.ended(TALKER, "killed", again=False)
    bench.servers.ended(LATE, "it has left", again=False)
    bench.servers.start_again(0)
    assert bench.deployment.made[-1][1]["restarts"] == {TALKER: 2}, "one of the plan, though it is down"


def test_a_change_goes_to_all_and_then_the_one_that_asked_goes_on() -> None:
    made = Bench(3, lambda client: "asks" if client == 1 else "")
    with made.servers:
        assert made.servers.wait()
        assert {each.change for each in made.heard(ChangeMade, 3).values()} == {SLEPT}
        assert made.heard(ChangeSettled, 1) == {1: ChangeSettled(7)}


def test_a_change_is_not_settled_before_all_know_and_a_dead_server_is_not_waited_for() -> None:
    made = Bench(3, lambda client: {0: "silent", 1: "asks"}.get(client, ""))
    with made.servers:
        assert made.servers.wait()
        made.heard(ChangeMade, 3)
        made.servers.listen(LATE)
        assert made.heard(ReplicaStarting, 3), "sent after all others had answered"
        kill(made, 0)
        made.servers.lost(0)
        found = {client: type(message) for client, message in iter_heard(made, until=ChangeSettled)}
        assert found[1] is ChangeSettled
        made.servers.start_again(0)
        client, said = made.deployment.made[-1]
        assert client == 0 and said["operator_state"].asleep == {"talker/0"}


def iter_heard(bench: Bench, until: type) -> Iterator[tuple[int, Any]]:
    """Messages as they come, up to the first of this kind."""
    message: Any = None
    while not isinstance(message, until):
        assert bench.reports.poll(PATIENCE_S)
        client, message, _ = bench.reports.recv()
        yield client, message


def test_a_replica_that_has_ended_is_awake_when_it_comes_back() -> None:
    made = Bench(2, lambda client: "asks" if client == 1 else "")
    with made.servers:
        assert made.servers.wait()
        made.heard(ChangeSettled, 1)
        made.servers.ended(TALKER, "killed", again=True)
        kill(made, 0)
        made.servers.lost(0)
        made.servers.start_again(0)
        assert made.deployment.made[-1][1]["operator_state"].asleep == frozenset()
