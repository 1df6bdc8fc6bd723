"""`vllm serve --omni`: the head process, which starts and restarts all other processes, and API server processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import ZmqListener
from vllm.utils.system_utils import decorate_logs

from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.errors import ConfigError, OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import die_with_parent, end_on_signals, end_processes, exit_on_signals
from vllm_omni_ext.memory import malloc_trim
from vllm_omni_ext.metrics import DIRECTORY, mark_dead, share
from vllm_omni_ext.runtime import control as messages
from vllm_omni_ext.runtime.client.replica import StockReplica
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaConnections, ReplicaInfo
from vllm_omni_ext.runtime.launch.folders import PrivateFolder
from vllm_omni_ext.runtime.launch.launcher import Deployment
from vllm_omni_ext.runtime.launch.progress import print_status, spinner
from vllm_omni_ext.runtime.supervise.api_servers import ApiServers
from vllm_omni_ext.runtime.supervise.coordination import Coordination
from vllm_omni_ext.runtime.supervise.joining import Expected, JoinServer
from vllm_omni_ext.runtime.supervise.process_watcher import Child, Exited, ReplicaSupervisor
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.topology.explain import unshared_caches
from vllm_omni_ext.topology.plan import Plan

GRACE_S = 3.0
"""Seconds that an API server has to exit after the shutdown timeout for its requests."""

FAILED = 1
"""Exit status if the server cannot start, or an essential process has ended unexpectedly."""

SHORTEST_PLUGIN = 3
"""A path of a parser plugin has more characters, as in vLLM."""

COORDINATOR_PAUSE_S = 1.0
"""Seconds between two attempts to start the coordinator."""

UNREAD_S = 900
"""Seconds after which Linux ends a connection whose client reads nothing of the data that waits for it.

Otherwise the data would stay while the client's machine answers, also after the server has closed the connection."""

log = logging.getLogger(__name__)


def end_unread(sock: socket.socket) -> None:
    """Let Linux end connections whose clients read nothing for `UNREAD_S`; they inherit it from `sock`."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)


def serve(plan: Plan, args: Namespace) -> int:
    """Run the head process: start all processes, wait for a signal or a failure, and stop all processes.

    Returns:
        The exit status of the process: 0, 2 if vLLM refuses the configuration of a stage, or `FAILED`.

    Raises:
        SystemExit: a signal to stop has arrived.
    """
    stopping = threading.Event()
    exit_on_signals(stopping)
    try:
        listen_address, sock = setup_server(args, reuse_port=False)
        end_unread(sock)
    except OSError as error:
        where = f"--uds {args.uds}" if args.uds else f"--host {args.host or '0.0.0.0'} --port {args.port}"
        print(f"error: the server cannot listen at {where}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    try:
        with contextlib.closing(sock), contextlib.ExitStack() as removed:
            folder = PrivateFolder()
            removed.callback(folder.remove)
            metrics = os.environ.get(DIRECTORY) or os.path.join(folder.path, "metrics")
            prepare_metrics(metrics)
            share(metrics)  # `/metrics` of each API server has the metrics of all API servers, also of ended ones
            for line in unshared_caches(plan):
                print_status(line)
            with Head(plan, folder, stopping) as head:
                return head.serve(listen_address, sock, args)
    except OmniError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else FAILED


def prepare_metrics(directory: str) -> None:
    """Create the directory of the shared metrics, and remove the files of processes that have ended.

    `/metrics` would add the values of an earlier deployment to those of this one.

    Raises:
        ConfigError: the directory cannot be used.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        for file in Path(directory).glob("*.db"):
            pid = file.stem.rpartition("_")[2]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{DIRECTORY}: '{directory}' cannot be used: {error.strerror}") from error


