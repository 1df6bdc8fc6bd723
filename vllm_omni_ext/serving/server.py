"""`vllm serve --omni`: the head process, its API servers, and what happens when one of its processes ends."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from argparse import Namespace
from multiprocessing.connection import Connection
from typing import Any

from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import decorate_logs, get_mp_context

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.memory import trim
from vllm_omni_ext.omni import Connections
from vllm_omni_ext.runtime.launcher import START_METHOD, Deployment, environment
from vllm_omni_ext.runtime.progress import spinner
from vllm_omni_ext.runtime.supervisor import Supervisor
from vllm_omni_ext.topology.shape import Plan
from vllm_omni_ext.wire.control import ReplicaDied, ServerReady, decode, encode

FAILED = 1
"""Exit status when a process that everything depends on has ended by itself."""


def serve(plan: Plan, args: Namespace) -> int:
    """Start everything, stay until a signal or a failure, end everything. Returns the exit status."""
    stopping = threading.Event()

    def stop(*_: Any) -> None:
        stopping.set()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    listen_address, sock = setup_server(args, reuse_port=False)
    try:
        with (
            Deployment(plan, clients=plan.api_servers, usage=UsageContext.OPENAI_API_SERVER, tell=tell) as deployment,
            ApiServers(deployment, listen_address, sock, args) as servers,
        ):
            with spinner("loading"):
                deployment.wait()
            trim()
            head = Head(deployment, servers, stopping)
            if servers.wait():
                tell(f"ready: {listen_address} after {deployment.seconds():.1f} s")
            return head.watch()
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        sock.close()


def tell(line: str) -> None:
    """Say something to the person who started the server."""
    print(line, flush=True)


class ApiServers:
    """The API server processes; leaving the block ends them, and the replicas with them."""

    def __init__(self, deployment: Deployment, listen_address: str, sock: socket.socket, args: Namespace) -> None:
        self._deployment = deployment
        self.processes: dict[int, Any] = {}
        self._pipes: list[Connection] = []
        self._listen, self._sock, self._args = listen_address, sock, args

    def __enter__(self) -> ApiServers:
        with environment({START_METHOD: "fork"} if self._deployment.fork else {}, defaults={}):
            context = get_mp_context()
            for client in range(self._deployment.clients):
                receiver, sender = context.Pipe()
                process = context.Process(
                    target=run_api_server,
                    name=f"ApiServer_{client}",
                    args=(self._deployment.connections(client), receiver, self._listen, self._sock, self._args),
                )
                with self._deployment.forking():
                    process.start()
                receiver.close()
                self.processes[client] = process
                self._pipes.append(sender)
        self._deployment.close_listeners()
        return self

    def __exit__(self, *exc: object) -> None:
        # Together with the replicas: one whose API server is gone would wait seconds to deliver its last message.
        self._deployment.end(list(self.processes.values()))
        for pipe in self._pipes:
            pipe.close()

    def wait(self) -> bool:
        """Wait until all answer requests; False if one has ended instead."""
        try:
            for pipe in self._pipes:
                decode(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False
        return True

    def tell(self, message: ReplicaDied) -> None:
        """Send a message to every API server; one that is gone is the supervisor's concern."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(encode(message))
            except BrokenPipeError:
                continue


class Head:
    """Watches replicas and API servers until it is time to end."""

    def __init__(self, deployment: Deployment, servers: ApiServers, stopping: threading.Event) -> None:
        self._servers = servers
        self._logs = deployment.logs
        self._stopping = stopping
        self._done = threading.Event()
        self._status = 0
        processes: dict[ReplicaId | int, Any] = {name: p for name, p in deployment.processes().items()}  # noqa: C416
        for client, process in servers.processes.items():
            processes[client] = process
        self._supervisor: Supervisor[ReplicaId | int] = Supervisor(processes, self._ended)

    def _ended(self, name: ReplicaId | int, exitcode: int | None) -> None:
        if self._stopping.is_set():
            return
        reason = f"its process ended with exit code {exitcode}"
        if isinstance(name, ReplicaId):
            print(f"error: replica {name} is gone: {reason}; {self._logs.tail(name)}", file=sys.stderr)
            self._servers.tell(ReplicaDied(str(name), reason))
        else:
            self._status = FAILED if exitcode else 0
            self._done.set()

    def watch(self) -> int:
        """Wait for the end; a signal raises SystemExit here."""
        try:
            self._done.wait()
        finally:
            self._stopping.set()
            self._supervisor.stop()
        return self._status


def run_api_server(
    connections: Connections, control: Connection, listen_address: str, sock: socket.socket, args: Namespace
) -> None:
    """Body of an API server process."""
    import uvloop

    for number in (signal.SIGTERM, signal.SIGINT):  # until the HTTP server installs its own handlers
        signal.signal(number, lambda *_: sys.exit(0))
    decorate_logs()
    uvloop.run(_api_server(connections, control, listen_address, sock, args))


async def _api_server(
    connections: Connections, control: Connection, listen_address: str, sock: socket.socket, args: Namespace
) -> None:
    import asyncio

    from vllm_omni_ext.omni import AsyncOmni
    from vllm_omni_ext.serving.app import run_app

    omni = AsyncOmni(connections, log_stats=not args.disable_log_stats, log_requests=args.enable_log_requests)
    loop = asyncio.get_running_loop()

    def heard() -> None:
        try:
            message = decode(control.recv_bytes())
        except EOFError:  # the head is gone: it ends us with a signal, or we end with the HTTP server
            loop.remove_reader(control.fileno())
            return
        match message:
            case ReplicaDied(replica, reason):
                omni.replica_died(ReplicaId.parse(replica), reason)

    loop.add_reader(control.fileno(), heard)
    try:
        await run_app(omni, listen_address, sock, args, ready=lambda: control.send_bytes(encode(ServerReady())))
    finally:
        omni.shutdown(timeout=0)
