"""The head and its API servers: real processes and pipes, no engines."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from vllm.utils.network_utils import ZmqListener

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import end_processes
from vllm_omni_ext.runtime import control as msg
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaInfo
from vllm_omni_ext.runtime.control import (
    NOT_ACCEPTING,
    ReplicasSlept,
    Servers,
    decode,
    encode,
    receive_descriptors,
    send_descriptors,
)
from vllm_omni_ext.runtime.supervise import api_servers, process_watcher
from vllm_omni_ext.runtime.supervise.api_servers import ApiServers

pytestmark = pytest.mark.engine
FORK = multiprocessing.get_context("fork")
THINKER, TALKER, NEW, OTHER = ReplicaId("thinker", 0), *(ReplicaId("talker", i) for i in range(3))
ABOUT = ReplicaInfo(host="here", pid=7, restarts=2)
SLEPT = ReplicasSlept((ReplicaId("talker", 0),), asleep=True)
WITHIN_S, QUIET_S, LIFETIME_S = 10.0, 0.2, 60
BACKOFF_S = 0.5


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_watcher, "RESTART_BACKOFF_S", BACKOFF_S)


class Deployment:
    """Its replicas are names. Each listener is one end of a pipe that holds the name of its replica and client."""

    fork = True

    def __init__(self, clients: int, **config: Any) -> None:
        self.clients = clients
        self.plan = SimpleNamespace(config=OmniConfig(**config))
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
            (self._listener(f"{replica} {client} in"), self._listener(f"{replica} {client} out"))
            for client in range(self.clients)
        ]
        return [(given.address, taken.address) for given, taken in self.listening[replica]]

    def _listener(self, name: str) -> ZmqListener:
        writing, reading = socket.socketpair()
        with writing:
            writing.sendall(name.encode())
        return ZmqListener(name, reading)

    def unlisten(self, replica: ReplicaId) -> None:
        for listener in (one for pair in self.listening.pop(replica, ()) for one in pair):
            listener.socket.close()

    def listeners(self, replica: ReplicaId, client: int) -> tuple[ZmqListener, ZmqListener]:
        return self.listening[replica][client]

    def forking(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def end(self, processes: list[Any]) -> None:
        end_processes(processes, WITHIN_S)


def serve(connections: Connections, control: Connection, report: Connection, behaviour: str) -> None:
    """Body of an API server: reports its connections, then every message, with the names of its listeners.

    `behaviour`: "dies" at once, "asks" for a change, is "silent" about changes.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(LIFETIME_S)
    if behaviour == "dies":
        os._exit(1)
    report.send(replace(connections, board=None))  # shared memory: it travels with the process only
    earlier = connections.ready_responses
    for replica in connections.about:
        response = f"response of {replica}".encode() if earlier is None else earlier[replica]
        control.send_bytes(encode(msg.ReplicaConnected(replica, response)))
    control.send_bytes(encode(msg.ServerReady()))
    if behaviour == "asks":
        control.send_bytes(encode(msg.OperatorChange("id", SLEPT)))
    while True:
        message: Any = decode(control.recv_bytes())
        if isinstance(message, msg.ReplicaReady):
            names = []
            for descriptor in receive_descriptors(control, 2):
                with socket.socket(fileno=descriptor) as listener:
                    names.append(listener.recv(99).decode())
            control.send_bytes(encode(msg.ReplicaConnected(message.replica, f"response of {message.replica}".encode())))
            report.send((message, names))
        else:
            report.send(message)
        if isinstance(message, msg.OperatorChange) and behaviour != "silent":
            control.send_bytes(encode(msg.ChangeApplied(message.id)))