class Head:
    """The head process: starts replicas, the coordinator and API servers, and restarts those that end.

    The end of the `with` block stops all of these processes.

    Args:
        folder: private folder of the deployment, for sockets and metrics.
        stopping: set when the server begins to stop; processes that end afterwards are not restarted.
    """

    def __init__(self, plan: Plan, folder: PrivateFolder, stopping: threading.Event) -> None:
        self._plan = plan
        self._stopping = stopping
        self._done = threading.Event()
        self._status = 0
        self._answering = False
        self._expected = None if plan.config.cluster.master_address is None else Expected.of(plan)
        self._coordination = Coordination(plan, folder.path, forgotten=self._forgotten)
        self._deployment = Deployment(
            plan,
            clients=plan.api_servers,
            usage=UsageContext.OPENAI_API_SERVER,
            tell=print_status,
            identity_of=self._identity,
            folder=folder,
        )
        self._servers: ApiServers | None = None
        self._replica_supervisor: ReplicaSupervisor | None = None
        self._join_server: JoinServer | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        if self._join_server is not None:
            self._join_server.close()
        if self._replica_supervisor is not None:
            self._replica_supervisor.close()
        try:
            if self._servers is not None and self._deployment.drain_s:
                print_status(
                    f"requests in flight have {self._deployment.drain_s} s (--shutdown-timeout); again to end now"
                )
                end_processes(list(self._servers.processes.values()), self._deployment.drain_s + GRACE_S)
        finally:
            self._open.close()
            if self._replica_supervisor is not None:
                self._replica_supervisor.join()
            self._coordination.close()

    def serve(self, listen_address: str, sock: socket.socket, args: Namespace) -> int:
        """Start all processes, and return the exit status when an API server has ended that is not restarted.

        Raises:
            SystemExit: a signal to stop has arrived.
        """
        deployment = self._open.enter_context(self._deployment)
        self._coordination.start()

        def server(connections: Connections, control: Connection) -> tuple[Any, tuple[Any, ...]]:
            return run_api_server, (connections, control, listen_address, sock, args)

        servers = self._open.enter_context(ApiServers(deployment, self._coordination.views, server))
        if self._stopping.is_set():  # SystemExit was dropped in a fork
            raise SystemExit(0)
        with spinner("loading") as show, deployment.progress.shown(show):
            deployment.wait()
        malloc_trim()
        self._servers = servers
        self._keep(servers)
        if servers.wait():
            self._answering = True
            self._admit_remote_replicas(servers)
            print_status(f"ready: {listen_address} after {deployment.seconds():.1f} s")
        self._done.wait()
        return self._status

    def _keep(self, servers: ApiServers) -> None:
        self._coordination.connect()
        self._replica_supervisor = ReplicaSupervisor(
            self._deployment,
            servers,
            host=socket.gethostname(),
            tell=print_status,
            leave=self._coordination.leave,
            closing=self._stopping,
        )
        self._replica_supervisor.spawn(self._coordination.follow())
        self._replica_supervisor.watch_replicas()
        coordinator = Child("coordinator", start=self._coordination.start, ended=_coordinator_ended)
        self._replica_supervisor.watch(coordinator, self._coordination.process)
        for number, process in servers.processes.items():
            ended = partial(self._server_ended, number)
            self._replica_supervisor.watch(
                Child(number, start=partial(servers.start_again, number), ended=ended), process
            )

    def _admit_remote_replicas(self, servers: ApiServers) -> None:
        assert self._replica_supervisor is not None
        if self._expected is not None:
            self._join_server = JoinServer(
                self._plan, self._expected, self._coordination, self._replica_supervisor, servers, tell=print_status
            )
        missing = [stage.name for stage in self._plan.stages if not stage.replicas]
        if missing:
            where = f"{self._plan.config.cluster.master_address}:{self._plan.config.cluster.master_port}"
            print_status(f"waiting at {where} for replicas of {', '.join(missing)}")

    def _identity(self, replica: ReplicaId) -> ReplicaIdentity:
        config = self._plan.config
        member = self._coordination.names.give(replica)
        return ReplicaIdentity(
            stage=replica.stage,
            index=replica.index,
            epoch=member.epoch,
            proof=self._coordination.names.proof(member),
            parent=os.getpid(),
            events=self._coordination.events,
            interval_s=self._coordination.timing.interval_s,
            host=config.cluster.master_address or "",
            secret_file=config.cluster.cluster_secret_file,
            ports=config.cluster.ports,
        )

    def _forgotten(self, member: Member, silent: bool) -> None:
        if self._replica_supervisor is not None and self._join_server is not None:
            self._replica_supervisor.do(partial(self._join_server.forgotten, member, silent=silent))

    def _server_ended(self, number: int, error: Exception) -> float | None:
        """Return the seconds until an API server that has ended is restarted.

        None: the API server is not restarted, and the head stops all processes.
        """
        assert self._servers is not None
        mark_dead(self._servers.processes[number].pid)
        pause = self._servers.lost(number) if self._answering else None
        then = "it is not started again" if pause is None else f"it is started again in {pause:g} s"
        print_status(f"error: API server {number} is gone: {error}; {then}")
        if pause is None:
            self._status = FAILED if getattr(error, "exitcode", FAILED) else 0
            self._done.set()
        return pause


def _coordinator_ended(error: Exception) -> float:
    """Return the seconds until the coordinator, the process that tracks live replicas, is restarted.

    0 if the coordinator had started before it ended, else `COORDINATOR_PAUSE_S`. The number of restarts is not limited.
    """
    pause = 0.0 if isinstance(error, Exited) else COORDINATOR_PAUSE_S
    print_status(f"error: the coordinator is gone: {error}; it is started again in {pause:g} s")
    return pause


