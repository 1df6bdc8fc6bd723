"""`vllm serve --omni`: the head process, its API servers, and what happens when one of its processes ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import ZmqListener
from vllm.utils.system_utils import decorate_logs

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import end_with
from vllm_omni_ext.memory import trim
from vllm_omni_ext.metrics import DIRECTORY, mark_dead, share
from vllm_omni_ext.runtime.api_servers import ApiServers
from vllm_omni_ext.runtime.coordination import Coordination
from vllm_omni_ext.runtime.descriptors import receive_descriptors
from vllm_omni_ext.runtime.fleet import About, Connections, Fleet
from vllm_omni_ext.runtime.folders import PrivateFolder
from vllm_omni_ext.runtime.keeper import Keeper
from vllm_omni_ext.runtime.launcher import Deployment
from vllm_omni_ext.runtime.progress import spinner
from vllm_omni_ext.runtime.registrar import Registrar
from vllm_omni_ext.runtime.replica import StockReplica
from vllm_omni_ext.runtime.supervisor import Supervisor
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.topology.explain import unshared_caches
from vllm_omni_ext.topology.shape import Plan
from vllm_omni_ext.wire.control import (
    Message,
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
from vllm_omni_ext.wire.enrollment import Enrollment

GRACE_S = 3.0
"""What ending an API server may take beyond the time for its requests."""

FAILED = 1
"""Exit status when a process that everything depends on has ended by itself."""

COORDINATOR = "coordinator"
COORDINATOR_PAUSE_S = 1.0
"""Before a coordinator that could not be started is tried again."""

Name = ReplicaId | int | str
"""Of a process: a replica, the number of an API server, or the coordinator."""

log = logging.getLogger(__name__)


def serve(plan: Plan, args: Namespace) -> int:
    """Start everything, stay until a signal or a failure, end everything. Returns the exit status."""
    stopping = threading.Event()

    def stop(*_: Any) -> None:
        stopping.set()
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    listen_address, sock = setup_server(args, reuse_port=False)
    folder = PrivateFolder()
    if plan.api_servers > 1:
        share_metrics(folder.path)
    for line in unshared_caches(plan):
        tell(line)
    try:
        with Head(plan, folder, stopping) as head:
            return head.serve(listen_address, sock, args)
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        folder.remove()
        sock.close()


def share_metrics(folder: str) -> None:
    """Let all API servers answer `/metrics` with the figures of all."""
    directory = os.environ.get(DIRECTORY) or os.path.join(folder, "metrics")
    os.makedirs(directory, exist_ok=True)
    share(directory)


def end_gently(processes: Iterable[Any], limit_s: float) -> None:
    """SIGTERM to all, and wait until they have ended, at most `limit_s` seconds."""
    left = {process.sentinel: process for process in processes if process.is_alive()}
    for process in left.values():
        process.terminate()
    deadline = time.monotonic() + limit_s
    while left and (rest := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(left), rest):
            left.pop(sentinel)  # type: ignore[call-overload]


def tell(line: str) -> None:
    """Say something to the person who started the server."""
    print(line, file=sys.stderr if line.startswith("error") else sys.stdout, flush=True)


class Head:
    """Everything the head process owns; leaving the block ends it."""

    def __init__(self, plan: Plan, folder: PrivateFolder, stopping: threading.Event) -> None:
        self._plan = plan
        self._stopping = stopping
        self._done = threading.Event()
        self._status = 0
        self._answering = False
        self._coordination = Coordination(plan, folder.path, forgotten=self._forgotten)
        self._deployment = Deployment(
            plan,
            clients=plan.api_servers,
            usage=UsageContext.OPENAI_API_SERVER,
            tell=tell,
            enroll=self._enrollment,
            folder=folder,
        )
        self._servers: ApiServers | None = None
        self._keeper: Keeper | None = None
        self._registrar: Registrar | None = None
        self._supervisor: Supervisor[Name] | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        if self._registrar is not None:
            self._registrar.close()
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._keeper is not None:
            self._keeper.close()
        try:
            if self._servers is not None and self._deployment.drain_s:
                tell(f"requests in flight have {self._deployment.drain_s} s (--shutdown-timeout); again to end now")
                end_gently(self._servers.processes.values(), self._deployment.drain_s + GRACE_S)
        finally:
            self._close()

    def _close(self) -> None:
        self._open.close()
        if self._keeper is not None:
            self._keeper.join()
        self._coordination.close()

    def serve(self, listen_address: str, sock: socket.socket, args: Namespace) -> int:
        """Start everything and stay until something ends that all depends on; a signal raises SystemExit."""
        deployment = self._open.enter_context(self._deployment)
        self._coordination.start()

        def server(connections: Connections, control: Connection) -> tuple[Any, tuple[Any, ...]]:
            return run_api_server, (connections, control, listen_address, sock, args)

        servers = self._open.enter_context(ApiServers(deployment, self._coordination.views, server))
        with spinner("loading") as show, deployment.progress.shown(show):
            deployment.wait()
        trim()
        self._servers = servers
        self._keep(servers)
        if servers.wait():
            self._answering = True
            self._admit_others(servers)
            tell(f"ready: {listen_address} after {deployment.seconds():.1f} s")
        self._done.wait()
        return self._status

    def _keep(self, servers: ApiServers) -> None:
        processes: dict[Name, Any] = {COORDINATOR: self._coordination.process}
        processes.update(self._deployment.processes())  # type: ignore[arg-type]
        processes.update(servers.processes)  # type: ignore[arg-type]
        self._supervisor = Supervisor(processes, self._ended)
        self._coordination.follow()
        self._keeper = Keeper(
            self._deployment,
            servers,
            host=socket.gethostname(),
            tell=tell,
            watch=self._supervisor.watch,
            leave=self._coordination.leave,
        )

    def _admit_others(self, servers: ApiServers) -> None:
        assert self._keeper is not None
        if self._plan.config.master_address is not None:
            self._registrar = Registrar(self._plan, self._coordination, self._keeper, servers)
        missing = [stage.name for stage in self._plan.stages if not stage.replicas]
        if missing:
            where = f"{self._plan.config.master_address}:{self._plan.config.master_port}"
            tell(f"waiting at {where} for replicas of {', '.join(missing)}")

    def _enrollment(self, replica: ReplicaId) -> Enrollment:
        config = self._plan.config
        return Enrollment(
            stage=replica.stage,
            index=replica.index,
            instance=uuid.uuid4().hex,
            parent=os.getpid(),
            events=self._coordination.events,
            model=self._coordination.expected.model,
            config_hash=self._coordination.expected.stages[replica.stage],
            version=self._coordination.expected.version,
            host=config.master_address or "",
            secret_file=config.cluster_secret_file,
        )

    def _forgotten(self, replica: ReplicaId) -> None:
        if self._keeper is not None and self._registrar is not None and self._servers is not None:
            self._keeper.do(partial(self._registrar.forgotten, replica))
            self._keeper.do(partial(self._servers.forgotten, replica))

    def _ended(self, name: Name, exitcode: int | None) -> None:
        if self._stopping.is_set():
            return
        assert self._keeper is not None
        match name:
            case ReplicaId():
                self._keeper.ended(name, exitcode)
            case int():
                self._keeper.do(lambda: self._server_lost(name, exitcode))
            case _:
                tell(f"error: the coordinator has ended with exit code {exitcode}; it is started again")
                self._keeper.do(self._coordinate_again)

    def _server_lost(self, client: int, exitcode: int | None) -> None:
        assert self._keeper is not None and self._servers is not None
        if self._stopping.is_set():
            return
        mark_dead(self._servers.processes[client].pid)
        pause = self._servers.lost(client) if self._answering else None
        what = f"error: API server {client} has ended with exit code {exitcode}"
        if pause is None:
            tell(f"{what}; it is not started again")
            self._status = FAILED if exitcode else 0
            self._done.set()
            return
        tell(f"{what}; it is started again in {pause:g} s")
        self._keeper.after(pause, lambda: self._serve_again(client))

    def _serve_again(self, client: int) -> None:
        assert self._servers is not None and self._supervisor is not None
        if not self._stopping.is_set():
            self._supervisor.watch(client, self._servers.start_again(client))

    def _coordinate_again(self) -> None:
        if self._stopping.is_set():
            return
        assert self._keeper is not None and self._supervisor is not None
        try:
            self._coordination.start()
        except OmniError as error:
            tell(f"error: {error}; it is tried again in {COORDINATOR_PAUSE_S:g} s")
            self._keeper.after(COORDINATOR_PAUSE_S, self._coordinate_again)
            return
        self._supervisor.watch(COORDINATOR, self._coordination.process)


def run_api_server(
    connections: Connections, control: Connection, listen_address: str, sock: socket.socket, args: Namespace
) -> None:
    """Body of an API server process."""
    import uvloop

    end_with(connections.head)
    name_process(f"api-server/{connections.client_index}")
    for number in (signal.SIGTERM, signal.SIGINT):  # until the HTTP server installs its own handlers
        signal.signal(number, lambda *_: sys.exit(0))
    decorate_logs()
    with contextlib.ExitStack() as hushed:
        if connections.client_index or connections.said is not None:
            hushed.enter_context(hush())
        uvloop.run(_api_server(connections, control, listen_address, sock, args, hushed.close))


@contextlib.contextmanager
def hush() -> Iterator[None]:
    """Say only what is wrong: the first API server says already what is the same for all.

    What the HTTP server says of its start and its end is hushed for good; requests have a logger of their own.
    """
    logger = logging.getLogger("vllm")
    logging.getLogger("uvicorn.error").addFilter(_is_wrong)  # a level is set anew when the HTTP server is made
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_wrong(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


async def _api_server(
    connections: Connections,
    control: Connection,
    listen_address: str,
    sock: socket.socket,
    args: Namespace,
    started: Callable[[], None],
) -> None:
    from vllm_omni_ext.omni import AsyncOmni
    from vllm_omni_ext.serving.app import run_app

    omni = AsyncOmni(connections, log_stats=not args.disable_log_stats, log_requests=args.enable_log_requests)
    told = ControlEnd(omni.fleet, control)
    told.start()

    def ready() -> None:
        told.say(ServerReady())
        asyncio.get_running_loop().call_soon(started)  # when vLLM has listed its routes

    try:
        await run_app(omni, listen_address, sock, args, ready=ready)
    finally:
        told.stop()
        omni.shutdown(timeout=0)


class ControlEnd:
    """An API server's end of the pipe: does what the head says."""

    def __init__(self, fleet: Fleet, control: Connection) -> None:
        self._fleet = fleet
        self._control = control

    def start(self) -> None:
        """Read in the fleet's loop from now on."""
        self._fleet.loop.add_reader(self._control.fileno(), self._heard)
        self._fleet.connected = self._connected
        for replica in self._fleet.replicas.values():
            self._connected(replica)

    def stop(self) -> None:
        """Read no more."""
        self._fleet.loop.remove_reader(self._control.fileno())

    def say(self, message: Message) -> None:
        """Tell the head something; if it is gone, this process is about to end."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send_bytes(encode(message))

    def _connected(self, replica: StockReplica) -> None:
        self.say(ReplicaConnected(str(replica.id), replica.client.said))

    def _heard(self) -> None:
        try:
            message = decode(self._control.recv_bytes())
        except (EOFError, ConnectionResetError):  # the head is gone, and this process ends with it
            self.stop()
            return
        match message:
            case ReplicaStarting(replica):
                self._fleet.starting(ReplicaId.parse(replica))
            case ReplicaStarted(replica, pid):
                self._fleet.started(ReplicaId.parse(replica), pid)
            case ReplicaReady(replica, host, pid, restarts, given, taken):
                sockets = (socket.socket(fileno=number) for number in receive_descriptors(self._control, 2))
                listeners = ZmqListener(given, next(sockets)), ZmqListener(taken, next(sockets))
                self._fleet.ready(ReplicaId.parse(replica), About(host=host, pid=pid, restarts=restarts), listeners)
            case ReplicaEnded(replica, reason, again):
                self._fleet.ended(ReplicaId.parse(replica), reason, again=again)
            case ServerLost(index, at):
                self._fleet.forget_requests_of(index, at)
            case Servers(servers):
                self._fleet.servers = servers
