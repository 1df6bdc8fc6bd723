"""Replicas of a deployment that share a device are started one after the other; the device's memory is a fake.

A replica measures its memory as vLLM's worker does: free memory when it begins minus free memory when it is ready.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.config.schema import OmniConfig, StageConfig, Timeouts
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.runtime.client.replica_connections import AFTER_THE_LAUNCHER_S, connect_limit_s
from vllm_omni_ext.runtime.launch import launcher
from vllm_omni_ext.runtime.launch.launcher import NOT_STARTED, Deployment, StartFailed
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan

GIB = 1 << 30
PATIENCE_S = 30.0
TAKES_GIB = {"thinker": 40, "talker": 10, "code2wav": 2}
THINKER, TALKER, CODE2WAV = (ReplicaId(stage, 0) for stage in TAKES_GIB)


def plan_on(devices: int, stages: dict[str, dict[str, Any]], **config: Any) -> Plan:
    """Qwen3-Omni on a machine with so many devices."""
    configured = {name: StageConfig(**values) for name, values in stages.items()}
    return make_plan(
        model="m",
        pipeline=QWEN3_OMNI,
        config=OmniConfig(stages=configured, verbose=True, **config),
        text_args={},
        machine=Machine(platform="cuda", device_count=devices, cpu_count=8, memory_bytes=64 * GIB),
    )


class Process:
    """The process of a fake engine; it ends with `kill`, or with an exit code."""

    _pids = itertools.count(1000)

    def __init__(self) -> None:
        self.pid = next(self._pids)
        self.exitcode: int | None = None
        self.ended = threading.Event()
        self.sentinel, self._alive = Pipe(duplex=False)

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def end(self, exitcode: int) -> None:
        if not self.ended.is_set():
            self.exitcode = exitcode
            self.ended.set()
            self._alive.close()

    def kill(self) -> None:
        self.end(-9)

    terminate = kill

    def join(self, timeout: float | None = None) -> None:
        assert self.ended.is_set(), "a process is joined that does not end"


@dataclass
class Host:
    """Devices with their used memory; `events` has every start and every readiness, in order."""

    plan: Plan
    used_gib: Counter[int] = field(default_factory=Counter)
    measured: dict[ReplicaId, dict[int, int]] = field(default_factory=dict)
    events: list[tuple[str, ReplicaId]] = field(default_factory=list)
    at_start: Callable[[ReplicaId], Any] = lambda replica: None
    before_ready: Callable[[ReplicaId], Any] = lambda replica: None
    after_ready: dict[ReplicaId, threading.Event] = field(default_factory=dict)
    processes: dict[ReplicaId, Process] = field(default_factory=dict)

    @contextlib.contextmanager
    def launch(self, replica: ReplicaId, *_: Any) -> Iterator[Any]:
        """As `launch_core_engines`: starts a process; leaving the block waits until it is ready."""
        self.events.append(("started", replica))
        self.at_start(replica)
        devices, process = self.plan.replica(replica).devices, Process()
        self.processes[replica] = process
        free_before = {device: -self.used_gib[device] for device in devices}
        for device in devices:  # weights
            self.used_gib[device] += TAKES_GIB[replica.stage]
        yield SimpleNamespace(engine_manager=SimpleNamespace(processes=[process], shutdown=lambda timeout: None))
        self.before_ready(replica)
        if process.ended.is_set():
            raise RuntimeError("Engine core initialization failed")
        self.measured[replica] = {device: free_before[device] + self.used_gib[device] for device in devices}
        self.events.append(("ready", replica))
        if (ready := self.after_ready.get(replica)) is not None:
            ready.set()


class Started(Deployment):
    """A deployment with the engines of a host, without sockets and configs."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.plan, clients=1, usage=UsageContext.OPENAI_API_SERVER)

    def listen(self, replica: ReplicaId, host: str | None = None) -> Sequence[tuple[str, str]]:
        return [("in", "out")]

    def _config(self, replica: ReplicaId) -> Any:
        self.configs[replica.stage] = None  # type: ignore[assignment]
        return replica


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], contextlib.AbstractContextManager[Started]]:
    """Enter a deployment on a host."""

    def made(host: Host) -> Started:
        monkeypatch.setattr(launcher, "launch_core_engines", host.launch)
        monkeypatch.setattr(launcher.Executor, "get_class", lambda config: object)
        return Started(host)

    return made