class Running:
    """API servers, and the messages that each of them reports."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        clients: int = 2,
        behaviour: Mapping[int, str] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        self.deployment: Any = Deployment(clients, **config)
        self._reports = [FORK.Pipe(duplex=False) for _ in range(clients)]

        def start(connections: Connections, control: Connection) -> Any:
            client = connections.client_index
            return serve, (connections, control, self._reports[client][1], behaviour.get(client, ""))

        self.servers = stack.enter_context(ApiServers(self.deployment, "tcp://views", start))
        self.ready = self.servers.wait()
        for client in range(clients) if not behaviour else ():
            assert self.up(client) == [True] * clients

    def next(self, client: int) -> Any:
        """The next report of an API server."""
        assert self._reports[client][0].poll(WITHIN_S), f"API server {client} has received nothing more"
        return self._reports[client][0].recv()

    def until(self, client: int, kind: type) -> Any:
        """The next message of this kind that an API server reports; others are skipped."""
        while not isinstance(message := self.next(client), kind):
            pass
        return message

    def nothing_more(self, client: int) -> bool:
        return not self._reports[client][0].poll(QUIET_S)

    def up(self, client: int) -> list[bool]:
        """The API servers that are up, from the next such message to an API server."""
        message = self.until(client, Servers)
        assert [(each.index, each.pid) for each in message.servers] == [
            (index, process.pid) for index, process in sorted(self.servers.processes.items())
        ]
        return [each.up for each in message.servers]

    def join(self, replica: ReplicaId, about: ReplicaInfo = ABOUT) -> None:
        self.servers.listen(replica)
        self.servers.ready(replica, about)

    def kill(self, client: int) -> float | None:
        """Kill an API server; returns the pause before its restart."""
        process = self.servers.processes[client]
        process.kill()
        process.join(WITHIN_S)
        return self.servers.lost(client)

    def restart(self, client: int) -> Connections:
        """Kill an API server and start it again; returns its connections."""
        self.kill(client)
        self.servers.start_again(client)
        return self.until(client, Connections)

    def responds(self, replica: ReplicaId) -> bool:
        """Whether the head receives the ready response of a replica."""
        deadline = time.monotonic() + WITHIN_S
        while replica not in self.servers._ready_responses and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return replica in self.servers._ready_responses


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def test_start_readiness_and_end_of_a_replica_are_sent_to_every_api_server(stack: contextlib.ExitStack) -> None:
    running = Running(stack)
    servers = running.servers
    assert servers.listen(NEW) == [("talker/1 0 in", "talker/1 0 out"), ("talker/1 1 in", "talker/1 1 out")]
    servers.ready(NEW, ReplicaInfo(host="there", pid=9, restarts=2))
    servers.ended(NEW, "killed", again=True)
    for client in (0, 1):
        own = [f"talker/1 {client} in", f"talker/1 {client} out"]
        assert running.next(client) == msg.ReplicaStarting(NEW)
        assert running.next(client) == (msg.ReplicaReady(NEW, "there", 9, 2, *own), own)
        assert running.next(client) == msg.ReplicaEnded(NEW, "killed", True)
    servers.forgotten(NEW)
    for client in (0, 1):
        assert running.next(client) == msg.ReplicaLeft(NEW)
    assert NEW not in running.deployment.listening


def test_api_server_that_exits_during_startup_is_detected(stack: contextlib.ExitStack) -> None:
    assert Running(stack, behaviour={1: "dies"}).ready is False


def test_only_live_api_servers_are_sent_the_death_of_one(stack: contextlib.ExitStack) -> None:
    running = Running(stack, 3)
    board, before = running.servers._board, time.time()
    board.loads[:], board.admitted[8] = [3, 2, 1], 5
    assert running.kill(1) == BACKOFF_S
    assert list(board.loads) == [3, NOT_ACCEPTING, 1] and sum(board.admitted) == 0
    running.join(NEW)
    for client in (0, 2):
        lost = running.next(client)
        assert isinstance(lost, msg.ServerLost) and lost.index == 1 and before <= lost.at <= time.time()
        assert running.up(client) == [True, False, True]
        assert running.next(client) == msg.ReplicaStarting(NEW)
        assert running.next(client)[1] == [f"{NEW} {client} in", f"{NEW} {client} out"]
    assert running.nothing_more(1)


def test_message_to_an_api_server_that_just_died_is_no_error(stack: contextlib.ExitStack) -> None:
    running = Running(stack, restart_limit=1)
    running.servers.processes[0].kill()
    running.servers.processes[0].join()
    running.deployment.launched(TALKER, 77)
    assert running.next(1) == msg.ReplicaStarted(TALKER, 77)
    running.join(NEW)
    running.servers.ended(NEW, "killed", again=False)
    assert running.until(1, msg.ReplicaEnded).replica == NEW
    assert running.restart(0).about[TALKER] == ReplicaInfo(host="here", pid=77)
    assert running.kill(0) is None, "the limit of restarts"


def test_restarted_api_server_receives_all_replicas_and_their_ready_responses(stack: contextlib.ExitStack) -> None:
    running = Running(stack)
    running.join(NEW)
    assert running.responds(NEW) and running.responds(THINKER)
    running.servers.listen(OTHER)
    made = running.restart(0)
    assert set(made.about) == {THINKER, TALKER, NEW} and made.starting == (OTHER,)
    assert made.ready_responses[NEW] == b"response of talker/1"
    assert running.up(0) == [True, True]
    assert running.servers.processes[0].is_alive()


def test_unknown_ready_response_of_a_restarted_api_server_replaces_none(stack: contextlib.ExitStack) -> None:
    """Its server dies, the next one reports an empty response; a third one must still receive the first response."""
    running = Running(stack, 1)
    assert running.responds(THINKER)
    response = running.servers._ready_responses.pop(THINKER)
    assert running.restart(0).ready_responses[THINKER] == b""
    running.servers._ready_responses[THINKER] = response
    running.join(NEW)
    assert running.responds(NEW), "the reports of the second one were read before this"
    assert running.servers._ready_responses[THINKER] == response


def test_state_of_a_forgotten_replica_is_released(stack: contextlib.ExitStack) -> None:
    running = Running(stack)
    running.servers.listen(NEW)
    running.servers.forgotten(NEW)
    assert NEW not in running.deployment.listening, "it has sent heartbeats, and was not ready yet"
    running.join(NEW)
    running.servers._receive(0, msg.OperatorChange("id", ReplicasSlept((NEW,), asleep=True)))
    running.servers.forgotten(NEW)
    assert NEW not in running.deployment.listening
    connections = running.restart(0)
    assert set(connections.about) == {THINKER, TALKER} and connections.starting == ()
    assert connections.operator_state.asleep == frozenset(), "the next replica of that name is awake"


def test_restarts_while_an_api_server_is_down_are_part_of_its_connections(stack: contextlib.ExitStack) -> None:
    running = Running(stack)
    running.join(NEW)
    running.kill(0)
    running.join(TALKER, ABOUT)
    running.servers.ended(TALKER, "killed", again=False)
    running.servers.ended(NEW, "it has left", again=False)
    running.servers.start_again(0)
    assert running.until(0, Connections).restarts == {TALKER: 2}, "that of the plan, though it is down"


def test_a_change_is_complete_when_all_live_api_servers_have_applied_it(stack: contextlib.ExitStack) -> None:
    running = Running(stack, 3, {0: "silent", 1: "asks"})
    assert [running.until(client, msg.OperatorChange).change for client in range(3)] == [SLEPT] * 3
    running.servers.listen(NEW)
    running.until(1, msg.ReplicaStarting)  # skips a completion that comes too early
    running.kill(0)
    assert running.until(1, msg.ChangeApplied) == msg.ChangeApplied("id")
    running.servers.start_again(0)
    assert running.until(0, Connections).operator_state.asleep == {TALKER}
    running.servers.ended(TALKER, "killed", again=True)
    assert running.restart(0).operator_state.asleep == frozenset(), "its next process is awake"


def test_the_next_process_is_awake_also_after_a_sleep_that_crosses_the_end(stack: contextlib.ExitStack) -> None:
    running, asleep = Running(stack), ReplicasSlept((NEW,), asleep=True)
    running.join(NEW)
    running.servers.ended(NEW, "killed", again=True)
    running.servers._receive(0, msg.OperatorChange("id", asleep))
    running.join(NEW)
    assert running.restart(0).operator_state.asleep == frozenset()
    running.servers._receive(0, msg.OperatorChange("id", asleep))
    assert running.restart(0).operator_state.asleep == {NEW}, "the new process sleeps"


def test_many_restarts_leave_no_open_files(stack: contextlib.ExitStack) -> None:
    running = Running(stack, restart_limit=100)

    def files_after(restarts: int) -> int:
        for _ in range(restarts):
            running.restart(0)
            assert running.up(0) == [True, True]
        return len(os.listdir("/proc/self/fd"))

    before = files_after(2)
    assert files_after(6) <= before + 1


def test_no_message_comes_between_a_message_and_its_descriptors(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, sending = Running(stack, 1), threading.Event()
    running.servers.listen(NEW)

    def interrupted(*given: Any) -> None:
        sending.set()
        time.sleep(QUIET_S)
        send_descriptors(*given)

    def interrupt() -> None:
        sending.wait(WITHIN_S)
        running.servers._send_states()

    monkeypatch.setattr(api_servers, "send_descriptors", interrupted)
    other = threading.Thread(target=interrupt)
    other.start()
    running.servers.ready(NEW, ABOUT)
    other.join()
    reports = [running.next(0) for _ in range(3)]
    assert reports[1][1] == [f"{NEW} 0 in", f"{NEW} 0 out"] and isinstance(reports[2], Servers)


def test_closing_ends_all_api_servers() -> None:
    with contextlib.ExitStack() as stack:
        running = Running(stack, 3)
        processes = list(running.servers.processes.values())
        assert all(process.is_alive() for process in processes)
    assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 3


def _known_models(result: Connection, plugin: str) -> None:
    """Start an API server in this process; it sends the names of vLLM's models and tool parsers."""
    from vllm import ModelRegistry
    from vllm.tool_parsers import ToolParserManager

    from vllm_omni_ext.serving import server

    async def answer(*_: Any) -> None:
        result.send({*ModelRegistry.get_supported_archs(), *ToolParserManager.list_registered()})

    connections: Any = SimpleNamespace(head=os.getppid(), client_index=0, ready_responses=None)
    nothing: Any = None
    args = Namespace(tool_parser_plugin=plugin, reasoning_parser_plugin="")
    with mock.patch.object(server, "_api_server", answer):
        server.run_api_server(connections, nothing, "", nothing, args)


def test_a_spawned_api_server_has_the_models_and_parsers_of_plugins(tmp_path: Path) -> None:
    """API servers are spawned on CUDA and forked on a CPU."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParserManager\n"
        "from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser\n"
        "ToolParserManager.register_module('of_a_plugin', module=Hermes2ProToolParser)\n"
    )
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_known_models, args=(theirs, str(plugin)))
    process.start()
    theirs.close()
    with ours:
        assert {"BagelUnderstanding", "Qwen3OmniTalker", "of_a_plugin"} <= ours.recv()
    process.join()
    assert process.exitcode == 0
