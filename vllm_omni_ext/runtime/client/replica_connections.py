"""Connects one API server to the replicas, and handles their loss and return.

The head (the process that starts the deployment) announces a replica that starts. The API server listens for the
replica and connects once the replica is ready. If the replica's process ends, the connection is closed. If the replica
only misses heartbeats, the connection stays: when the heartbeats return, the replica first aborts its old requests,
then it receives new requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import (
    LEFT,
    Attach,
    Change,
    Detach,
    Entry,
    Member,
    State,
    View,
    apply_view,
)
from vllm_omni_ext.coordinator.watcher import Watcher
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.runtime.client.replica import Client, Listeners, StockReplica, abort_client, addresses
from vllm_omni_ext.runtime.client.sent_media import SentMedia, engine_keeps_media
from vllm_omni_ext.runtime.control import NOTHING_CHANGED, OperatorState, Server, SharedCounters
from vllm_omni_ext.topology.placement import devices_of, longest_sequence
from vllm_omni_ext.topology.plan import Plan

log = logging.getLogger(__name__)

AFTER_THE_LAUNCHER_S = 30.0
"""Seconds that an API server waits longer than the head, so that the head's error, with the reason, comes first."""


def connect_limit_s(plan: Plan) -> float:
    """Return the limit of an API server's wait for a replica to become ready, in seconds.

    Replicas that share a device start one after the other, so the limit includes the starts before.
    """
    return plan.config.timeouts.startup_timeout_s * longest_sequence(devices_of(plan)) + AFTER_THE_LAUNCHER_S


