"""Starts and ends the processes of a plan: replicas first (all at once), API servers beside them.

A replica is one stock `EngineCoreProc` with its own listeners, config and process manager, so that its end concerns
nobody else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
import torch
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
from vllm_omni_ext.memory import trim
from vllm_omni_ext.model_plugins.registry import resolve
from vllm_omni_ext.plugin import MODELS
from vllm_omni_ext.runtime.addresses import endpoint
from vllm_omni_ext.runtime.board import Board
from vllm_omni_ext.runtime.engine_args import any_replica_args, as_asked, stage_engine_args
from vllm_omni_ext.runtime.fleet import About, Connections
from vllm_omni_ext.runtime.folders import PrivateFolder
from vllm_omni_ext.runtime.logs import FileLogs, Logs, TerminalLogs
from vllm_omni_ext.runtime.progress import Progress
from vllm_omni_ext.topology.cpu import THREADS
from vllm_omni_ext.topology.shape import Plan
from vllm_omni_ext.wire.enrollment import Enrollment

ANY_PORT = 0

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

REPORTING = "vllm_omni_ext.engine.report.report_scheduler"
"""What schedules where neither the pipeline nor the user has chosen: vLLM's own, reporting its load."""


class StartFailed(OmniError):
    """A replica did not come up."""


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
        self._usage = usage
        self.fork = may_fork(plan, usage)
        self._private = folder or PrivateFolder()
        self.folder = self._private.path
        self.logs: Logs = TerminalLogs()
        self.began = psutil.Process().create_time()
        self._progress = Progress(plan, tell, self.seconds)

    def __enter__(self) -> Deployment:
        if not self.plan.config.verbose:
            self.logs = FileLogs(Path(self.plan.config.log_dir or Path(self.folder, "logs")))
        if self.fork:
            register_classes()
        try:
            if self.clients:
                self.start_all()
        except BaseException:
            self.close()
            raise
        self._progress.starting(self.logs.where)
        return self

    def start_all(self) -> None:
        """Start every replica of the plan."""
        for replica in self.plan.replicas():
            with self._surroundings(replica.id.stage, self._place(replica.id)):
                addresses = self.listen(replica.id)
                self._launch(replica.id, self._config(replica.id), _as_vllm(addresses))

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
        with self.forking(threads), self.logs.of(replica), environment(told, defaults={}):
            barrier = contextlib.ExitStack()
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

    def discard(self, replica: ReplicaId) -> None:
        """Forget a replica whose process has ended."""
        launch = self._launches.pop(replica, None)
        if launch is not None:
            launch.engine_manager.shutdown(timeout=0)
        self.unlisten(replica)

    @contextlib.contextmanager
    def forking(self, threads: int = 1) -> Iterator[None]:
        """Where processes of this deployment are started, each with that many compute threads if it is forked."""
        if not self.fork:
            yield
            return
        # The server's head has no work left for the garbage collector.
        with frozen_heap(keep=self._usage is UsageContext.OPENAI_API_SERVER), compute_threads(threads):
            yield

    def wait(self) -> None:
        """Wait until every replica is ready.

        Serves the start-up handshakes of all at once: a replica loads nothing before its own is answered.

        Raises:
            StartFailed: a replica ended while starting, or took too long; it has the end of its log.
        """
        with ThreadPoolExecutor(max_workers=len(self._barriers)) as threads:
            waits = {threads.submit(barrier.close): replica for replica, barrier in self._barriers.items()}
            self._barriers.clear()
            try:
                for wait in as_completed(waits, self.plan.config.startup_timeout_s):
                    wait.result()
                    self._progress.ready(waits[wait])
            except RuntimeError as error:
                raise self._failed(waits[wait]) from error
            except TimeoutError as error:
                raise self._late(waits) from error
            finally:
                if not all(wait.done() for wait in waits):  # the start was cut short: the others need not be waited for
                    self.end()

    def _failed(self, replica: ReplicaId) -> StartFailed:
        process = self.processes()[replica]
        process.join(self.plan.config.shutdown_timeout_s)
        return StartFailed(
            f"{replica} did not start: its process ended with exit code {process.exitcode}; {self.logs.tail(replica)}"
        )

    def _late(self, waits: Mapping[Future[None], ReplicaId]) -> StartFailed:
        late = next(replica for wait, replica in waits.items() if not wait.done())
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
        """The replicas started here, for people."""
        return {replica: About(host=gethostname(), pid=each.pid) for replica, each in self.processes().items()}

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
        self._launches.clear()
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


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Let processes forked inside the block compute with `count` threads.

    Set in the parent: a child reads OMP_NUM_THREADS too late. With 1, OpenMP starts no team; where the parent has had
    one, a child that wants one waits for threads that it does not have, for ever.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def frozen_heap(*, keep: bool) -> Iterator[None]:
    """Keep the garbage collector of processes forked inside the block off what they share with this one.

    It writes into every object it looks at, and each page written to is copied: hundreds of MB in every process.

    Args:
        keep: keep it off in this process too, for good.
    """
    gc.collect()
    trim()
    gc.freeze()
    try:
        yield
    finally:
        if not keep:
            gc.unfreeze()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Let replicas started inside the block put their temporary files into `folder`."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        with environment({"TMPDIR": folder}, defaults={}):
            yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def environment(values: Mapping[str, str], *, defaults: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is started inside the block; `defaults` give way to what is set already."""
    before = dict(os.environ)
    os.environ.update({**defaults, **before, **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