LAYOUTS = [
    (1, {}),
    (2, {}),
    (3, {}),
    (2, {"talker": {"replicas": 2}}),
    (2, {"thinker": {"devices": "0,1", "engine": {"tensor_parallel_size": 2}}, "talker": {"devices": "0"}}),
    (1, {stage: {"replicas": 2} for stage in TAKES_GIB}),
]


@pytest.mark.parametrize(("devices", "stages"), LAYOUTS)
def test_replicas_of_one_device_load_one_after_the_other(start: Any, devices: int, stages: Any) -> None:
    host = Host(plan_on(devices, stages))
    with start(host) as deployment:
        deployment.wait()
        assert set(deployment.processes()) == {replica.id for replica in host.plan.replicas()}
    expected = {
        replica.id: dict.fromkeys(replica.devices, TAKES_GIB[replica.id.stage]) for replica in host.plan.replicas()
    }
    assert host.measured == expected


def test_the_largest_replica_of_a_device_starts_first_and_all_are_listed_from_the_start(start: Any) -> None:
    host = Host(plan_on(1, {}))
    with start(host) as deployment:
        before = deployment.about()
        assert set(before) == {THINKER, TALKER, CODE2WAV}
        assert before[THINKER].pid != NOT_STARTED and before[TALKER].pid == before[CODE2WAV].pid == NOT_STARTED
        deployment.wait()
        assert {r: a.pid for r, a in deployment.about().items()} == {r: p.pid for r, p in host.processes.items()}
    assert host.events == [(what, replica) for replica in (THINKER, TALKER, CODE2WAV) for what in ("started", "ready")]


def test_devices_do_not_wait_for_each_other(start: Any) -> None:
    """The thinker is not ready before the two on the other device are."""
    host, others = Host(plan_on(2, {})), threading.Event()

    def before_ready(replica: ReplicaId) -> None:
        if replica == CODE2WAV:
            others.set()
        elif replica == THINKER:
            assert others.wait(PATIENCE_S), "the other device has waited"

    host.before_ready = before_ready
    with start(host) as deployment:
        deployment.wait()
    assert host.events.index(("ready", TALKER)) < host.events.index(("started", CODE2WAV))
    assert host.events.index(("started", CODE2WAV)) < host.events.index(("ready", THINKER))


@pytest.mark.parametrize("killed", [False, True])
def test_each_replica_has_its_own_startup_timeout_and_a_failure_ends_the_start(
    start: Any, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Two starts, each of which takes most of the limit, are in time; one that takes more than it is late."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock.now)
    host = Host(plan_on(1, {}, timeouts=Timeouts(startup_timeout_s=60.0)))

    def at_start(replica: ReplicaId) -> None:
        clock.now += 100 if replica == CODE2WAV else 50

    def before_ready(replica: ReplicaId) -> None:
        if replica == TALKER and killed:
            host.processes[replica].kill()
        elif replica == CODE2WAV:
            host.processes[replica].ended.wait(PATIENCE_S)

    host.at_start, host.before_ready = at_start, before_ready
    message = "talker/0 did not start" if killed else r"code2wav/0 did not start: it was not ready after 60 s"
    with start(host) as deployment, pytest.raises(StartFailed, match=message):
        deployment.wait()
    assert [replica for what, replica in host.events if what == "ready"] == [THINKER, TALKER][: 1 if killed else 2]
    assert killed is (("started", CODE2WAV) not in host.events)
    assert connect_limit_s(host.plan) == 60 * 3 + AFTER_THE_LAUNCHER_S, "API servers wait for all starts"


@pytest.mark.parametrize(("devices", "lost"), [(3, CODE2WAV), (2, TALKER), (1, THINKER)])
def test_a_replica_that_ends_after_it_was_ready_ends_the_start(start: Any, devices: int, lost: ReplicaId) -> None:
    """On one device the replica that ends is the first; the next one of the device is loading."""
    loading, ready = TALKER if lost == THINKER else THINKER, threading.Event()
    host = Host(plan_on(devices, {}), after_ready={lost: ready})

    def before_ready(replica: ReplicaId) -> None:
        if replica == loading:
            assert ready.wait(PATIENCE_S)
            host.processes[lost].end(3)
            host.processes[replica].ended.wait(PATIENCE_S)

    host.before_ready = before_ready
    message = f"^{lost} ended during the start: its process ended with exit code 3; see its log"
    with start(host) as deployment, pytest.raises(StartFailed, match=message):
        deployment.wait()
    assert ("ready", loading) not in host.events
