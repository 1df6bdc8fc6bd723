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

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import StageConfig
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.serving.health import COORDINATOR_LOST_S, LIVE, READY, STARTED, Progress

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT, SOUND = {"thinker"}, {"thinker", "talker", "code2wav"}


class Deployment:
    """The application, stages that go up and down, and a clock and a coordinator that are set."""

    def __init__(self, app: Any, omni: Any) -> None:
        self._app, self._omni = app, omni
        self.now = 0.0
        self.view_age = 0.0
        self.given_up: str | None = None
        app.state.progress = Progress(lambda: self.now)
        omni.replica_connections = SimpleNamespace(watcher=SimpleNamespace(age=lambda: self.view_age))
        self.up()

    def up(self, *stages: str) -> None:
        """Give these stages a live replica each time they are named, and the others none."""
        pools: Any = defaultdict(lambda: SimpleNamespace(replicas=()))
        for name, count in Counter(stages).items():
            pools[name].replicas = tuple(ReplicaId(name, each) for each in range(count))
        self._omni.orchestrator = SimpleNamespace(pools=pools, unavailable=lambda needed: self.given_up)

    async def ask(self, path: str, method: str = "GET") -> httpx.Response:
        async with asking(self._app) as client:
            return await client.request(method, path)

    async def states(self) -> tuple[bool, bool, bool]:
        """Return whether the deployment is live, is ready and has started."""
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


async def test_probes_follow_the_stages_that_are_up(deployment: Deployment, engine: Any) -> None:
    courses = []
    for stages in ((), {"talker"}, TEXT, SOUND, TEXT, ()):
        deployment.up(*stages)
        courses.append(await deployment.states())
    assert courses == [
        (True, False, False),
        (True, False, False),
        (True, False, False),  # text alone can be served
        (True, True, True),
        (True, False, True),  # a stage is lost: it has been up
        (True, False, True),
    ]
    deployment.up(*SOUND)
    answers = [await deployment.ask(path, "HEAD") for path in (LIVE, READY, STARTED)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 3
    engine.errored = True
    assert await deployment.states() == (False, False, True)


async def test_stages_that_were_up_one_after_the_other_have_started(deployment: Deployment) -> None:
    for stage in sorted(SOUND):
        assert not (await deployment.states())[2]
        deployment.up(stage)
        await deployment.ask(READY)  # the readiness probe counts, too
        deployment.up()
    assert (await deployment.states())[2]


async def test_missing_stages_are_named(deployment: Deployment) -> None:
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
    ready, refused, unknown = [
        await deployment.ask(f"{READY}?kind={kind}") for kind in (kinds[frozenset(TEXT)], kinds[frozenset(SOUND)], "x")
    ]
    assert ready.status_code == 200
    assert refused.status_code == 503 and "talker" in refused.json()["reason"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "kind")


@pytest.mark.parametrize(
    ("running", "view_age", "live"),
    [
        (10 * COORDINATOR_LOST_S, 0.0, True),
        (10 * COORDINATOR_LOST_S, COORDINATOR_LOST_S, True),
        (10 * COORDINATOR_LOST_S, COORDINATOR_LOST_S + 1, False),
        (0.0, math.inf, True),  # the server has just started
        (COORDINATOR_LOST_S + 1, math.inf, False),
        (10 * COORDINATOR_LOST_S, None, True),  # there is no coordinator
    ],
)
async def test_a_server_is_not_live_when_the_coordinator_is_silent_for_long(
    deployment: Deployment, engine: Any, running: float, view_age: float | None, live: bool
) -> None:
    deployment.up(*SOUND)
    deployment.now = running
    if view_age is None:
        engine.replica_connections = SimpleNamespace(watcher=None)
    else:
        deployment.view_age = view_age
    assert await deployment.states() == (live, True, True), "the last view is still used"
    assert live or (await deployment.ask(LIVE)).json()["reason"] == "the coordinator has been silent for 301 s"


async def test_a_draining_server_is_live_and_not_ready(deployment: Deployment, engine: Any) -> None:
    deployment.up(*SOUND)
    engine.draining, deployment.now, deployment.view_age = True, 10 * COORDINATOR_LOST_S, math.inf
    assert await deployment.states() == (True, False, True)
    engine.replica_connections.replica_names = lambda stage: []
    for path in (READY, "/health"):
        answer = await deployment.ask(path)
        assert (answer.status_code, answer.json()["reason"]) == (503, "the server is shutting down")


async def test_a_stage_that_was_given_up_ends_the_server(deployment: Deployment) -> None:
    deployment.up(*TEXT)
    assert (await deployment.ask(LIVE)).status_code == 200
    deployment.given_up = "talker"
    answer = await deployment.ask(LIVE)
    assert answer.status_code == 503
    assert answer.json()["reason"] == "stage 'talker' has no replica, and none is started again (restart_limit)"


async def test_a_stage_is_ready_with_its_min_replicas(
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