@dataclass(frozen=True, kw_only=True)
class ReplicaInfo:
    """Host, process id and restarts of a replica, for status pages.

    `restarts` counts the restarts of all processes with the replica's name since the deployment started.
    """

    host: str
    pid: int
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The data with which one API server connects to every replica.

    Attributes:
        configs: vLLM config by stage.
        listeners: the sockets on which this API server listens for each replica: input and output.
        folder: private directory of the deployment.
        ready_responses: ready messages of the replicas, if this API server replaces one that has died; else None.
        starting: replicas that are being started.
        client_count: number of API servers.
        client_index: index of this API server.
        about: host, process id and restarts of each replica, for status pages.
        restarts: number of restarts by replica, also of replicas that are down now.
        started: Unix time of the command's start, in seconds.
        views: address at which the coordinator publishes views, i.e. the states of all replicas; None without a
            coordinator.
        head: process id of the head, the process that has started the deployment.
        drain_s: time for requests to end when the API server shuts down, in seconds.
        board: counters shared by the API servers; None without API servers.
        operator_state: the result of all changes by operators until now (sleeping replicas, LoRA adapters).
    """

    plan: Plan
    configs: Mapping[str, VllmConfig]
    listeners: Mapping[ReplicaId, Listeners]
    folder: str
    ready_responses: Mapping[ReplicaId, bytes] | None = None
    starting: tuple[ReplicaId, ...] = ()
    client_count: int = 1
    client_index: int = 0
    about: Mapping[ReplicaId, ReplicaInfo] = field(default_factory=dict)
    restarts: Mapping[ReplicaId, int] = field(default_factory=dict)
    started: float = 0.0
    views: str | None = None
    head: int = 0
    drain_s: int = 0
    board: SharedCounters | None = None
    operator_state: OperatorState = NOTHING_CHANGED

    def connect(self, replica: ReplicaId, listeners: Listeners, ready_response: bytes | None = None) -> StockReplica:
        """Connect to a replica and wait until it is ready.

        Args:
            ready_response: the ready message that an earlier API server received; None: wait for it.
        """
        config = deepcopy(self.configs[replica.stage])  # vLLM's client writes into its config
        client = Client(
            config,
            Executor.get_class(config),
            False,
            client_addresses=addresses(listeners),
            client_count=self.client_count,
            client_index=self.client_index,
            ready_response=ready_response,
            # Unix sockets need no keys: they lie in a private folder.
            keys=self.keys if listeners[0].address.startswith("tcp:") else None,
            ready_within_s=connect_limit_s(self.plan),
        )
        media = SentMedia(config, self.client_count) if engine_keeps_media(config) else None
        return StockReplica(replica, client, media)

    @property
    def keys(self) -> Keys | None:
        """CURVE keys of connections over TCP; None without a secret."""
        return Keys.read(self.plan.config.cluster.cluster_secret_file)

    def connect_all(self) -> dict[ReplicaId, StockReplica]:
        """Connect to the replicas in `listeners`, and wait until all are ready."""
        return {
            replica: self.connect(
                replica, listeners, None if self.ready_responses is None else self.ready_responses.get(replica, b"")
            )
            for replica, listeners in self.listeners.items()
        }


@dataclass(frozen=True)
class Report:
    """A replica's state in the coordinator's last view, and the time of its last heartbeat (monotonic seconds)."""

    entry: Entry
    last_seen: float


Take = Callable[[ReplicaId, EngineCoreOutputs], Awaitable[None]]


class ReplicaConnections:
    """Connects to replicas, reads their outputs, and applies the coordinator's views, i.e. the states of all replicas.

    Runs in the event loop of one API server.

    Args:
        replicas: the replicas that are connected already.
        take: receives all outputs of a replica.
        joined: called with every replica that is connected later.
        lost: called with every replica whose connection has been closed.
    """

    def __init__(
        self,
        connections: Connections,
        orchestrator: Orchestrator,
        replicas: Mapping[ReplicaId, StockReplica],
        *,
        take: Take,
        joined: Callable[[StockReplica], None],
        lost: Callable[[ReplicaId], None],
    ) -> None:
        self.replicas = dict(replicas)
        self.about = dict(connections.about)
        self.reports: dict[ReplicaId, Report] = {}
        self.servers: tuple[Server, ...] = ()
        """All API servers, from the head's latest message."""
        self.connected: Callable[[StockReplica], None] = lambda replica: None
        """Called with every replica that is connected after the start."""
        self.watcher: Watcher | None = None
        self._connections = connections
        self._orchestrator = orchestrator
        self._observer = orchestrator.observer
        self._pools = orchestrator.pools
        self._take, self._joined, self._lost = take, joined, lost
        self._members: dict[ReplicaId, Member] = {}
        """The newest process of each replica in views."""
        self._own: dict[ReplicaId, Member] = {}
        """The process at the other end of each connection, as the first view since the connection shows it."""
        self._asleep = set(connections.operator_state.asleep)
        self._outdated: dict[ReplicaId, Any] = {}
        """Last load report from before the wake-up, by woken replica, until the replica's next report arrives."""
        self._lost_requests: dict[ReplicaId, tuple[str, ...]] = {}
        """Ids of the requests that were moved to other replicas, by the replica that misses heartbeats."""
        self._unsent: dict[ReplicaId, dict[int, float]] = {}
        """The replicas that have not connected since the start, with the arguments (`client`, `before`) of the calls of
        `forget_requests_of` that they have missed."""
        self._connect_tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._reattach_tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Start to read the replicas' outputs, and to receive views if there is a coordinator."""
        for name in self._connections.starting:
            self._orchestrator.announce(name)
        self._count_first_restarts()
        self._mark_asleep(*self._asleep)
        for replica in self.replicas.values():
            self._spawn(self._read(replica))
            if not replica.connected:
                self._await_connection(replica)
        if self._connections.ready_responses is not None:
            self.forget_requests_of(self._connections.client_index, time.time())
        if self._connections.views is not None:
            self.watcher = Watcher(self._connections.views, keys=self._connections.keys)
            self._spawn(self._follow(self.watcher))

    def close(self) -> None:
        """Stop reading outputs and views; the caller closes the connections. Called in the loop, as all methods."""
        for task in self._tasks:
            task.cancel()
        if self.watcher is not None:
            self.watcher.close()

    def state(self, replica: ReplicaId) -> str:
        """Return the state of a replica for status pages: UP, SUSPECT, DRAINING, DOWN or SLEEPING.

        This is the state in the coordinator's last view, with two exceptions. DOWN: also a replica without a
        connection. SLEEPING: an operator has put the replica to sleep, or the replica has reported that its scheduler
        is paused.
        """
        pool, report = self._pools[replica.stage], self.reports.get(replica)
        if replica not in pool.replicas:
            return "DOWN"
        state = State.UP if report is None else report.entry.state
        load = None if report is None else report.entry.load
        reported = load is not None and load.asleep and load != self._outdated.get(replica)
        return "SLEEPING" if state is State.UP and (reported or pool.is_asleep(replica)) else state.name

    def replica_names(self, stage: str) -> list[ReplicaId]:
        """Return the ids of a stage's replicas: those of the plan and those that have joined, live or not."""
        return sorted(replica for replica in self.about if replica.stage == stage)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection task failed", exc_info=error)

    # -- sleep ---------------------------------------------------------------------------------------------------

    def slept(self, replicas: Iterable[ReplicaId], *, asleep: bool) -> None:
        """Mark replicas as asleep (they get no requests while others are awake), or as woken."""
        for replica in replicas:
            if asleep:
                self._asleep.add(replica)
                self._mark_asleep(replica)
            else:
                self._asleep.discard(replica)
                self._pools[replica.stage].mark_awake(replica)
                if (report := self.reports.get(replica)) is not None:
                    self._outdated[replica] = report.entry.load
        self._orchestrator.pools_changed()

    def _mark_asleep(self, *replicas: ReplicaId) -> None:
        for replica in replicas:
            if replica in self._pools[replica.stage].replicas:
                self._pools[replica.stage].mark_asleep(replica)

    # -- messages of the head ------------------------------------------------------------------------------------

    def starting(self, replica: ReplicaId) -> None:
        """Announce to the orchestrator that a replica is going to start, so that requests may wait for it."""
        self._orchestrator.announce(replica)

    def started(self, replica: ReplicaId, pid: int) -> None:
        """Record the process id of a replica of the plan whose process did not exist when this API server started."""
        self.about[replica] = replace(self.about[replica], pid=pid)

    def ready(self, replica: ReplicaId, about: ReplicaInfo, listeners: Listeners) -> None:
        """Start to connect to a replica that is ready; once connected, the replica gets requests. Returns at once."""
        self._asleep.discard(replica)  # not in `_connect`: an operator may put the new process to sleep until then
        self._connect_tasks[replica] = self._spawn(self._connect(replica, about, listeners))

    async def _connect(self, replica: ReplicaId, about: ReplicaInfo, listeners: Listeners) -> None:
        try:
            connected = await _in_thread(lambda: self._connections.connect(replica, listeners))
        except Exception as error:
            log.exception("replica %s is ready and cannot be connected", replica)
            self._connect_tasks.pop(replica, None)
            await self._orchestrator.never_up(replica, f"it cannot be connected: {error}")
            return
        if (before := self.replicas.get(replica)) is not None:  # its process has ended, but `_drop` has not run
            dropped = self._spawn(self._drop(before, "another process has its place"))
            try:
                await asyncio.shield(dropped)  # its requests move also if this replica has ended too
            except asyncio.CancelledError:
                connected.close(timeout=0)
                raise
        self._connect_tasks.pop(replica, None)
        self._count_restarts(replica, about.restarts)
        self.about[replica] = about
        self.replicas[replica] = connected
        if (member := self._members.get(replica)) is not None:
            self._own[replica] = member
        self.connected(connected)
        self._joined(connected)
        self._spawn(self._read(connected))
        await self._up(connected)

    async def _up(self, replica: StockReplica) -> None:
        await self._orchestrator.replica_up(replica)
        if replica.id in self._asleep:
            self._mark_asleep(replica.id)

    def _count_first_restarts(self) -> None:
        if self._connections.ready_responses is not None:
            self._observer.continue_restarts()
        restarts = {name: about.restarts for name, about in self.about.items()} | dict(self._connections.restarts)
        for replica, total in restarts.items():
            self._count_restarts(replica, total)

    def _count_restarts(self, replica: ReplicaId, total: int) -> None:
        if self._connections.client_index == 0:
            self._observer.restarted(replica, total)

    def forget_requests_of(self, client: int, before: float) -> None:
        """Make all replicas abort the requests that a dead API server has sent.

        Args:
            client: index of the dead API server.
            before: Unix time in seconds; requests that were sent later are kept.
        """
        for replica in self.replicas.values():
            if replica.id in self._unsent:
                self._unsent[replica.id][client] = before
            else:
                self._spawn(replica.add(abort_client(client, before)))

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        """Handle the end, or the failed start, of a replica's process; `again`: the process will be restarted."""
        self._asleep.discard(replica)
        _cancel(self._connect_tasks, replica)
        self._orchestrator.announce(replica, coming=again)
        if (connected := self.replicas.get(replica)) is not None:  # `fail` lets `_read` read the earlier outputs first
            connected.fail(reason)
        elif not again:
            self._spawn(self._orchestrator.never_up(replica, reason))

    def left(self, replica: ReplicaId) -> None:
        """Remove a replica of a headless node that the coordinator has removed."""
        self._asleep.discard(replica)
        _cancel(self._connect_tasks, replica)
        self._spawn(self._remove(replica, self.replicas.get(replica)))

    async def _remove(self, replica: ReplicaId, connected: StockReplica | None) -> None:
        if connected is not None:
            await self._drop(connected, LEFT)
        if replica not in self.replicas and replica not in self._connect_tasks:  # else its name is used again
            await self._orchestrator.never_up(replica, LEFT)
            self.about.pop(replica, None)
            self._observer.forgotten(replica)

    # -- outputs of replicas -------------------------------------------------------------------------------------

    async def _read(self, replica: StockReplica) -> None:
        try:
            while True:
                await self._take(replica.id, await replica.outputs())
        except EngineDeadError:  # its text refers to a stack trace that clients do not have
            reason = replica.reason or "its engine has failed; the error is in its log"
            if not replica.reason:  # the engine itself has reported its end; `ended` follows when its process has ended
                self._orchestrator.announce(replica.id)
            await self._drop(replica, reason, ended=True)
        except Exception as error:  # its other outputs cannot be received either
            log.exception("outputs of replica %s cannot be received", replica.id)
            await self._drop(replica, f"its outputs cannot be received: {error}")

    async def _drop(self, replica: StockReplica, reason: str, *, ended: bool = False) -> None:
        if self.replicas.get(replica.id) is not replica:
            return
        _cancel(self._reattach_tasks, replica.id)
        # Close now and in the loop: a socket that is still open when its context is collected blocks the collector for
        # ever.
        replica.close(timeout=0)
        del self.replicas[replica.id]
        self._unsent.pop(replica.id, None)
        self._lost_requests.pop(replica.id, None)
        # A late `Detach` of the ended process must not match. One of the next process must, if a view has shown it.
        if (own := self._own.pop(replica.id, None)) is not None and self._members[replica.id] == own:
            del self._members[replica.id]
        self.reports.pop(replica.id, None)
        self._lost(replica.id)
        await self._leave(replica.id, reason, ended=ended)

    async def _leave(self, replica: ReplicaId, reason: str, *, ended: bool = False) -> tuple[str, ...]:
        if replica not in self._pools[replica.stage].replicas:
            if ended:
                await self._orchestrator.replica_ended(replica, reason)
            return ()
        return await self._orchestrator.replica_down(replica, reason, ended=ended)

    # -- views of the coordinator --------------------------------------------------------------------------------

    async def _follow(self, watcher: Watcher) -> None:
        async for view, changes in watcher:
            self._observer.viewed(watcher.age())
            for change in changes:
                await self._change(change)
            self._note(view)
            for pool in self._pools.values():
                apply_view(pool, view)
            self._orchestrator.pools_changed()

    def _note(self, view: View) -> None:
        now, before = time.monotonic(), self.reports
        self.reports = {}
        for entry in view.replicas:
            last = before.get(entry.member.id)
            if self._outdated.get(entry.member.id, entry.load) != entry.load:
                del self._outdated[entry.member.id]
            last_seen = last.last_seen if last is not None and last.entry.load == entry.load else now
            self.reports[entry.member.id] = Report(entry, last_seen)
            if last_seen == now and entry.member.id in self.about:  # a view may still contain one that has left
                self._observer.heartbeat(entry.member.id)

    async def _change(self, change: Change) -> None:
        """Apply a change of a replica's state. At `Forget` nothing happens: the head reports the end of replicas."""
        replica = change.member.id
        connected = self.replicas.get(replica)
        match change:
            case Attach(member):
                self._members[replica] = member
                if connected is not None:
                    self._own.setdefault(replica, member)
                if connected is not None and replica in self._lost_requests and replica not in self._unsent:
                    self._reattach_tasks[replica] = self._spawn(self._attach_again(connected))
            case Detach(member, reason) if connected is not None and self._members.get(replica) == member:
                self._orchestrator.announce(replica)  # the replica may return
                self._lost_requests[replica] = await self._leave(replica, reason)

    def _await_connection(self, replica: StockReplica) -> None:
        """Send a replica nothing until it has connected; ZeroMQ would drop the messages.

        The replica hangs or cannot be reached while this API server replaces one that has died. It is treated as a
        replica that misses heartbeats.
        """
        log.warning("replica %s has not connected; it gets requests once it has", replica.id)
        self._unsent[replica.id] = {}
        self._lost_requests[replica.id] = ()
        self._orchestrator.announce(replica.id)
        # At once, because the start of the HTTP server calls all replicas of the pool without a time limit.
        del self._orchestrator.replicas[replica.id]
        self._pools[replica.id.stage].remove(replica.id)
        self._observer.replica_down(replica.id)
        self._reattach_tasks[replica.id] = self._spawn(self._attach_connected(replica))

    async def _attach_connected(self, replica: StockReplica) -> None:
        await replica.connection()
        unsent = self._unsent[replica.id]
        while unsent:
            await replica.add(abort_client(*unsent.popitem()))
        del self._unsent[replica.id]
        await self._attach_again(replica)

    async def _attach_again(self, replica: StockReplica) -> None:
        """Use a replica again that missed heartbeats and is back, after it has aborted its old requests.

        The old requests were sent to other replicas. After `StockReplica.fence`, no output of them can arrive.
        """
        stale = self._lost_requests.pop(replica.id)
        try:
            await replica.abort(list(stale))
            await replica.fence()
        except EngineDeadError:
            return  # its reader receives the error too
        self._reattach_tasks.pop(replica.id, None)
        if self.replicas.get(replica.id) is replica and replica.id not in self._lost_requests:
            log.warning("replica %s is back", replica.id)
            await self._up(replica)


def _cancel(tasks: dict[ReplicaId, asyncio.Task[None]], replica: ReplicaId) -> None:
    if (task := tasks.pop(replica, None)) is not None:
        task.cancel()


async def _in_thread(make: Callable[[], StockReplica]) -> StockReplica:
    """Run the blocking function `make` in a daemon thread, which does not keep the process alive.

    If the caller is cancelled, the connection is closed as soon as it is made.
    """
    made: Future[StockReplica] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="omni-connect", daemon=True).start()
    try:
        return await asyncio.shield(asyncio.wrap_future(made))
    except asyncio.CancelledError:
        made.add_done_callback(lambda done: None if done.exception() else done.result().close(timeout=0))
        raise