def run_api_server(
    connections: Connections, control: Connection, listen_address: str, sock: socket.socket, args: Namespace
) -> None:
    """Main function of an API server process.

    Args:
        connections: the data with which this API server connects to every replica.
        control: pipe to the head process.
        listen_address: address in the log message.
        sock: bound socket, which all API servers share.
        args: parsed arguments of `vllm serve`.
    """
    import uvloop
    from vllm.plugins import load_general_plugins

    from vllm_omni_ext.serving.limits import video

    die_with_parent(connections.head)
    name_process(f"api-server/{connections.client_index}")
    end_on_signals()  # until the HTTP server installs its own handlers
    video.start_fork_server()  # this process has one thread here
    decorate_logs()
    load_general_plugins()  # registers the plugins' models in this spawned process
    load_parsers(args)
    with contextlib.ExitStack() as quieted:
        if connections.client_index or connections.ready_responses is not None:
            quieted.enter_context(quiet())
        try:
            uvloop.run(_api_server(connections, control, listen_address, sock, args, quieted.close))
        except ConfigError as error:  # raised by a check that needs the loaded model
            print_status(f"error: {error}")
            sys.exit(FAILED)


def load_parsers(args: Namespace) -> None:
    """Import the plugins of `--tool-parser-plugin` and `--reasoning-parser-plugin`, as vLLM does in its API servers."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if len(args.tool_parser_plugin or "") > SHORTEST_PLUGIN:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if len(args.reasoning_parser_plugin or "") > SHORTEST_PLUGIN:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log only warnings and errors inside the `with` block, which contains the start of an API server.

    It is used for API servers that would repeat the log of the first one, e.g. after a restart. The HTTP server's
    messages about its start and end stay hidden after the block. Its log of requests is a separate logger, which does
    not change.
    """
    logger = logging.getLogger("vllm")
    # A filter, because the HTTP server resets the level of its logger.
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.levelno >= logging.WARNING)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    head = HeadConnection(omni.replica_connections, control, apply=omni.apply)
    omni.submit = head.change
    head.start()

    def ready() -> None:
        head.send(messages.ServerReady())
        asyncio.get_running_loop().call_soon(started)  # after vLLM has listed its routes

    try:
        await run_app(omni, listen_address, sock, args, ready=ready)
    finally:
        head.stop()
        omni.shutdown(timeout=0)


class HeadConnection:
    """An API server's end of the pipe to the head process; executes the commands that the head sends.

    Args:
        apply: applies an operator's change (e.g. a loaded adapter) to this API server.
    """

    def __init__(
        self, replica_connections: ReplicaConnections, control: Connection, *, apply: Callable[[messages.Change], None]
    ) -> None:
        self._replica_connections = replica_connections
        self._control = control
        self._apply = apply
        self._incomplete: dict[str, asyncio.Future[None]] = {}

    def start(self) -> None:
        """Start to receive commands; send the head a `ReplicaConnected` for each replica that is connected already."""
        self._replica_connections.loop.add_reader(self._control.fileno(), self._read_message)
        self._replica_connections.connected = self._connected
        for replica in self._replica_connections.replicas.values():
            self._connected(replica)

    def stop(self) -> None:
        """Stop to receive commands."""
        self._replica_connections.loop.remove_reader(self._control.fileno())

    def send(self, message: messages.Message) -> None:
        """Send a message to the head. The message is dropped if the head has ended, since this process ends too."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send_bytes(messages.encode(message))

    async def change(self, change: messages.Change) -> None:
        """Send an operator's change to all API servers; returns when all of them have applied it."""
        change_id, complete = uuid.uuid4().hex, self._replica_connections.loop.create_future()
        self._incomplete[change_id] = complete
        self.send(messages.OperatorChange(change_id, change))
        await complete

    def _connected(self, replica: StockReplica) -> None:
        self.send(messages.ReplicaConnected(replica.id, replica.client.ready_response))

    def _read_message(self) -> None:
        try:
            message = messages.decode(self._control.recv_bytes())
        except (EOFError, ConnectionResetError):  # the head has ended, and this process ends with it
            self.stop()
            return
        match message:
            case messages.ReplicaStarting(replica):
                self._replica_connections.starting(replica)
            case messages.ReplicaStarted(replica, pid):
                self._replica_connections.started(replica, pid)
            case messages.ReplicaReady(replica, host, pid, restarts, input_address, output_address):
                sockets = (socket.socket(fileno=number) for number in messages.receive_descriptors(self._control, 2))
                listeners = ZmqListener(input_address, next(sockets)), ZmqListener(output_address, next(sockets))
                self._replica_connections.ready(replica, ReplicaInfo(host=host, pid=pid, restarts=restarts), listeners)
            case messages.ReplicaEnded(replica, reason, again):
                self._replica_connections.ended(replica, reason, again=again)
            case messages.ReplicaLeft(replica):
                self._replica_connections.left(replica)
            case messages.ServerLost(index, at):
                self._replica_connections.forget_requests_of(index, at)
            case messages.Servers(servers):
                self._replica_connections.servers = servers
            case messages.OperatorChange(change_id, change):
                self._apply(change)
                self.send(messages.ChangeApplied(change_id))
            case messages.ChangeApplied(change_id):
                complete = self._incomplete.pop(change_id, None)
                if complete is not None and not complete.done():  # None: another API server's change
                    complete.set_result(None)
