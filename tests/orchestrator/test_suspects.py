"""A request that ends the process of each replica that runs it fails alone, and no other request fails."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.examples import seeds
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import MOST_LOSSES, TRIAL_OUTPUTS, Settings
from vllm_omni_ext.plugins.flow import Action, Emit, Open, Produced, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool

STAGE = "dit"
REPLICAS = [ReplicaId(STAGE, index) for index in range(2)]
PICTURE = ImageChunk(pixels=np.zeros((1, 1, 3), np.uint8))
OUTPUTS = 6
"""Outputs of each request."""


class Draw:
    """A flow with one stage, which sends `OUTPUTS` outputs."""

    stages = frozenset({STAGE})
    outputs = frozenset({"image"})

    def __init__(self, action: Action | None = None) -> None:
        self._action = Submit(stage=STAGE) if action is None else action

    def begin(self) -> list[Action]:
        return [self._action]

    def handle(self, event: Produced) -> list[Action]:
        return [] if event.finish is None else [Emit(PICTURE)]

    def replay(self, stage: str) -> list[Action]:
        return self.begin()


class Cluster:
    """Replicas, and the machines of the API servers that use them.

    Args:
        fatal: number of outputs after which a request ends its replica's process, by request id.
    """

    def __init__(self, seed: int, *, servers: int, fatal: dict[str, int]) -> None:
        self.chance, self.fatal = random.Random(seed), fatal
        self.failed: dict[str, OmniError] = {}
        self.ended: set[str] = set()
        self.losses = 0
        self._jobs: dict[ReplicaId, dict[tuple[int, str], int]] = {replica: {} for replica in REPLICAS}
        self._down: dict[ReplicaId, int] = {}
        pools = [{STAGE: StagePool(STAGE, REPLICAS, clients=servers)} for _ in range(servers)]
        self.machines = [
            RequestMachine(Settings(frontend="ar", wait_s=60.0, client=index, clients=servers), pool)
            for index, pool in enumerate(pools)
        ]

    def open(self, request_id: str) -> None:
        options = RequestOptions(modalities=("image",))
        which = self.chance.randrange(len(self.machines))
        self._handle(which, m.Opened(request_id=request_id, external_id=request_id, flow=Draw(), options=options))

    def run(self) -> None:
        """Let the replicas work until each request has ended."""
        for _ in range(10_000):
            if not any(machine.held() for machine in self.machines) and not self._down:
                return
            self._step(self.chance.choice(REPLICAS))
        raise AssertionError("requests are left")

    def _step(self, replica: ReplicaId) -> None:
        if replica in self._down:
            self._down[replica] -= 1
            if not self._down[replica]:
                del self._down[replica]
                self._tell(m.ReplicaUp(replica))
            return
        for (which, engine_id), done in list(self._jobs[replica].items()):
            request_id = engine_id.partition("/")[0]
            if self.fatal.get(request_id) == done:
                self.losses += 1
                self._jobs[replica].clear()
                self._down[replica] = self.chance.randrange(1, 30)
                self._tell(m.ReplicaAnnounced(replica))
                self._tell(m.ReplicaLost(replica, "its process was killed"))
                return
            finish: Any = "stop" if done + 1 == OUTPUTS else None
            if finish:
                del self._jobs[replica][which, engine_id]
                self.ended.add(request_id)
            else:
                self._jobs[replica][which, engine_id] = done + 1
            self._handle(which, m.Output(replica=replica, engine_id=engine_id, payload=done, finish=finish))

    def hang(self, request_id: str) -> bool:
        """The replica that runs a request stops answering, ends later and is up again; False: no replica runs it."""
        for replica, jobs in self._jobs.items():
            if any(engine_id.partition("/")[0] == request_id for _, engine_id in jobs):
                self._jobs[replica].clear()
                self._tell(m.ReplicaAnnounced(replica))
                self._tell(m.ReplicaLost(replica, "it does not answer", ended=False))
                self._tell(m.ReplicaEnded(replica, "its process was killed"))
                self._tell(m.ReplicaUp(replica))
                return True
        return False

    def _tell(self, event: m.Event) -> None:
        for which in self.chance.sample(range(len(self.machines)), len(self.machines)):
            self._handle(which, event)

    def _handle(self, which: int, event: m.Event) -> None:
        machine = self.machines[which]
        for effect in machine.handle(event):
            if isinstance(effect, m.SendPart):
                self._jobs[effect.replica][which, effect.engine_id] = 0
            elif isinstance(effect, m.FailRequest):
                self.failed[effect.request_id] = effect.error
            elif isinstance(effect, m.AbortEngineRequests):
                for engine_id in effect.engine_ids:
                    self._jobs[effect.replica].pop((which, engine_id), None)
        machine.check()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("after", [0, TRIAL_OUTPUTS - 1, TRIAL_OUTPUTS, OUTPUTS - 1])
@pytest.mark.parametrize("seed", seeds(12))
def test_a_request_that_ends_its_replicas_fails_alone(seed: int, after: int, servers: int) -> None:
    cluster = Cluster(seed, servers=servers, fatal={"r5": after})
    for number in range(17):
        cluster.open(f"r{number}")
    cluster.run()
    assert set(cluster.failed) == {"r5"}
    assert isinstance(cluster.failed["r5"], RequestFailed) and "stage 'dit' has lost" in str(cluster.failed["r5"])
    assert cluster.ended == {f"r{number}" for number in range(17)} - {"r5"}
    assert 2 <= cluster.losses <= MOST_LOSSES


@pytest.mark.parametrize("seed", seeds(12))
def test_several_fatal_requests_fail_and_few_others(seed: int) -> None:
    """A suspect on trial also fails if another request ends its replica for the first time."""
    cluster = Cluster(seed, servers=1, fatal={"r1": 1, "r4": 0, "r9": 2})
    for number in range(12):
        cluster.open(f"r{number}")
    cluster.run()
    assert {"r1", "r4", "r9"} <= set(cluster.failed) and len(cluster.failed) <= 2 * 3
    assert cluster.ended == {f"r{number}" for number in range(12)} - set(cluster.failed)


def test_a_replica_has_one_suspect_at_a_time() -> None:
    machine = RequestMachine(Settings(frontend="ar", wait_s=60.0), {STAGE: StagePool(STAGE, REPLICAS[:1])})
    options = RequestOptions(modalities=("image",))
    for name in "abc":
        machine.handle(m.Opened(request_id=name, external_id=name, flow=Draw(), options=options))
    machine.handle(m.ReplicaAnnounced(REPLICAS[0]))
    machine.handle(m.ReplicaLost(REPLICAS[0], "its process was killed"))

    def sent(event: m.Event) -> list[str]:
        return [effect.request_id for effect in machine.handle(event) if isinstance(effect, m.SendPart)]

    assert sent(m.ReplicaUp(REPLICAS[0])) == ["a"]
    (engine_id,) = machine.placement.routes[REPLICAS[0]]
    progress = m.Output(replica=REPLICAS[0], engine_id=engine_id, payload=0)
    assert [sent(progress) for _ in range(TRIAL_OUTPUTS)] == [[]] * (TRIAL_OUTPUTS - 1) + [["b"]]
    assert sent(m.Aborted("b")) == ["c"]
    assert sent(m.Opened(request_id="d", external_id="d", flow=Draw(), options=options)) == ["d"]


def test_a_replica_that_takes_another_suspect_prolongs_no_wait() -> None:
    machine = RequestMachine(Settings(frontend="ar", wait_s=10.0), {STAGE: StagePool(STAGE, REPLICAS[:1])})
    options = RequestOptions(modalities=("image",))
    for name in "ab":
        machine.handle(m.Opened(request_id=name, external_id=name, flow=Draw(), options=options))
    machine.handle(m.ReplicaAnnounced(REPLICAS[0]))
    machine.handle(m.ReplicaLost(REPLICAS[0], "its process was killed"), 1.0)
    machine.handle(m.ReplicaUp(REPLICAS[0]), 9.0)
    machine.check()
    (failed,) = machine.handle(m.DeadlinePassed(), 11.0)
    assert isinstance(failed, m.FailRequest) and failed.request_id == "b"


def test_a_replica_that_does_not_answer_makes_no_suspects() -> None:
    machine = RequestMachine(Settings(frontend="ar", wait_s=60.0), {STAGE: StagePool(STAGE, REPLICAS)})
    options = RequestOptions(modalities=("image",))
    for name in "ab":
        machine.handle(m.Opened(request_id=name, external_id=name, flow=Draw(), options=options))
    for replica in REPLICAS:
        machine.handle(m.ReplicaAnnounced(replica))
        assert not any(
            isinstance(effect, m.FailRequest)
            for effect in machine.handle(m.ReplicaLost(replica, "silent", ended=False))
        )
    sent = [effect for effect in machine.handle(m.ReplicaUp(REPLICAS[0])) if isinstance(effect, m.SendPart)]
    assert {effect.request_id for effect in sent} == {"a", "b"}


@pytest.mark.parametrize(
    ("action", "tokens"),
    [
        (Open(stage=STAGE, prompt=[0] * 8), 9),
        (Submit(stage=STAGE, prompt=[0] * 8), 9),
        (Submit(stage=STAGE, prompt=[0] * 9, pooling_task="encode"), 9),
    ],
)
def test_input_beyond_the_limit_of_a_stage_is_refused_before_it_is_sent(action: Action, tokens: int) -> None:
    for limit in (tokens, tokens - 1):
        settings = Settings(frontend="ar", limits={STAGE: limit})
        machine = RequestMachine(settings, {STAGE: StagePool(STAGE, REPLICAS)})
        options = RequestOptions(modalities=("image",))
        effects = machine.handle(m.Opened(request_id="r", external_id="r", flow=Draw(action), options=options))
        errors = [effect.error for effect in effects if isinstance(effect, m.FailRequest)]
        assert any(isinstance(effect, m.Send) for effect in effects) == (limit == tokens)
        assert [type(error) for error in errors] == [RequestError] * (limit < tokens)
        assert all(f"have {tokens} tokens" in str(error) for error in errors)


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("servers", [1, 2])
def test_a_request_that_hangs_one_replica_after_the_other_fails_alone(seed: int, servers: int) -> None:
    cluster = Cluster(seed, servers=servers, fatal={})
    for number in range(8):
        cluster.open(f"r{number}")
    hangs = 0
    while cluster.hang("r0"):
        hangs += 1
        assert hangs <= MOST_LOSSES, "it is sent to one replica after the other"
    assert hangs == MOST_LOSSES
    cluster.run()
    assert cluster.failed.keys() == {"r0"}
    assert "has lost 3 replicas that had this request" in str(cluster.failed["r0"])


def test_a_replica_that_answers_again_was_not_ended_by_a_request() -> None:
    cluster = Cluster(0, servers=1, fatal={})
    cluster.open("r0")
    for _ in range(2 * MOST_LOSSES):
        (replica,) = (each for each, jobs in cluster._jobs.items() if jobs)
        cluster._jobs[replica].clear()
        cluster._tell(m.ReplicaAnnounced(replica))
        cluster._tell(m.ReplicaLost(replica, "it does not answer", ended=False))
        cluster._tell(m.ReplicaUp(replica))
        cluster._tell(m.ReplicaEnded(replica, "late"))
    cluster.run()
    assert cluster.failed == {} and cluster.ended == {"r0"}
