"""Starts and ends the processes of a plan: replicas first, API servers beside them.

Replicas that share a CUDA device start one after the other, all others at once (`topology.turns`). A replica is one
stock `EngineCoreProc` with its own listeners, config and process manager, so that its end concerns nobody else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_any
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
import zmq
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.plugins import load_general_plugins
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.engine.utils import (
    CoreEngineLaunch,
    EngineZmqAddresses,
    EngineZmqListeners,
    launch_core_engines,
)
from vllm.v1.executor import Executor

from vllm_omni_ext.disaggregation.parameters import HOST, LOOPBACK
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.registry import resolve
from vllm_omni_ext.plugin import MODELS
from vllm_omni_ext.runtime.addresses import endpoint
from vllm_omni_ext.runtime.board import Board
from vllm_omni_ext.runtime.engine_args import any_replica_args, as_asked, stage_engine_args
from vllm_omni_ext.runtime.fleet import About, Connections
from vllm_omni_ext.runtime.folders import PrivateFolder
from vllm_omni_ext.runtime.inherit import compute_threads, environment, frozen_heap, temporary_files_in
from vllm_omni_ext.runtime.logs import FileLogs, Logs, TerminalLogs
from vllm_omni_ext.runtime.progress import Listener, Progress
from vllm_omni_ext.topology.cpu import THREADS
from vllm_omni_ext.topology.shape import Plan
from vllm_omni_ext.topology.turns import Turns, devices_of
from vllm_omni_ext.wire import loading
from vllm_omni_ext.wire.enrollment import Enrollment

ANY_PORT = 0

NOT_STARTED = 0
"""Process id of a replica that has no process yet."""

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

REPORTING = "vllm_omni_ext.engine.report.report_scheduler"
"""What schedules where neither the pipeline nor the user has chosen: vLLM's own, reporting its load."""


class StartFailed(OmniError):
    """A replica did not come up."""


@dataclass(frozen=True)
class _Prepared:
    """A replica that can be started: its config, its folder, and where it connects to."""

    config: VllmConfig
    place: str
    addresses: EngineZmqAddresses


