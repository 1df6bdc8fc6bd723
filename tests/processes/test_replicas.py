"""Two replicas a stage answer as one would, whichever of them a request is sent to, under each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.processes.test_parity import CASES, answer, check
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.policies import POLICIES, LeastQueueLength, Policy, Random, RoundRobin, policy

pytestmark = pytest.mark.engine

STAGES = ("thinker", "talker", "code2wav")
ALL = {ReplicaId(stage, index) for stage in STAGES for index in range(2)}
HALF = len(CASES) // 2


class Counting:
    """A policy that counts what it has picked."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.picked: Counter[ReplicaId] = Counter()

    def pick(self, load: Mapping[ReplicaId, float]) -> ReplicaId:
        replica = self._inner.pick(load)
        self.picked[replica] += 1
        return replica


def test_each_stage_has_the_policy_it_was_given(twofold: Any) -> None:
    pools = twofold._omni.orchestrator.pools
    kinds = {stage: type(pools[stage]._policy) for stage in STAGES}
    assert kinds == {"thinker": LeastQueueLength, "talker": RoundRobin, "code2wav": Random}


@pytest.fixture(params=POLICIES)
def counted(request: pytest.FixtureRequest, twofold: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counting]]:
    """All stages under one policy."""
    counting = []
    for pool in twofold._omni.orchestrator.pools.values():
        counting.append(Counting(policy(request.param)))
        monkeypatch.setattr(pool, "_policy", counting[-1])
    yield counting


def test_parity(counted: list[Counting], twofold: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    """Every case by itself, then all at once."""
    names = list(CASES)
    for group in ([name] for name in names):
        for name, output in zip(group, answer(twofold, oracle, group), strict=True):
            check(output, expected[name])
    for name, output in zip(names, answer(twofold, oracle, names), strict=True):
        check(output, expected[name])
    picked = sum((each.picked for each in counted), Counter[ReplicaId]())
    assert set(picked) == ALL
    spoken = sum(1 for golden in expected.values() if len(golden.frames))
    totals = Counter(replica.stage for replica in picked.elements())
    assert totals["talker"] >= totals["code2wav"] == 2 * spoken
    assert twofold._omni.orchestrator.held() == 0


def test_every_policy_is_tested() -> None:
    assert set(POLICIES) == {"random", "round-robin", "least-queue-length"}
