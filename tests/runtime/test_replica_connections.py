"""Replicas are connected, lost and attached again, by messages of the head and views of the coordinator."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
import torch
from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.examples import seeds
from tests.support.fakes import FakeRuntime, check_always, opened, output, replica_of, text_request
from vllm_omni_ext import metrics as m
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.coordinator.members import Entry, Member, State, View, ViewDiff
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import Metric, Metrics
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.client import replica_connections as replica_connections_module
from vllm_omni_ext.runtime.client.replica_connections import ReplicaConnections, ReplicaInfo
from vllm_omni_ext.runtime.control import NOTHING_CHANGED

A, B, FAR = (ReplicaId("text", i) for i in range(3))
"""Two that are planned here and one of another host."""

HERE, THERE = ReplicaInfo(host="here", pid=1), ReplicaInfo(host="there", pid=2)


class Connected:
    """A connection that logs its messages; the test answers the fence."""

    def __init__(self, replica: ReplicaId, *, connected: bool = True) -> None:
        self.id = replica
        self.connected = connected
        self.reached = asyncio.Event()
        self.sent: list[Any] = []
        self.closed = 0
        self.fences: list[asyncio.Future[None]] = []
        self._said: asyncio.Queue[Any] = asyncio.Queue()

    async def connection(self) -> None:
        await self.reached.wait()
        self.connected = True

    async def add(self, request: Any) -> None:
        assert self.connected, "the message would be dropped"
        self.sent.append(request.request_id)

    async def abort(self, request_ids: list[str]) -> None:
        self.sent.append(("abort", *request_ids))

    async def fence(self) -> None:
        assert self.connected
        self.sent.append("fence")
        self.fences.append(asyncio.get_running_loop().create_future())
        await self.fences[-1]

    async def outputs(self) -> Any:
        item = await self._said.get()
        if isinstance(item, Exception):
            raise item
        return item

    def say(self, item: Any) -> None:
        self._said.put_nowait(item)

    reason = ""

    def fail(self, reason: str) -> None:
        self.reason = reason
        self.say(EngineDeadError(reason))

    def close(self, timeout: float | None = None) -> None:
        self.closed += 1


class Views:
    """A watcher with the views of the test."""

    fresh = True

    def __init__(self, address: str, keys: Any = None) -> None:
        self._follower = ViewDiff()
        self._views: asyncio.Queue[View] = asyncio.Queue()

    def __aiter__(self) -> Views:
        return self

    async def __anext__(self) -> Any:
        view = await self._views.get()
        changes = self._follower.take(view)
        return self._follower.view, changes

    def show(self, *entries: Entry) -> None:
        replicas = tuple(sorted(entries, key=lambda each: each.member))
        self._views.put_nowait(View(generation=1, settled=True, timeout_s=1.0, replicas=replicas))

    def age(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def entry(replica: ReplicaId, state: State = State.UP, epoch: int = 1, load: Load | None = None) -> Entry:
    return Entry(Member(replica.stage, replica.index, epoch), state, load)


class Bench:
    """Replica connections over fakes; `connections` has every one that was made."""

    def __init__(
        self,
        *,
        client_index: int = 0,
        ready_responses: Any = None,
        about: ReplicaInfo = HERE,
        restarts: Mapping[ReplicaId, int] | None = None,
        unreached: Collection[ReplicaId] = (),
    ) -> None:
        self.connections: list[Connected] = []
        self.gates: list[threading.Event] = []
        """One for every connection that is being made; set it to let it go on."""
        self.gated = False
        self.broken = False
        self.delivered: list[tuple[ReplicaId, str]] = []
        self.joined: list[ReplicaId] = []
        self.lost: list[ReplicaId] = []
        first = {replica: Connected(replica, connected=replica not in unreached) for replica in (A, B)}
        self.connections.extend(first.values())
        runtime: Any = FakeRuntime()
        self.registry = CollectorRegistry()
        observer = Observer(Metrics("tiny", self.registry), frontend="text", replicas=first)
        self.pool = StagePool("text", first, changed=observer.bound, decided=observer.decided)
        replicas: Any = first
        self.orchestrator = Orchestrator(
            Settings(frontend="text", wait_s=60.0),
            runtime=runtime,
            pools={"text": self.pool},
            replicas=replicas,
            requests=EngineRequests(),
            observer=observer,
        )
        check_always(self.orchestrator)
        plan = SimpleNamespace(config=OmniConfig(), replicas=lambda: [SimpleNamespace(id=A), SimpleNamespace(id=B)])
        told: Any = SimpleNamespace(
            operator_state=NOTHING_CHANGED,
            plan=plan,
            about={A: about, B: about},
            restarts=restarts or {},
            starting=(),
            ready_responses=ready_responses,
            views="views",
            keys=None,
            client_index=client_index,
            connect=self._connect,
        )
        self.replica_connections = ReplicaConnections(
            told,
            self.orchestrator,
            replicas,
            take=self._take,
            joined=lambda replica: self.joined.append(replica.id),
            lost=self.lost.append,
        )
        self.replica_connections.start()
        self.views: Any = self.replica_connections.watcher

    def _connect(self, replica: ReplicaId, listeners: Any) -> Any:
        if self.gated:
            gate = threading.Event()
            self.gates.append(gate)
            assert gate.wait(30)
        if self.broken:
            raise TimeoutError("it says nothing")
        self.connections.append(Connected(replica))
        return self.connections[-1]

    async def _take(self, replica: ReplicaId, outputs: EngineCoreOutputs) -> None:
        for each in outputs.outputs:
            if await self.orchestrator.produced(replica, each):
                self.delivered.append((replica, each.request_id))

    def of(self, replica: ReplicaId) -> Connected:
        """Its newest connection."""
        return next(each for each in reversed(self.connections) if each.id == replica)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def up(self, replica: ReplicaId, about: ReplicaInfo = THERE) -> None:
        """It is announced, started and connected."""
        self.replica_connections.starting(replica)
        made = len(self.connections)
        listeners: Any = None
        self.replica_connections.ready(replica, about, listeners)
        async with asyncio.timeout(30):
            while len(self.connections) == made or replica not in self.pool.replicas:
                await asyncio.sleep(0.001)

    async def view(self, *entries: Entry) -> None:
        self.views.show(*entries)
        await self.settle()

    async def open(self, *names: str) -> None:
        for name in names:
            await self.orchestrator.open(opened(text_request(name)))

    def shown(self, metric: Metric, **labels: str) -> float | None:
        """The value of a metric."""
        return self.registry.get_sample_value(metric.full_name, {"model_name": "tiny", **labels})

    def where(self, name: str) -> ReplicaId | None:
        return replica_of(self.orchestrator, "text", name)


@pytest_asyncio.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(replica_connections_module, "Watcher", Views)
    made = Bench()
    await made.settle()
    yield made
    for gate in made.gates:
        gate.set()
    tasks = set(made.replica_connections._tasks)
    made.replica_connections.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    live = list(made.replica_connections.replicas.values())
    assert [each.id for each in made.connections if each.closed != (each not in live)] == []
    assert not any(task.exception() for task in tasks if not task.cancelled())


# -- messages of the head --------------------------------------------------------------------------


async def test_a_replica_that_ends_is_lost_and_connected_again(bench: Bench) -> None:
    connections = bench.replica_connections
    await bench.open("a", "b")
    assert {bench.where("a"), bench.where("b")} == {A, B}
    name = "a" if bench.where("a") == A else "b"
    bench.of(A).say(EngineCoreOutputs(outputs=[output(name, 5)]))
    connections.ended(A, "killed by signal 9", again=True)
    await bench.settle()
    assert bench.delivered == [(A, name)], "outputs before its end are read"
    assert bench.where("a") == bench.where("b") == B
    assert bench.orchestrator.machine.placement.may_get_replica("text")
    assert connections.state(A) == "DOWN" and bench.lost == [A] and connections.replica_names("text") == [A, B]
    await bench.up(A, ReplicaInfo(host="here", pid=0, restarts=1))
    connections.started(A, 4711)
    assert connections.about[A] == ReplicaInfo(host="here", pid=4711, restarts=1)
    assert connections.state(A) == "UP" and bench.joined == [A]
    assert not bench.orchestrator.machine.placement.may_get_replica("text")
    await bench.open("c")
    assert bench.where("c") == A and bench.of(A).sent == ["c"]
    connections.forget_requests_of(3, 1000.0)
    await bench.settle()
    assert [len(bench.of(replica).sent) for replica in (A, B)] == [2, 3], "both abort requests of a dead API server"


async def test_requests_wait_while_a_replica_may_come_back(bench: Bench) -> None:
    connections, placement = bench.replica_connections, bench.orchestrator.machine.placement
    for replica in (A, B):
        connections.ended(replica, "gone", again=replica == A)
    await bench.settle()
    await bench.open("a")
    assert bench.where("a") is None and len(placement.waiting) == 1
    await bench.up(A)
    assert bench.where("a") == A
    await bench.view(entry(A))
    await bench.view(entry(A, State.DOWN))
    assert len(placement.waiting) == 1
    await bench.view(entry(A))
    bench.of(A).fences[0].set_result(None)
    await bench.settle()
    assert bench.where("a") == A


@pytest.mark.parametrize("again", [True, False])
async def test_requests_of_the_only_replica_wait_when_its_engine_fails_before_its_process_ends(
    again: bool, bench: Bench
) -> None:
    """An engine that fails by an exception reports that to its clients first."""
    connections, placement = bench.replica_connections, bench.orchestrator.machine.placement
    connections.ended(B, "gone", again=False)
    await bench.settle()
    await bench.open("a")
    bench.of(A).say(EngineDeadError())
    await bench.settle()
    assert bench.where("a") is None and len(placement.waiting) == 1
    connections.ended(A, "its process exited with status 1", again=again)
    await bench.settle()
    assert len(placement.waiting) == again
    if again:
        await bench.up(A)
        assert bench.where("a") == A


@pytest.mark.parametrize("text", [True, False])
async def test_an_output_that_cannot_be_decoded_fails_only_its_request(bench: Bench, text: bool) -> None:
    failed: list[tuple[str, str]] = []
    bench.orchestrator._failed = lambda name, error: failed.append((name, str(error)))
    bench.orchestrator.runtime.decode = mock.Mock(side_effect=ValueError("odd shape"))  # type: ignore[method-assign]
    bench.replica_connections.ended(B, "gone", again=False)
    await bench.settle()
    await bench.open("bad", "good")
    bad, good = output("bad", 5, tensor=torch.zeros(2, 2)), output("good", 6, end="stop")
    bench.of(A).say(EngineCoreOutputs(outputs=[bad, good] if text else [bad]))
    bench.of(A).say(EngineCoreOutputs(outputs=[good]))
    await bench.settle()
    assert [(name, error.splitlines()[0]) for name, error in failed] == [("bad", "odd shape")]
    assert bench.delivered == [(A, "good")] and ("abort", "bad") in bench.of(A).sent
    assert not bench.orchestrator.held() and bench.replica_connections.state(A) == "UP"


async def test_requests_move_when_the_outputs_of_a_replica_cannot_be_received(bench: Bench) -> None:
    await bench.open("a", "b")
    bench.of(A).say(ValueError("malformed"))
    await bench.settle()
    assert bench.where("a") == bench.where("b") == B
    assert bench.replica_connections.state(A) == "DOWN" and bench.lost == [A]
    await bench.up(A)


async def test_waiting_requests_fail_when_their_silent_replica_ends_for_good(bench: Bench) -> None:
    bench.replica_connections.ended(B, "gone", again=False)
    await bench.view(entry(A))
    await bench.open("a")
    await bench.view(entry(A, State.DOWN))
    assert len(bench.orchestrator.machine.placement.waiting) == 1
    bench.replica_connections.ended(A, "killed", again=False)
    await bench.settle()
    assert not bench.orchestrator.held() and not bench.orchestrator.machine.placement.available("text")


async def test_requests_wait_for_a_replica_that_is_down_in_the_first_view(bench: Bench) -> None:
    """The first view of an API server that is started again."""
    bench.replica_connections.ended(B, "gone", again=False)
    await bench.view(entry(A, State.DOWN))
    await bench.open("a")
    assert bench.where("a") is None and bench.pool.replicas == () and bench.orchestrator.held()
    await bench.view(entry(A))
    bench.of(A).fences[0].set_result(None)
    await bench.settle()
    assert bench.where("a") == A


@pytest.mark.parametrize("failed", [True, False])
async def test_nothing_is_kept_of_a_replica_of_another_host_that_has_left(bench: Bench, failed: bool) -> None:
    """An engine that fails with an exception reports that to its clients and leaves, before its process ends."""
    connections = bench.replica_connections
    await bench.up(FAR)
    await bench.view(entry(A), entry(B), entry(FAR))
    connections.slept([FAR], asleep=True)
    if failed:
        bench.of(FAR).say(EngineDeadError())
        await bench.settle()
    connections.left(FAR)
    await bench.view(entry(A), entry(B))
    assert FAR not in bench.orchestrator.machine.placement.announced
    await bench.up(FAR)
    for state in (State.UP, State.DOWN, State.UP):
        await bench.view(entry(A), entry(B), entry(FAR, state, epoch=2))
    bench.of(FAR).fences[-1].set_result(None)
    await bench.settle()
    assert connections.state(FAR) == "UP" and not bench.pool.is_asleep(FAR)


@pytest.mark.parametrize("how", ["ended", "not connected", "forgotten"])
async def test_waiting_requests_fail_when_no_replica_can_come_back(bench: Bench, how: str) -> None:
    connections, last = bench.replica_connections, FAR if how == "forgotten" else A
    listeners: Any = None
    if last == FAR:
        await bench.up(FAR)
        await bench.view(entry(FAR))
    for replica in (A, B):
        connections.ended(replica, "gone", again=replica == last)
    await bench.settle()
    await bench.view(entry(last, State.DOWN))
    await bench.open("a")
    assert len(bench.orchestrator.machine.placement.waiting) == 1
    match how:
        case "ended":
            connections.ended(A, "gone", again=False)
        case "not connected":
            bench.broken = True
            connections.ready(A, HERE, listeners)
        case _:
            connections.left(FAR)
    async with asyncio.timeout(30):
        while bench.orchestrator.held():
            await asyncio.sleep(0.001)
    assert not bench.orchestrator.machine.placement.may_get_replica("text")
    bench.broken = False
    await bench.up(A)


async def test_a_replica_that_ends_while_it_is_connected_is_closed_and_never_up(bench: Bench) -> None:
    bench.gated = True
    listeners: Any = None
    bench.replica_connections.starting(FAR)
    bench.replica_connections.ready(FAR, THERE, listeners)
    async with asyncio.timeout(30):
        while not bench.gates:
            await asyncio.sleep(0.001)
        bench.replica_connections.ended(FAR, "gone", again=False)
        await bench.settle()
        bench.gates[0].set()
        while len(bench.connections) == 2 or not bench.of(FAR).closed:
            await asyncio.sleep(0.001)
    await bench.settle()
    assert FAR not in bench.pool.replicas and FAR not in bench.replica_connections.about and bench.joined == []


async def test_requests_move_also_if_the_next_process_ends_during_the_move(bench: Bench) -> None:
    """The loss of the first process was not read yet when the second one was connected."""
    await bench.open("a", "b")
    (moved,) = [name for name in "ab" if bench.where(name) == A]
    sent, other = asyncio.Event(), bench.of(B)

    async def add(request: Any) -> None:
        await sent.wait()
        other.sent.append(request.request_id)

    with mock.patch.object(other, "add", add):
        listeners: Any = None
        bench.replica_connections.ready(A, HERE, listeners)
        async with asyncio.timeout(30):
            while A in bench.replica_connections.replicas:
                await asyncio.sleep(0.001)
        bench.replica_connections.ended(A, "gone", again=True)
        await bench.settle()
        sent.set()
        await bench.settle()
    assert bench.where(moved) == B and len(other.sent) == 2
    assert A not in bench.pool.replicas and bench.joined == []


@pytest.mark.parametrize("seed", seeds(60))
async def test_any_order_of_the_heads_messages_ends_in_the_same_state(bench: Bench, seed: int) -> None:
    """At the end the pool has the replicas that were ready last, others are closed, and no request is lost but those
    that were the only suspect on a replica that ended."""
    rng, failed = random.Random(seed), list[str]()
    bench.orchestrator._failed = lambda name, error: failed.append(str(error))
    listeners: Any = None
    there = {A: True, B: True, FAR: False}
    await bench.open("a", "b", "c")
    for _ in range(12):
        replica = rng.choice((A, B, FAR))
        if there[replica]:
            bench.replica_connections.ended(replica, "gone", again=True)
            there[replica] = False
        else:
            bench.replica_connections.starting(replica)
            if rng.random() < 0.3:
                bench.replica_connections.ended(replica, "it did not start", again=True)
            else:
                bench.replica_connections.ready(replica, THERE, listeners)
                there[replica] = True
        if rng.random() < 0.5:
            await asyncio.sleep(rng.choice((0, 0.002)))
    async with asyncio.timeout(30):
        up = {replica for replica in there if there[replica]}
        while set(bench.pool.replicas) != up or bench.replica_connections._connect_tasks:
            await asyncio.sleep(0.001)
    await bench.settle()
    assert set(bench.replica_connections.replicas) == set(bench.pool.replicas)
    held = sum(bench.where(name) is not None for name in "abc") + len(bench.orchestrator.machine.placement.waiting)
    assert held == 3 - len(failed) and all("replicas that had this request" in error for error in failed)


# -- views of the coordinator ----------------------------------------------------------------------


async def silent(bench: Bench) -> str:
    """A falls silent with one request, whose name is returned; B takes it over."""
    await bench.view(entry(A), entry(B))
    await bench.open("a", "b")
    name = "a" if bench.where("a") == A else "b"
    await bench.view(entry(A, State.DOWN), entry(B))
    assert bench.where("a") == bench.where("b") == B
    assert bench.of(A).closed == 0 and bench.replica_connections.state(A) == "DOWN"
    return name


async def test_silent_replica_takes_requests_after_its_fence_is_answered(bench: Bench) -> None:
    name = await silent(bench)
    await bench.view(entry(A), entry(B))
    assert bench.of(A).sent == [name, ("abort", name), "fence"]
    await bench.open("c")
    assert bench.where("c") == B, "the fence is not answered yet"
    bench.of(A).say(EngineCoreOutputs(outputs=[output(name, 66)]))
    await bench.settle()
    assert bench.delivered == [], "the request is another replica's"
    bench.of(A).fences[0].set_result(None)
    await bench.settle()
    assert bench.replica_connections.state(A) == "UP"
    await bench.open("d")
    assert bench.where("d") == A and bench.of(A).sent[-1] == "d"


async def test_replica_silent_or_dead_before_its_fence_is_answered_takes_no_requests(bench: Bench) -> None:
    name = await silent(bench)
    await bench.view(entry(B))  # the head reports the end of a replica
    assert bench.of(A).closed == 0 and bench.replica_connections.replica_names("text") == [A, B]
    await bench.view(entry(A), entry(B))
    await bench.view(entry(A, State.DOWN), entry(B))
    bench.of(A).fences[0].set_result(None)
    await bench.settle()
    assert A not in bench.pool.replicas
    await bench.view(entry(A), entry(B))
    assert A not in bench.pool.replicas
    bench.of(A).fences[1].set_result(None)
    await bench.settle()
    assert A in bench.pool.replicas
    assert bench.of(A).sent == [name, ("abort", name), "fence", ("abort",), "fence"]
    await bench.view(entry(A, State.DOWN), entry(B))
    await bench.view(entry(A), entry(B))
    bench.of(A).fail("gone")
    await bench.settle()
    assert bench.of(A).closed == 1 and A not in bench.pool.replicas and bench.of(A).fences[2].cancelled()
    await bench.up(A)


async def test_a_view_may_show_the_next_process_before_the_head_reports_the_end(bench: Bench) -> None:
    await bench.view(entry(A))
    await bench.view(entry(A, epoch=2))
    bench.replica_connections.ended(A, "gone", again=True)
    await bench.settle()
    await bench.up(A)
    bench.replica_connections.ended(B, "gone", again=False)
    await bench.settle()
    await bench.open("a")
    await bench.up(B)
    assert bench.where("a") == A
    await bench.view(entry(A, State.DOWN, epoch=2), entry(B))
    assert bench.where("a") == B


@pytest.mark.parametrize("connected", [True, False])
async def test_a_view_may_show_the_end_after_the_next_process_is_connected(bench: Bench, connected: bool) -> None:
    """`connected`: the first process was connected before a view has shown it."""
    if connected:
        await bench.up(FAR)
    await bench.view(entry(FAR))
    if not connected:
        await bench.up(FAR)
    for replica in (A, B, FAR):
        bench.replica_connections.ended(replica, "gone", again=replica == FAR)
    await bench.settle()
    await bench.up(FAR)
    await bench.open("a")
    for shown in (entry(FAR, State.DOWN), entry(FAR, epoch=2)):
        await bench.view(shown)
    assert bench.where("a") == FAR and bench.of(FAR).sent == ["a"]


# -- replicas that do not connect -------------------------------------------------------------------


@pytest_asyncio.fixture
async def replaced(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """The connections of an API server that replaces a dead one while A cannot be reached."""
    monkeypatch.setattr(replica_connections_module, "Watcher", Views)
    made = Bench(client_index=2, ready_responses={}, unreached={A})
    assert made.pool.replicas == (B,) and set(made.orchestrator.replicas) == {B}, "before any call can be sent"
    await made.settle()
    yield made
    made.replica_connections.close()
    await made.settle()


@pytest.mark.parametrize("viewed", [True, False])
async def test_an_unreached_replica_aborts_requests_of_dead_api_servers_before_it_gets_any(
    replaced: Bench, viewed: bool
) -> None:
    connections = replaced.replica_connections
    if viewed:
        for state in (State.UP, State.DOWN, State.UP):
            await replaced.view(entry(A, state), entry(B))
    await replaced.open("a", "b")
    assert replaced.where("a") == replaced.where("b") == B and connections.state(A) == "DOWN"
    connections.forget_requests_of(1, 7.0)
    await replaced.settle()
    assert replaced.of(A).sent == []
    replaced.of(A).reached.set()
    await replaced.settle()
    *forgotten, aborted, fence = replaced.of(A).sent
    assert sorted(name.rpartition("-")[0] for name in forgotten) == ["abort-client-1", "abort-client-2"]
    assert (aborted, fence) == (("abort",), "fence") and A not in replaced.pool.replicas
    replaced.of(A).fences[0].set_result(None)
    await replaced.settle()
    await replaced.open("c")
    assert replaced.where("c") == A and connections.state(A) == "UP"
    await replaced.view(entry(A), entry(B))
    assert len(replaced.of(A).fences) == 1
    connections.forget_requests_of(0, 8.0)
    await replaced.settle()
    assert replaced.of(A).sent[-1] == "abort-client-0-8.0", "at once from now on"


async def test_requests_wait_for_an_unreached_replica(replaced: Bench) -> None:
    replaced.replica_connections.ended(B, "gone", again=False)
    await replaced.settle()
    await replaced.open("a")
    assert replaced.where("a") is None and replaced.orchestrator.held()
    replaced.of(A).reached.set()
    await replaced.settle()
    replaced.of(A).fences[0].set_result(None)
    await replaced.settle()
    assert replaced.where("a") == A


async def test_an_unreached_replica_that_ends_is_connected_again(replaced: Bench) -> None:
    first = replaced.of(A)
    replaced.replica_connections.ended(A, "gone", again=True)
    await replaced.settle()
    assert first.closed == 1 and first.sent == []
    await replaced.up(A)
    replaced.replica_connections.forget_requests_of(1, 7.0)
    await replaced.settle()
    assert replaced.of(A).sent == ["abort-client-1-7.0"]


@pytest.mark.parametrize("ended", [False, True])
async def test_a_forgotten_replica_of_another_host_is_closed_and_not_shown(bench: Bench, ended: bool) -> None:
    await bench.up(FAR)
    await bench.view(entry(A), entry(B), entry(FAR))
    assert bench.replica_connections.replica_names("text") == [A, B, FAR]
    if ended:
        bench.replica_connections.ended(FAR, "gone", again=False)
        await bench.settle()
    bench.replica_connections.left(FAR)
    await bench.settle()
    assert bench.of(FAR).closed == 1 and FAR not in bench.pool.replicas
    assert bench.replica_connections.replica_names("text") == [A, B] and FAR not in bench.replica_connections.reports
    gauges = [family for family in bench.registry.collect() if family.type == "gauge"]
    shown = {sample.labels.get("replica") for family in gauges for sample in family.samples}
    assert {"text/0", "text/1"} <= shown and "text/2" not in shown


async def test_a_view_with_a_replica_that_has_left_shows_no_metric_of_it(bench: Bench) -> None:
    await bench.up(FAR)
    await bench.view(entry(A), entry(B), entry(FAR))
    bench.replica_connections.left(FAR)
    await bench.settle()
    await bench.view(entry(A), entry(B), entry(FAR, load=Load(0, 0, 0.0, 2)))
    gauges = [family for family in bench.registry.collect() if family.type == "gauge"]
    assert not any(sample.labels.get("replica") == "text/2" for family in gauges for sample in family.samples)


async def test_a_replica_that_leaves_before_the_first_view_gets_no_more_requests(bench: Bench) -> None:
    """An API server that is restarted is connected to it, and no view shows its end."""
    await bench.up(FAR)
    await bench.open("a", "b", "c")
    moved = next(name for name in "abc" if bench.where(name) == FAR)
    bench.replica_connections.left(FAR)
    await bench.view(entry(A), entry(B))
    assert bench.of(FAR).closed == 1 and bench.where(moved) in (A, B)


@pytest.mark.parametrize("connected", [True, False])
async def test_a_replica_that_leaves_is_not_the_next_one_of_that_name(bench: Bench, connected: bool) -> None:
    bench.gated, connections = not connected, bench.replica_connections
    listeners: Any = None
    if connected:
        await bench.up(FAR)
    else:
        connections.starting(FAR)
        connections.ready(FAR, THERE, listeners)
    connections.left(FAR)
    bench.gated = False
    await bench.up(FAR, ReplicaInfo(host="elsewhere", pid=3))
    for gate in bench.gates:
        gate.set()
    await bench.settle()
    assert FAR in bench.pool.replicas and bench.of(FAR).closed == 0
    assert connections.about[FAR].host == "elsewhere" and connections.replicas[FAR] is bench.of(FAR)


async def test_requests_follow_states_and_loads_of_views(bench: Bench) -> None:
    for states, name in (
        ((entry(A, State.DRAINING), entry(B)), "a"),
        ((entry(A, State.SUSPECT), entry(B)), "b"),
        ((entry(A, load=Load(0, 9, 0.0, 1)), entry(B, load=Load(0, 0, 0.0, 1))), "c"),
    ):
        await bench.view(*states)
        await bench.open(name)
        assert bench.where(name) == B


@pytest.mark.parametrize("asleep", [True, False])
async def test_a_suspect_that_waits_gets_a_replica_that_takes_requests_again(bench: Bench, asleep: bool) -> None:
    """It does not wait for the end of the trial on the other replica, which may take longer than it may wait."""
    await bench.view(entry(A), entry(B))
    bench.replica_connections.slept([B], asleep=True)
    await bench.open("a", "b", "c")
    bench.replica_connections.ended(A, "killed by signal 9", again=True)
    await bench.settle()
    bench.replica_connections.slept([B], asleep=asleep)
    await bench.view(entry(B, State.UP if asleep else State.SUSPECT))
    await bench.up(A)
    assert (bench.where("a"), bench.where("b"), bench.where("c")) == (B, A, None)
    await bench.orchestrator.abort(["a"])
    assert bench.where("c") is None
    bench.of(B).sent.clear()
    if asleep:
        bench.replica_connections.slept([B], asleep=False)
        await bench.settle()
    else:
        await bench.view(entry(B))
    assert bench.where("c") == B and bench.of(B).sent == ["c"]


async def test_a_replica_is_shown_as_sleeping_from_the_call_until_it_is_woken(bench: Bench) -> None:
    connections, asleep, awake = bench.replica_connections, Load(asleep=True), Load()

    def states() -> list[str]:
        return [connections.state(replica) for replica in (A, B)]

    connections.slept([A], asleep=True)
    assert states() == ["SLEEPING", "UP"] and bench.pool.is_asleep(A)
    await bench.view(entry(A, load=awake), entry(B, load=asleep))
    assert states() == ["SLEEPING", "SLEEPING"], "a paused one is known from its report"
    await bench.view(entry(A, State.SUSPECT, load=awake), entry(B, State.DRAINING, load=asleep))
    assert states() == ["SUSPECT", "DRAINING"]
    await bench.view(entry(A, load=asleep), entry(B, load=awake))
    connections.slept([A], asleep=False)
    assert states() == ["UP", "UP"], "its last report is older"
    await bench.view(entry(A, load=asleep), entry(B, load=Load(1, 0)))
    assert states() == ["UP", "UP"], "the same report, in a view that another replica has changed"
    await bench.view(entry(A, load=awake), entry(B, load=awake))
    await bench.view(entry(A, load=asleep), entry(B, load=awake))
    assert states() == ["SLEEPING", "UP"], "a later report counts"
    connections.slept([A], asleep=True)
    connections.ended(A, "killed", again=True)
    assert A not in connections._asleep, "its next process is awake"


async def test_the_next_process_is_awake_also_after_a_sleep_that_crosses_the_end(bench: Bench) -> None:
    connections = bench.replica_connections
    connections.ended(A, "gone", again=True)
    connections.slept([A], asleep=True)
    await bench.settle()
    await bench.up(A)
    await bench.settle()
    assert connections.state(A) == "UP" and not bench.pool.is_asleep(A)


@pytest.mark.parametrize("dropped", [True, False])
async def test_a_replica_that_is_put_to_sleep_while_it_is_connected_stays_asleep(bench: Bench, dropped: bool) -> None:
    connections, before = bench.replica_connections, bench.of(A)
    listeners: Any = None
    connections.ended(A, "gone", again=True)
    if dropped:
        await bench.settle()
    connections.ready(A, THERE, listeners)
    connections.slept([A], asleep=True)
    async with asyncio.timeout(30):
        while bench.of(A) is before or A not in bench.pool.replicas:
            await asyncio.sleep(0.001)
    await bench.settle()
    assert connections.state(A) == "SLEEPING" and bench.pool.is_asleep(A)


async def test_metrics_show_failovers_waiting_requests_restarts_and_heartbeats(bench: Bench) -> None:
    await bench.open("a", "b")
    bench.replica_connections.ended(A, "gone", again=True)
    await bench.settle()
    assert bench.shown(m.REQUEST_FAILOVERS, stage="text") == 1
    bench.replica_connections.ended(B, "gone", again=True)
    await bench.settle()
    assert bench.shown(m.REQUEST_FAILOVERS, stage="text") == 2, "a request that both replicas had fails"
    assert bench.shown(m.REQUESTS_WAITING, stage="text") == 1
    await bench.up(A, ReplicaInfo(host="here", pid=9, restarts=4))
    assert bench.shown(m.REQUESTS_WAITING, stage="text") == 0
    assert bench.shown(m.REPLICA_RESTARTS, stage="text", replica="text/0") == 4
    assert bench.shown(m.REPLICA_RESTARTS, stage="text", replica="text/1") == 0
    assert bench.shown(m.ROUTING_DECISIONS, stage="text", replica="text/0", reason="policy") == 1
    assert bench.shown(m.ROUTING_DECISIONS, stage="text", replica="text/0", reason="only") == 1
    before = time.time()
    await bench.view(entry(A))
    heard, seen = bench.shown(m.REPLICA_HEARTBEAT, stage="text", replica="text/0"), bench.shown(m.COORDINATOR_VIEW)
    assert heard is not None and seen is not None and before <= min(heard, seen)
    await bench.view(entry(A))
    assert bench.shown(m.REPLICA_HEARTBEAT, stage="text", replica="text/0") == heard, "nothing new was said"


@pytest.mark.parametrize(
    ("settings", "at_start", "then"),
    [
        ({}, [3, 3, 2], [4, 3, 2]),
        ({"client_index": 1}, [None] * 3, [None] * 3),
        ({"ready_responses": {}, "shared": {}}, [3, 3, 2], [4, 3, 2]),
        ({"ready_responses": {}, "shared": {("text", "text/0"): 1.0, ("text", "text/1"): 2.0}}, [2, 1, 2], [3, 1, 2]),
    ],
    ids=["first", "second", "replaces one whose counts are lost", "replaces one that has counted"],
)
async def test_one_api_server_counts_each_restart_once(
    settings: dict[str, Any], at_start: list[int | None], then: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of several API servers are summed, also those of API servers that have died."""
    monkeypatch.setattr(replica_connections_module, "Watcher", Views)
    if (shared := settings.pop("shared", None)) is not None:
        monkeypatch.setattr(Metrics, "shared_counts", lambda self, counter: shared)
    bench = Bench(about=replace(HERE, restarts=3), restarts={A: 3, B: 3, FAR: 2}, **settings)

    def counts() -> list[float | None]:
        return [bench.shown(m.REPLICA_RESTARTS, stage="text", replica=f"text/{index}") for index in range(3)]

    assert counts() == at_start
    for restarts in (4, 4, 2):  # it never falls
        await bench.up(A, replace(HERE, restarts=restarts))
    assert counts() == then
    bench.replica_connections.close()