class Deployment:
    """The running replicas of a plan. Use as a context manager; leaving it ends every process.

    Args:
        plan: what to start.
        clients: number of API servers that will talk to every replica; 0: they are elsewhere, and every replica is
            started with `start_again`, when it is known where to.
        usage: how vLLM accounts for the start (server or offline).
        tell: takes the lines that say how far the start is.
        folder: is removed at the end; None: one is made.
        host: the address under which replicas of other hosts reach those that are started here; None: the head's, or
            loopback if there are no others.
        enroll: what each replica is told about itself; asked anew for every start. None: nothing.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clients: int,
        usage: UsageContext,
        tell: Callable[[str], None] = lambda line: None,
        enroll: Callable[[ReplicaId], Enrollment] | None = None,
        folder: PrivateFolder | None = None,
        host: str | None = None,
    ) -> None:
        self.plan = plan
        self.clients = clients
        self._enroll = enroll
        self._host = host or plan.config.master_address or LOOPBACK
        self.configs: dict[str, VllmConfig] = {}
        self.drain_s = 0
        self._listeners: dict[ReplicaId, EngineZmqListeners] = {}
        self._launches: dict[ReplicaId, CoreEngineLaunch] = {}
        self._barriers: dict[ReplicaId, contextlib.ExitStack] = {}
        self._prepared: dict[ReplicaId, _Prepared] = {}
        self._deadlines: dict[ReplicaId, float] = {}
        self._turns = Turns({})
        self.launched: Callable[[ReplicaId, int], None] = lambda replica, pid: None
        """Told of the process of every replica of the plan when it is made."""
        self._usage = usage
        self.fork = may_fork(plan, usage)
        self._private = folder or PrivateFolder()
        self.folder = self._private.path
        self.logs: Logs = TerminalLogs()
        self.began = psutil.Process().create_time()
        self.progress = Progress(plan, tell, self.seconds)
        self._listener: Listener | None = None

    def __enter__(self) -> Deployment:
        if not self.plan.config.verbose:
            self.logs = FileLogs(Path(self.plan.config.log_dir or Path(self.folder, "logs")))
        if self.fork:
            register_classes()
        self._listener = Listener(self.folder, self.progress)
        try:
            if self.clients:
                self.start_all()
        except BaseException:
            self.close()
            raise
        self.progress.starting(self.logs.where)
        return self

    def start_all(self) -> None:
        """Start every replica of the plan whose turn it is; `wait` starts the others."""
        devices = devices_of(self.plan)
        self._turns = Turns(devices)
        for replica in devices:
            self._prepare(replica)
            self._start(self._turns.enter(replica))

    def _prepare(self, replica: ReplicaId) -> None:
        """Do all that needs no turn: API servers are told where to listen before the replica is started."""
        place = self._place(replica)
        with self._surroundings(replica.stage, place):
            addresses = _as_vllm(self.listen(replica))
            self._prepared[replica] = _Prepared(self._config(replica), place, addresses)

    def _start(self, replicas: Sequence[ReplicaId]) -> None:
        for replica in replicas:
            prepared = self._prepared[replica]
            with self._surroundings(replica.stage, prepared.place):
                self._launch(replica, prepared.config, prepared.addresses)
            self.launched(replica, self.processes()[replica].pid)

    def listen(self, replica: ReplicaId, host: str | None = None) -> Sequence[tuple[str, str]]:
        """Listen for a replica that is going to start, on behalf of the API servers.

        The listeners stay open here: an API server that is started again goes on with those of the one before it.

        Args:
            host: the address of this host that the replica can reach; None if it runs here.

        Returns:
            Where it connects to, for each API server: for its input, for its output.
        """
        self.unlisten(replica)
        listeners = EngineZmqListeners(inputs=[], outputs=[])
        for client in range(self.clients):
            unique = f"{replica.stage}-{replica.index}-{client}-{time.monotonic_ns()}"
            local = f"ipc://{self.folder}/{unique}"
            listeners.inputs.append(make_zmq_listener(endpoint(host, ANY_PORT) if host else f"{local}-i", zmq.ROUTER))
            listeners.outputs.append(make_zmq_listener(endpoint(host, ANY_PORT) if host else f"{local}-o", zmq.PULL))
        self._listeners[replica] = listeners
        return [(i.address, o.address) for i, o in zip(listeners.inputs, listeners.outputs, strict=True)]

    def unlisten(self, replica: ReplicaId) -> None:
        """Listen for a replica no more."""
        listeners = self._listeners.pop(replica, None)
        if listeners is not None:
            listeners.cleanup()

    def listeners(self, replica: ReplicaId, client: int) -> tuple[ZmqListener, ZmqListener]:
        """Where one API server hears of a replica: for its input, for its output."""
        listeners = self._listeners[replica]
        return listeners.inputs[client], listeners.outputs[client]

    def seconds(self) -> float:
        """Since the command began."""
        return time.time() - self.began

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _surroundings(self, stage: str, folder: str) -> Iterator[None]:
        """The environment in which configs of a stage are made and its replicas are started.

        Args:
            folder: for sockets and temporary files.
        """
        said = {"VLLM_RPC_BASE_PATH": folder, **self.plan.config.stage(stage).env}
        with environment(said, defaults=self.plan.stage(stage).env), temporary_files_in(folder):
            yield

    def _place(self, replica: ReplicaId) -> str:
        """An empty folder for a replica's files: what one that was killed has left there is gone."""
        place = Path(self.folder, f"{replica.stage}-{replica.index}")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return str(place)

    def _config(self, replica: ReplicaId) -> VllmConfig:
        args = stage_engine_args(self.plan, replica)
        config = as_asked(args.create_engine_config(self._usage), args)
        if self.plan.stage(replica.stage).text_stage:
            self.drain_s = config.shutdown_timeout
        config.shutdown_timeout = 0  # API servers drain; engines end
        self.configs.setdefault(replica.stage, config)
        if config.kv_transfer_config is not None:  # not the plan's: hosts compare that
            config.kv_transfer_config.kv_connector_extra_config[HOST] = self._host
        if config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = REPORTING
        return config

    def _launch(self, replica: ReplicaId, config: VllmConfig, addresses: EngineZmqAddresses) -> None:
        if self.fork:  # after the config: making it, vLLM's CPU platform asks for spawn
            os.environ[START_METHOD] = "fork"
            preload(config)
        launch = launch_core_engines(config, Executor.get_class(config), True, addresses)
        threads = int(self.plan.stage(replica.stage).env.get(THREADS, 1))
        told = {} if self._enroll is None else self._enroll(replica).variable()
        if self._listener is not None:
            told |= loading.variable(self._listener.path, str(replica))
        self.progress.begun(replica)
        with self.forking(threads), self.logs.of(replica), environment(told, defaults={}):
            barrier = contextlib.ExitStack()
            self._deadlines[replica] = time.monotonic() + self.plan.config.startup_timeout_s
            self._launches[replica] = barrier.enter_context(launch)
            self._barriers[replica] = barrier

    def start_again(self, replica: ReplicaId, addresses: Sequence[tuple[str, str]]) -> None:
        """Start a replica whose process has ended; `wait_for` says when it is ready.

        Args:
            addresses: where it connects to, for each API server: for its input, for its output.
        """
        with self._surroundings(replica.stage, self._place(replica)):
            self._launch(replica, self._config(replica), _as_vllm(addresses))

    def wait_for(self, replica: ReplicaId) -> None:
        """Wait until a replica that was started again is ready.

        Raises:
            StartFailed: it ended while starting, or took too long and was ended.
        """
        limit = self.plan.config.startup_timeout_s
        late = threading.Event()
        process = self.processes()[replica]

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        try:
            self._barriers.pop(replica).close()
        except RuntimeError as error:
            if late.is_set():
                raise StartFailed(f"{replica} was not ready after {limit:g} s (startup_timeout_s)") from error
            process.join(self.plan.config.shutdown_timeout_s)
            raise StartFailed(f"its process ended with exit code {process.exitcode} while starting") from error
        finally:
            timer.cancel()
            self.progress.over(replica)

    def discard(self, replica: ReplicaId) -> None:
        """Forget a replica whose process has ended."""
        launch = self._launches.pop(replica, None)
        if launch is not None:
            launch.engine_manager.shutdown(timeout=0)
        self.unlisten(replica)

    @contextlib.contextmanager
    def forking(self, threads: int = 1) -> Iterator[None]:
        """Where processes of this deployment are started, each with that many compute threads if it is forked.

        No line is told meanwhile: it would come into a replica's log, and a forked process would find a locked output.
        """
        with contextlib.ExitStack() as inside:
            inside.enter_context(self.progress.speaking)
            if self.fork:  # the server's head has no work left for the garbage collector
                inside.enter_context(frozen_heap(keep=self._usage is UsageContext.OPENAI_API_SERVER))
                inside.enter_context(compute_threads(threads))
            yield

    def wait(self) -> None:
        """Wait until every replica is ready; start those that share a device once their turn has come.

        Serves the start-up handshakes of all at once: a replica loads nothing before its own is answered. Must be
        called by the thread that has entered the block: replicas end with the thread that has started them.

        Raises:
            StartFailed: a replica ended while starting, or took too long; it has the end of its log.
        """
        with ThreadPoolExecutor(max_workers=max(1, len(self._prepared))) as threads:
            waits: dict[Future[None], ReplicaId] = {}
            try:
                while self._follow(threads, waits):
                    self._take_ready(waits)
            finally:
                if waits:  # the start was cut short: the others need not be waited for
                    self.end()

    def _follow(self, threads: ThreadPoolExecutor, waits: dict[Future[None], ReplicaId]) -> bool:
        """Wait for the replicas that have been started since; whether there are any to wait for."""
        waits.update({threads.submit(barrier.close): replica for replica, barrier in self._barriers.items()})
        self._barriers.clear()
        return bool(waits)

    def _take_ready(self, waits: dict[Future[None], ReplicaId]) -> None:
        """Wait until one is ready, and start those whose turn it is then."""
        next_deadline = min(self._deadlines[replica] for replica in waits.values())
        done, _ = wait_for_any(waits, max(0.0, next_deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise self._late(waits)
        for wait in done:
            replica = waits[wait]
            try:
                wait.result()
            except RuntimeError as error:
                raise self._failed(replica) from error
            del waits[wait]
            self.progress.ready(replica)
            self._start(self._turns.leave(replica))

    def _failed(self, replica: ReplicaId) -> StartFailed:
        process = self.processes()[replica]
        process.join(self.plan.config.shutdown_timeout_s)
        return StartFailed(
            f"{replica} did not start: its process ended with exit code {process.exitcode}; {self.logs.tail(replica)}"
        )

    def _late(self, waits: Mapping[Future[None], ReplicaId]) -> StartFailed:
        late = min(waits.values(), key=self._deadlines.__getitem__)
        limit = self.plan.config.startup_timeout_s
        return StartFailed(f"{late} was not ready after {limit:g} s (startup_timeout_s); {self.logs.tail(late)}")

    def processes(self) -> dict[ReplicaId, Any]:
        """The process of each replica."""
        return {replica: launch.engine_manager.processes[0] for replica, launch in self._launches.items()}

    def connections(
        self,
        client: int,
        *,
        views: str | None = None,
        board: Board | None = None,
        about: Mapping[ReplicaId, About] | None = None,
        said: Mapping[ReplicaId, bytes] | None = None,
        starting: tuple[ReplicaId, ...] = (),
    ) -> Connections:
        """What API server `client` needs; its listeners travel with it to its process.

        Args:
            views: the coordinator's address for API servers.
            board: what API servers show each other.
            about: the replicas it connects to; None: all that were started here.
            said: what replicas said to an API server before this one, if it follows one that has died.
            starting: replicas that are being started.
        """
        if about is None:
            about = self.about()
        for stage in self.plan.stages:
            if stage.name not in self.configs:  # its replicas are all on other hosts
                with self._surroundings(stage.name, self.folder):
                    args = any_replica_args(self.plan, stage.name)
                    self.configs[stage.name] = as_asked(args.create_engine_config(self._usage), args)
        return Connections(
            plan=self.plan,
            configs=self.configs,
            views=views,
            board=board,
            listeners={replica: self.listeners(replica, client) for replica in about},
            folder=self.folder,
            said=said,
            starting=starting,
            drain_s=self.drain_s,
            client_count=self.clients,
            client_index=client,
            about=about,
            started=self.began,
            head=os.getpid(),
        )

    def end(self, others: Sequence[Any] = ()) -> None:
        """End all replicas, and `others` with them; what has not ended within `shutdown_timeout_s` is killed.

        A forked replica is killed at once: it is a single process that has nothing to put in order, while taking the
        inherited interpreter apart costs it seconds.
        """
        replicas = list(self.processes().values())
        end_processes([*others, *(() if self.fork else replicas)], self.plan.config.shutdown_timeout_s)
        for process in replicas:
            process.kill()
            process.join()

    def about(self) -> dict[ReplicaId, About]:
        """The replicas started here, for people; the process id of one whose turn has not come yet is 0."""
        running = self.processes()
        pids = dict.fromkeys(self._prepared, NOT_STARTED) | {replica: each.pid for replica, each in running.items()}
        return {replica: About(host=gethostname(), pid=pid) for replica, pid in pids.items()}

    def close(self) -> None:
        """End everything and remove every trace; a second call does nothing."""
        self.end()
        for launch in self._launches.values():
            launch.engine_manager.shutdown(timeout=0)
        for barrier in self._barriers.values():  # after a start cut short: their replicas have been ended
            with contextlib.suppress(RuntimeError):
                barrier.close()
        self._barriers.clear()
        for listeners in self._listeners.values():
            listeners.cleanup()
        if self._listener is not None:
            self._listener.close()
        self._launches.clear()
        self._prepared.clear()
        self._listeners.clear()
        self._private.remove()


def _as_vllm(addresses: Sequence[tuple[str, str]]) -> EngineZmqAddresses:
    return EngineZmqAddresses(inputs=[i for i, _ in addresses], outputs=[o for _, o in addresses])


def end_processes(processes: list[Any], timeout_s: float) -> None:
    """SIGTERM to all at once, then SIGKILL to those alive after `timeout_s` seconds."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def may_fork(plan: Plan, usage: UsageContext) -> bool:
    """Whether replicas are forked, so that vLLM is imported once; otherwise vLLM's own choice (spawn) stands.

    Only on a CPU machine, and only where OpenMP survives it: the server's head has never computed anything, but a
    user's program may have, and then a forked process may use one thread only.
    """
    if plan.machine.platform != "cpu":
        return False
    return usage is UsageContext.OPENAI_API_SERVER or all(stage.env.get(THREADS) == "1" for stage in plan.stages)


def register_classes() -> None:
    """Register the stage models as classes: for a name, vLLM imports itself once more in a process just to look."""
    load_general_plugins()  # first: among others, ours registers the names
    for architecture, target in MODELS.items():
        ModelRegistry.register_model(architecture, resolve(target))


def preload(config: VllmConfig) -> None:
    """Import the worker and fill vLLM's caches of tokenizer and processor once, for all that is forked from here."""
    resolve_obj_by_qualname(config.parallel_config.worker_cls)
    model = config.model_config
    if model.skip_tokenizer_init:
        return
    cached_tokenizer_from_config(model)
    if model.is_multimodal_model:
        MULTIMODAL_REGISTRY.create_processor(model).info.get_hf_processor()
