"""Starts and ends the replicas of a plan, and prepares the connections of API servers to them.

Replicas that share a CUDA device start one after the other, all other replicas at once (`topology.placement`). Each
replica is an unchanged `EngineCoreProc` of vLLM with its own listeners, config and process manager, so that its end
affects no other replica.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from multiprocessing.connection import wait as wait_for_first
from pathlib import Path
from socket import gethostname
from typing import Any

import psutil
import zmq
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.engine.utils import (
    CoreEngineLaunch,
    EngineZmqAddresses,
    EngineZmqListeners,
    launch_core_engines,
)
from vllm.v1.executor import Executor

from vllm_omni_ext.disaggregation.parameters import HOST, LOOPBACK
from vllm_omni_ext.engine.agent import WithAgent
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.environment import SAMPLER, missing_for_flashinfer
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import end_processes, how_it_ended
from vllm_omni_ext.ports import MOONCAKE_VARIABLES, UCX_VARIABLE, bind_within
from vllm_omni_ext.runtime.client.replica_connections import Connections, ReplicaInfo
from vllm_omni_ext.runtime.launch.addresses import endpoint
from vllm_omni_ext.runtime.launch.engine_args import any_replica_args, engine_config, stage_engine_args
from vllm_omni_ext.runtime.launch.folders import PrivateFolder
from vllm_omni_ext.runtime.launch.inherit import (
    compute_threads,
    environment,
    frozen_heap,
    preload,
    process_state,
    register_classes,
    replaced_kernels,
    temporary_files_in,
)
from vllm_omni_ext.runtime.launch.logs import Logs
from vllm_omni_ext.runtime.launch.progress import Listener, Progress
from vllm_omni_ext.topology.machine import THREADS, chosen_environment, number_of_threads
from vllm_omni_ext.topology.placement import Turns, devices_of
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.wire import loading

SHUTDOWN_TIMEOUT_S = 5.0
"""A process that has not ended this many seconds after SIGTERM is killed."""

LOGS = "logs"
"""Name of the private folder's subfolder with the logs."""

NOT_STARTED = 0
"""Process id of a replica that has no process yet."""

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class StartFailed(OmniError):
    """A replica did not become ready."""


@dataclass(frozen=True)
class _Prepared:
    """Data with which a replica is started.

    Attributes:
        place: folder for the replica's files.
        addresses: (input, output) of each API server, to which the replica connects.
    """

    config: VllmConfig
    place: str
    addresses: Sequence[tuple[str, str]]


