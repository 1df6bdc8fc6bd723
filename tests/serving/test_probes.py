"""`/health/live`, `/health/ready` and `/health/startup` in every state of a deployment, on the real application."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import StageConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.serving.probes import COORDINATOR_LOST_S, LIVE, READY, STARTED, Progress

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT, SOUND = {"thinker"}, {"thinker", "talker", "code2wav"}


class Deployment:
    """The application, stages that go up and down, and a clock and a coordinator that are set."""

    def __init__(self, app: Any, omni: Any) -> None:
        self._app, self._omni = app, omni
        self.now = 0.0
        self.view_age = 0.0
        app.state.progress = Progress(lambda: self.now)
        omni.replica_connections = SimpleNamespace(watcher=SimpleNamespace(age=lambda: self.view_age))
        self.up()

    def up(self, *stages: str) -> None:
        """Let these stages alone have a live replica, those that are named twice two."""
        pools: Any = defaultdict(lambda: SimpleNamespace(replicas=()))
        for name, count in Counter(stages).items():
            pools[name].replicas = tuple(ReplicaId(name, each) for each in range(count))
        self._omni.orchestrator = SimpleNamespace(pools=pools)

    async def ask(self, path: str, method: str = "GET") -> httpx.Response:
        transport = httpx.ASGITransport(app=self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
            return await asking.request(method, path)

    async def states(self) -> tuple[bool, bool, bool]:
        """Whether the deployment is live, is ready and has started."""
        answers = [await self.ask(path) for path in (LIVE, READY, STARTED)]
        assert all(answer.status_code in (200, 503) for answer in answers)
        live, ready, started = (answer.status_code == 200 for answer in answers)
        return live, ready, started


@pytest.fixture
def deployment(app: Any, engine: ScriptedOmni) -> Iterator[Deployment]:
    omni: Any = engine
    assert {frozenset(needed) for needed in omni.capabilities.routes.values()} >= {frozenset(TEXT), frozenset(SOUND)}
    before = app.state.progress
    yield Deployment(app, omni)
    app.state.progress = before
    for name in ("replica_connections", "orchestrator", "errored", "draining"):
        vars(omni).pop(name, None)


async def test_the_course_of_a_deployment(deployment: Deployment) -> None:
    courses = []
    for stages in ((), TEXT, SOUND, TEXT, ()):
        deployment.up(*stages)
        courses.append(await deployment.states())
    assert courses == [
        (True, False, False),  # nothing is up yet
        (True, False, False),  # text alone can be served
        (True, True, True),  # everything
        (True, False, True),  # a stage is lost: it has been up
        (True, False, True),  # all are: a restart would help nobody
    ]


async def test_stages_count_as_started_one_after_the_other(deployment: Deployment) -> None:
    for stage in sorted(SOUND):
        assert not (await deployment.states())[2]
        deployment.up(stage)
        await deployment.ask(READY)  # the readiness probe notices too
        deployment.up()
    assert (await deployment.states())[2]


async def test_what_is_missing_is_named(deployment: Deployment) -> None:
    deployment.up("code2wav")
    ready, started = await deployment.ask(READY), await deployment.ask(STARTED)
    reasons = ready.json()["reason"].split("; ")
    assert sorted(reasons) == [f"stage '{name}' has no live replica" for name in ("talker", "thinker")]
    waiting = "stage 'thinker' has not been up yet; stage 'talker' has not been up yet"
    assert started.json() == {"status": "failed", "reason": waiting}
    deployment.up(*SOUND)
    assert (await deployment.ask(READY)).json() == {"status": "ok"}


async def test_readiness_for_one_kind_of_requests(deployment: Deployment, engine: Any) -> None:
    kinds = {frozenset(needed): kind for kind, needed in engine.capabilities.routes.items()}
    deployment.up(*TEXT)
    assert (await deployment.ask(f"{READY}?kind={kinds[frozenset(TEXT)]}")).status_code == 200
    refused = await deployment.ask(f"{READY}?kind={kinds[frozenset(SOUND)]}")
    assert (refused.status_code, "talker" in refused.json()["reason"]) == (503, True)
    unknown = await deployment.ask(f"{READY}?kind=smell")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "kind")


async def test_a_silent_coordinator_ends_the_server_only_when_nobody_replaces_it(deployment: Deployment) -> None:
    deployment.up(*SOUND)
    deployment.now = 10 * COORDINATOR_LOST_S
    live = {}
    for age in (0.0, COORDINATOR_LOST_S, COORDINATOR_LOST_S + 1):
        deployment.view_age = age
        live[age] = await deployment.states()
    assert [state[0] for state in live.values()] == [True, True, False]
    assert all(state[1:] == (True, True) for state in live.values()), "the last view is still used"
    assert (await deployment.ask(LIVE)).json()["reason"] == "the coordinator has been silent for 301 s"


async def test_a_server_that_has_just_started_waits_for_the_first_view(deployment: Deployment) -> None:
    deployment.view_age = math.inf
    assert (await deployment.ask(LIVE)).status_code == 200
    deployment.now = COORDINATOR_LOST_S + 1
    assert (await deployment.ask(LIVE)).status_code == 503


async def test_a_deployment_without_a_coordinator_is_live(deployment: Deployment, engine: Any) -> None:
    engine.replica_connections = SimpleNamespace(watcher=None)
    deployment.now = 10 * COORDINATOR_LOST_S
    assert (await deployment.ask(LIVE)).status_code == 200


async def test_a_failed_engine_client(deployment: Deployment, engine: Any) -> None:
    deployment.up(*SOUND)
    engine.errored = True
    assert await deployment.states() == (False, False, True)


async def test_a_server_that_drains_gets_nothing_new_and_is_left_alone(deployment: Deployment, engine: Any) -> None:
    deployment.up(*SOUND)
    engine.draining, deployment.now, deployment.view_age = True, 10 * COORDINATOR_LOST_S, math.inf
    assert await deployment.states() == (True, False, True)
    assert (await deployment.ask(READY)).json()["reason"] == "the server is shutting down"


@pytest.mark.parametrize("path", [LIVE, READY, STARTED])
async def test_head_requests(deployment: Deployment, path: str) -> None:
    deployment.up(*SOUND)
    answer = await deployment.ask(path, "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_stock_health_keeps_its_meaning(deployment: Deployment, engine: Any) -> None:
    engine.replica_connections.replica_names = lambda stage: []
    for stages, code in ((TEXT, 503), (SOUND, 200)):
        deployment.up(*stages)
        assert [(await deployment.ask(path)).status_code for path in ("/health", READY)] == [code] * 2


async def test_a_stage_that_needs_several_replicas(
    deployment: Deployment, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.replica_connections.replica_names = lambda stage: []
    needs_two = {**engine.plan.config.stages, "talker": StageConfig(min_replicas=2)}
    monkeypatch.setattr(engine, "plan", replace(engine.plan, config=replace(engine.plan.config, stages=needs_two)))
    deployment.up(*SOUND)
    assert await deployment.states() == (True, False, False)
    for path in (READY, "/health"):
        answer = await deployment.ask(path)
        assert (answer.status_code, answer.json()["reason"]) == (503, "stage 'talker' has 1 of the 2 replicas it needs")
    assert (await deployment.ask("/health")).json()["requests"]["audio"] == "UP", "one replica serves requests"
    kinds = {frozenset(needed): kind for kind, needed in engine.capabilities.routes.items()}
    assert (await deployment.ask(f"{READY}?kind={kinds[frozenset(TEXT)]}")).status_code == 200
    deployment.up(*SOUND, "talker")
    assert await deployment.states() == (True, True, True)
    deployment.up(*SOUND)
    assert await deployment.states() == (True, False, True)
