"""Replicas die, freeze and come back at every step of a request; its answer is the undisturbed one, or an error."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.examples import seeds
from tests.support.simulation import (
    AHEAD,
    STAGES,
    STEPS,
    TOKENS,
    Speech,
    World,
    any_course_of_events,
    down_from_any_step_to_any_other,
    spoken,
    text_of,
)
from vllm_omni_ext.errors import RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("stage", STAGES)
async def test_no_answer_changes_while_a_stage_is_down(stage: str, how: str, others: int) -> None:
    await down_from_any_step_to_any_other(stage, how, STEPS, **{stage: 1 + others})


@pytest.mark.parametrize("seed", seeds(150))
async def test_no_answer_changes_in_any_course_of_events(seed: int) -> None:
    await any_course_of_events(seed, *STAGES)


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("stage", STAGES)
async def test_requests_fail_when_a_stage_stays_down_beyond_the_limit(stage: str, at: int) -> None:
    world = World()
    await world.start("a")
    await world.rounds(at)
    world.kill(ReplicaId(stage, 0))
    await world.run()
    waits = len(world.orchestrator.machine.placement.waiting)
    await world.expire()
    if waits:
        assert isinstance(world.failures["a"], StageUnavailable)
        assert f"stage '{stage}'" in str(world.failures["a"]) and "replica_wait_timeout_s" in str(world.failures["a"])
        assert world.answers("a")[-1] is world.failures["a"]
    else:  # the request had finished with the stage
        world.check("a")
    await world.end()


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("stage", STAGES)
async def test_requests_fail_at_once_when_a_replica_will_not_start(stage: str, at: int) -> None:
    """Requests that have finished with the stage continue."""
    world = World()
    for name in "ab":
        await world.start(name, sound=name == "a")
    await world.rounds(at)
    gone = ReplicaId(stage, 0)
    world.kill(gone)
    await world.settle()
    made = len(world.texts["b"])
    finished = {
        "text": len(world.texts["a"]) == TOKENS,
        "voice": world.closed("a"),
        "sound": (state := world.orchestrator.machine.requests.get("a")) is None or state.finished,
    }
    await world.orchestrator.never_up(gone, "its limit of restarts is reached")
    assert len(world.orchestrator.machine.placement.waiting) == 0
    await world.run()
    failed = set() if finished[stage] else {"a"}
    if stage == "text" and made < TOKENS:
        failed.add("b")
    assert set(world.failures) == failed
    for name in "ab":
        if name in failed:
            assert isinstance(world.failures[name], StageUnavailable) and stage in str(world.failures[name])
        else:
            world.check(name)
    await world.end()


@pytest.mark.parametrize("joinable", [False, True])
async def test_requests_wait_while_another_replica_is_announced_or_may_join(joinable: bool) -> None:
    world = World(joinable=joinable, voice=1 if joinable else 2)
    for replica in world.pools["voice"].replicas:
        world.kill(replica, again=not joinable)
    await world.start("a")
    await world.run()
    await world.orchestrator.never_up(ReplicaId("voice", 0), "no")
    assert world.failures == {} and len(world.orchestrator.machine.placement.waiting) == 1
    await world.up(ReplicaId("voice", 1))
    await world.end("a")


@pytest.mark.parametrize("stage", STAGES)
async def test_requests_wait_for_a_stage_that_is_down_and_can_be_aborted_meanwhile(stage: str) -> None:
    world = World()
    world.kill(ReplicaId(stage, 0))
    await world.settle()
    await world.start(*"ab")
    await world.run()
    assert len(world.orchestrator.machine.placement.waiting) == 2
    await world.orchestrator.abort(["a"])
    assert len(world.orchestrator.machine.placement.waiting) == 1
    await world.up(ReplicaId(stage, 0))
    await world.run()
    assert world.sinks["a"].empty()
    world.check("b")
    await world.expire()
    assert world.failures == {}
    await world.end()


@pytest.mark.parametrize("tokens", range(1, TOKENS))
async def test_a_stop_string_ends_the_text_while_the_voice_is_down(tokens: int) -> None:
    world = World()
    world.kill(ReplicaId("voice", 0))
    await world.settle()
    await world.start("a")
    await world.rounds(AHEAD + tokens)
    await world.orchestrator.text_stopped(["a"])
    await world.run()
    await world.up(ReplicaId("voice", 0))
    await world.run()
    assert world.samples("a") == spoken(text_of(world.prompt("a"), tokens))
    await world.end()


async def test_a_stop_string_ends_the_wait_for_the_text_stage() -> None:
    world = World()
    await world.start("a")
    await world.rounds(AHEAD + 2)  # the voice has taken the hidden states
    world.kill(ReplicaId("text", 0))
    await world.settle()
    await world.orchestrator.text_stopped(["a"])
    assert len(world.orchestrator.machine.placement.waiting) == 0
    await world.run()
    await world.expire()
    await world.up(ReplicaId("text", 0))
    await world.run()
    assert world.failures == {} and world.engines[ReplicaId("text", 0)].known == set()
    assert world.samples("a") == spoken(text_of(world.prompt("a"), 2))
    await world.end()


@pytest.mark.slow
@pytest.mark.parametrize("ticks", range(12))
@pytest.mark.parametrize("stage", ["voice", "sound"])
async def test_no_answer_changes_when_a_replica_is_lost_during_a_send(stage: str, ticks: int) -> None:
    for at in range(STEPS):
        world = World(**{stage: 2})
        for name in "ab":
            await world.start(name)
        await world.rounds(at)
        for engine in world.steppable():
            engine.step()
        for _ in range(ticks):
            await asyncio.sleep(0)
        busy = world.replica_of(stage, "a") or ReplicaId(stage, 0)
        world.kill(busy)
        await world.run()
        for name in "ab":
            world.check(name)
        await world.end()


async def test_a_request_that_cannot_be_placed_again_fails_alone() -> None:
    world = World(voice=2)
    await world.start(*"abcd")
    await world.rounds(2)
    gone = world.replica_of("voice", "a")
    mates = [name for name in "abcd" if world.replica_of("voice", name) == gone]
    assert len(mates) > 1

    def fail(stage: str) -> list[object]:
        raise KeyError("frames")

    world.flows[mates[0]].replay = fail
    world.kill(gone)
    await world.run()
    assert isinstance(world.failures[mates[0]], RequestFailed)
    world.check(*set("abcd") - {mates[0]})
    await world.end()


async def test_a_request_is_refused_while_a_stage_has_no_replica_and_expects_none() -> None:
    world = World()
    world.kill(ReplicaId("sound", 0), again=False)
    await world.settle()
    with pytest.raises(StageUnavailable, match="stage 'sound' has no live replica"):
        world.orchestrator.require(Speech())
    world.orchestrator.announce(ReplicaId("sound", 0))
    world.orchestrator.require(Speech())
    await world.end()