class Deployment:
    """The running replicas of a plan. Use as a context manager; leaving it ends every process.

    Args:
        plan: the replicas to start.
        clients: number of local API servers, which connect to every replica. 0: the API servers belong to the head, a
            process that the replicas join, and each replica is started with `start_again` once the head has sent their
            addresses.
        usage: vLLM's usage context of the start (server or offline).
        tell: receives progress lines of the start.
        folder: private folder; removed at the end, except logs that an error message names. None: a new one.
        host: address at which replicas of other hosts reach the replicas started here; None: the head's address, or
            loopback without a `master_address`.
        identity_of: returns the identity with which a replica reports to the coordinator; called for every start. None:
            replicas do not report.
        name_of: returns the name of a replica in logs and messages.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clients: int,
        usage: UsageContext,
        tell: Callable[[str], None] = lambda line: None,
        identity_of: Callable[[ReplicaId], ReplicaIdentity] | None = None,
        folder: PrivateFolder | None = None,
        host: str | None = None,
        name_of: Callable[[ReplicaId], ReplicaId] = lambda replica: replica,
    ) -> None:
        self.plan = plan
        self.name_of = name_of
        self.clients = clients
        self._identity_of = identity_of
        self._host = host or plan.config.cluster.master_address or LOOPBACK
        self.configs: dict[str, VllmConfig] = {}
        self.drain_s = 0
        self._listeners: dict[ReplicaId, EngineZmqListeners] = {}
        self._launches: dict[ReplicaId, CoreEngineLaunch] = {}
        self._barriers: dict[ReplicaId, contextlib.ExitStack] = {}
        self._prepared: dict[ReplicaId, _Prepared] = {}
        self._deadlines: dict[ReplicaId, float] = {}
        self._turns = Turns({})
        self.launched: Callable[[ReplicaId, int], None] = lambda replica, pid: None
        """Called with every replica of the plan and its process id when the process has been started."""
        self._usage = usage
        self.fork = may_fork(plan, usage)
        self._no_flashinfer = bool(missing_for_flashinfer())
        self._private = folder or PrivateFolder()
        self.folder = self._private.path
        self.logs = Logs()
        self.began = psutil.Process().create_time()
        self.progress = Progress(plan, tell, self.seconds)
        self._listener: Listener | None = None

    def __enter__(self) -> Deployment:
        if not self.plan.config.verbose:
            self.logs = Logs(Path(self.plan.config.log_dir or Path(self.folder, LOGS)))
        if self.fork:
            register_classes(self.plan.family)
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
        """Make the configs of all stages, open the listeners for all replicas, and start the first one of every device.

        `wait` starts the remaining replicas, one after the other on each device.

        Raises:
            ConfigError: vLLM does not accept the engine arguments of a stage; no replica was started.
        """
        devices = devices_of(self.plan)
        self._turns = Turns(devices)
        for replica in devices:  # API servers must have all sockets before the first replica starts
            place = self._place(replica)
            with self._replica_environment(replica.stage, place):
                addresses = self.listen(replica)
                self._prepared[replica] = _Prepared(self._config(replica), place, addresses)
        self._complete_configs()
        for replica in devices:
            self._start(self._turns.enter(replica))

    def _start(self, replicas: Sequence[ReplicaId]) -> None:
        for replica in replicas:
            prepared = self._prepared[replica]
            with self._replica_environment(replica.stage, prepared.place):
                self._launch(replica, prepared.config, prepared.addresses)
            self.launched(replica, self.processes()[replica].pid)

    def listen(self, replica: ReplicaId, host: str | None = None) -> Sequence[tuple[str, str]]:
        """Open the API servers' listeners for a replica that is going to start.

        The listeners stay open in this process, so that a restarted API server can use those of the dead one.

        Args:
            host: the address of this host that the replica can reach; None for a local replica.

        Returns:
            The addresses (input, output) of each API server to which the replica connects.
        """
        self.unlisten(replica)

        def bind(client: int, kind: int) -> ZmqListener:
            if host is not None:
                return bind_within(
                    self.plan.config.cluster.ports, lambda port: make_zmq_listener(endpoint(host, port), kind)
                )
            unique = f"{replica.stage}-{replica.index}-{client}-{time.monotonic_ns()}"
            return make_zmq_listener(f"ipc://{self.folder}/{unique}-{'i' if kind == zmq.ROUTER else 'o'}", kind)

        listeners = self._listeners[replica] = EngineZmqListeners(inputs=[], outputs=[])
        for client in range(self.clients):
            listeners.inputs.append(bind(client, zmq.ROUTER))
            listeners.outputs.append(bind(client, zmq.PULL))
        return [(i.address, o.address) for i, o in zip(listeners.inputs, listeners.outputs, strict=True)]

    def unlisten(self, replica: ReplicaId) -> None:
        """Close the listeners of a replica."""
        if (listeners := self._listeners.pop(replica, None)) is not None:
            listeners.cleanup()

    def listeners(self, replica: ReplicaId, client: int) -> tuple[ZmqListener, ZmqListener]:
        """Return the sockets (input, output) at which the API server with index `client` listens for a replica."""
        listeners = self._listeners[replica]
        return listeners.inputs[client], listeners.outputs[client]

    def __exit__(self, *exc: object) -> None:
        self.close()

    def seconds(self) -> float:
        """Return the seconds since the command began."""
        return time.time() - self.began

    @contextlib.contextmanager
    def _replica_environment(self, stage: str, folder: str) -> Iterator[None]:
        """Set the environment variables for making configs of a stage and starting its replicas, inside the block.

        Args:
            folder: folder for the replicas' sockets and temporary files.
        """
        variables = {"VLLM_RPC_BASE_PATH": folder}
        if (ports := self.plan.config.cluster.ports) is not None:  # the libraries read them at their import
            variables |= zip(MOONCAKE_VARIABLES, map(str, ports), strict=True)
            variables[UCX_VARIABLE] = "{}-{}".format(*ports)
        config = self.plan.config.stage(stage)
        variables |= {**chosen_environment(config), **config.env}
        defaults = dict(self.plan.stage(stage).env)
        if self._no_flashinfer:
            defaults.setdefault(SAMPLER, "0")
        with environment(variables, defaults), temporary_files_in(folder):
            yield

    def _place(self, replica: ReplicaId) -> str:
        """Create an empty folder for a replica's files, and return its path."""
        place = Path(self.folder, f"{replica.stage}-{replica.index}")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return str(place)

    def _config(self, replica: ReplicaId) -> VllmConfig:
        args = stage_engine_args(self.plan, replica)
        config = engine_config(replica.stage, args, self._usage)
        self._keep(replica.stage, config)
        if config.kv_transfer_config is not None:  # set here, because hosts compare their plans
            config.kv_transfer_config.kv_connector_extra_config[HOST] = self._host
        scheduling: Any = config.scheduler_config
        scheduling.scheduler_cls = WithAgent(
            scheduling.scheduler_cls, self.plan.config.stage(replica.stage).step_timeout_s
        )
        return config

    def _keep(self, stage: str, config: VllmConfig) -> None:
        """Store the config of a stage.

        API servers get the frontend's `shutdown_timeout` (`drain_s`), since they wait for requests to end. Engines get
        0, and end at once.
        """
        if stage == self.plan.frontend_stage:
            self.drain_s = config.shutdown_timeout
        config.shutdown_timeout = 0
        self.configs.setdefault(stage, config)

    def _complete_configs(self) -> None:
        """Make the configs of stages without local replicas."""
        for stage in self.plan.stages:
            if stage.name not in self.configs:
                with self._replica_environment(stage.name, self.folder):
                    args = any_replica_args(self.plan, stage.name)
                    self._keep(stage.name, engine_config(stage.name, args, self._usage))

    def _launch(self, replica: ReplicaId, config: VllmConfig, addresses: Sequence[tuple[str, str]]) -> None:
        if self.fork:  # after the config was made, because making it sets spawn on vLLM's CPU platform
            os.environ[START_METHOD] = "fork"
            preload(config)
        ours = EngineZmqAddresses(inputs=[i for i, _ in addresses], outputs=[o for _, o in addresses])
        launch = launch_core_engines(config, Executor.get_class(config), True, ours)
        threads = number_of_threads(self.plan.stage(replica.stage).env)
        name, variables = self.name_of(replica), {}
        if self._identity_of is not None:
            variables = self._identity_of(replica).variable()
        if self._listener is not None:
            variables |= loading.variable(self._listener.path, str(name))
        self.progress.begun(name)
        kernels = replaced_kernels() if self.fork else contextlib.nullcontext()
        with self.forking(threads), kernels, self.logs.of(name), environment(variables):
            barrier = contextlib.ExitStack()
            self._deadlines[replica] = time.monotonic() + self.plan.config.timeouts.startup_timeout_s
            self._launches[replica] = barrier.enter_context(launch)
            self._barriers[replica] = barrier

    def start_again(self, replica: ReplicaId, addresses: Sequence[tuple[str, str]]) -> None:
        """Start a replica that has no process, or whose process has ended; `wait_for` returns when it is ready.

        Args:
            addresses: the addresses (input, output) of each API server to which the replica connects.
        """
        with self._replica_environment(replica.stage, self._place(replica)):
            self._launch(replica, self._config(replica), addresses)

    def wait_for(self, replica: ReplicaId) -> None:
        """Wait until a starting replica is ready.

        Raises:
            StartFailed: the replica ended while starting, or was killed because `startup_timeout_s` has passed.
        """
        process, late = self.processes()[replica], threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._deadlines.pop(replica) - time.monotonic(), end)
        timer.daemon = True
        timer.start()
        try:
            self._barriers.pop(replica).close()
        except RuntimeError as error:
            config = self.plan.config
            if late.is_set():
                raise StartFailed(
                    f"it was not ready after {config.timeouts.startup_timeout_s:g} s (timeouts.startup_timeout_s)"
                ) from error
            process.join(SHUTDOWN_TIMEOUT_S)
            raise StartFailed(f"{how_it_ended(process.exitcode)} while starting") from error
        finally:
            timer.cancel()
            self.progress.over(self.name_of(replica))

    def discard(self, replica: ReplicaId) -> None:
        """Remove the listeners and the process manager of a replica whose process has ended."""
        if (launch := self._launches.pop(replica, None)) is not None:
            launch.engine_manager.shutdown(timeout=0)
        self.unlisten(replica)

    @contextlib.contextmanager
    def forking(self, threads: int = 1) -> Iterator[None]:
        """Prepare this process for starting others inside the block.

        No progress line is written inside: a line would get into a replica's log, and a fork could copy a held lock.

        Args:
            threads: number of compute threads of forked processes.
        """
        with contextlib.ExitStack() as inside:
            inside.enter_context(process_state)  # before the lock of the progress, as in `_launch`
            inside.enter_context(self.progress.speaking)
            if self.fork:  # a server's head does not need its garbage collector any more
                inside.enter_context(frozen_heap(keep=self._usage is UsageContext.OPENAI_API_SERVER))
                inside.enter_context(compute_threads(threads))
            yield

    def wait(self) -> None:
        """Wait until every replica is ready; start replicas that share a device one after the other.

        Answers the start-up handshakes of all replicas at once, because a replica loads nothing before its handshake is
        answered. Must be called by the thread that entered the context manager, because a replica ends with the thread
        that started it.

        Raises:
            StartFailed: a replica ended while starting, or while others were starting, or took too long; the message
                contains the end of its log.
        """
        over, ending = Pipe(duplex=False)

        def wait_for(replica: ReplicaId) -> None:
            try:
                self.wait_for(replica)
            finally:
                ending.send(replica)

        with over, ending, ThreadPoolExecutor(max_workers=max(1, len(self._prepared))) as threads:
            waits: dict[ReplicaId, Future[None]] = {}
            ready: dict[Any, ReplicaId] = {}  # by the sentinel of the process
            started: Sequence[ReplicaId] = list(self._barriers)
            try:
                while started or waits:
                    waits |= {replica: threads.submit(wait_for, replica) for replica in started}
                    for readable in wait_for_first([over, *ready]):
                        if readable is not over:
                            raise self._lost(ready[readable])
                    replica = over.recv()
                    started = self._take_ready(replica, waits.pop(replica))
                    ready[self.processes()[replica].sentinel] = replica
            finally:
                if waits:  # a start failed or was interrupted: end the other replicas, so that their waits end
                    self.end()

    def _lost(self, replica: ReplicaId) -> StartFailed:
        """Return the error about a replica that was ready, and has ended while others were starting."""
        process = self.processes()[replica]
        process.join()
        return StartFailed(
            f"{replica} ended during the start: {how_it_ended(process.exitcode)}; "
            f"{self.logs.tail(self.name_of(replica))}"
        )

    def _take_ready(self, replica: ReplicaId, wait: Future[None]) -> Sequence[ReplicaId]:
        """Handle a replica that is ready or has failed. Start and return the next replicas of the same devices.

        Raises:
            StartFailed: the replica has failed.
        """
        try:
            wait.result()
        except StartFailed as error:
            raise StartFailed(f"{replica} did not start: {error}; {self.logs.tail(self.name_of(replica))}") from error
        self.progress.ready(replica)
        following = self._turns.leave(replica)
        self._start(following)
        return following

    def processes(self) -> dict[ReplicaId, Any]:
        """Return the process of each replica."""
        return {replica: launch.engine_manager.processes[0] for replica, launch in self._launches.items()}

    def connections(
        self,
        client: int,
        *,
        about: Mapping[ReplicaId, ReplicaInfo] | None = None,
        **known: Any,
    ) -> Connections:
        """Return the data with which the API server with index `client` connects to every replica.

        Args:
            about: the replicas to connect to; None: the replicas of the plan that this process starts.
            known: further attributes of `Connections`.
        """
        if about is None:
            about = self.about()
        return Connections(
            plan=self.plan,
            configs=self.configs,
            listeners={replica: self.listeners(replica, client) for replica in about},
            folder=self.folder,
            drain_s=self.drain_s,
            client_count=self.clients,
            client_index=client,
            about=about,
            started=self.began,
            head=os.getpid(),
            **known,
        )

    def end(self, others: Sequence[Any] = ()) -> None:
        """End all replicas and the processes `others`; those that have not ended within 5 s are killed.

        A forked replica is killed at once: it needs no cleanup, and its regular exit takes seconds.
        """
        replicas = list(self.processes().values())
        end_processes([*others, *(() if self.fork else replicas)], SHUTDOWN_TIMEOUT_S)
        for process in replicas:
            process.kill()
            process.join()

    def about(self) -> dict[ReplicaId, ReplicaInfo]:
        """Return host and process id of each replica of this process; the id is 0 before the replica is started."""
        running = self.processes()
        pids = dict.fromkeys(self._prepared, NOT_STARTED) | {replica: each.pid for replica, each in running.items()}
        return {replica: ReplicaInfo(host=gethostname(), pid=pid) for replica, pid in pids.items()}

    def close(self) -> None:
        """End all processes and remove all files; a second call does nothing."""
        self.end()
        for barrier in self._barriers.values():  # of an interrupted start, whose replicas have been ended
            with contextlib.suppress(RuntimeError):
                barrier.close()
        self._barriers.clear()
        for replica in {*self._launches, *self._listeners}:
            self.discard(replica)
        if self._listener is not None:
            self._listener.close()
        self._prepared.clear()
        kept = self.plan.config.log_dir is None and self.logs.needed()
        self._private.remove(keep=LOGS if kept else "")


def may_fork(plan: Plan, usage: UsageContext) -> bool:
    """Return whether replicas are forked, so that vLLM is imported once; otherwise vLLM's own choice (spawn) applies.

    They are forked on a CPU machine only, and only if OpenMP works after a fork. A server's head (the process that
    starts the replicas) computes nothing, so OpenMP works in its forks. A program that uses `LLM` may have computed;
    then a forked process must use one thread.
    """
    if plan.machine.platform != "cpu":
        return False
    return usage is UsageContext.OPENAI_API_SERVER or all(stage.env.get(THREADS) == "1" for stage in plan.stages)
