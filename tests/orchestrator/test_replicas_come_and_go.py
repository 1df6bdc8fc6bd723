"""Replicas die, fall silent and come back at every point of a request's life; the answer is the same, or an error."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.examples import seeds
from tests.support.simulation import AHEAD, STAGES, TOKENS, Speech, World, spoken, text_of
from vllm_omni_ext.errors import RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId

STEPS = AHEAD + TOKENS + 4
"""Rounds of all engines that a request takes at least."""


async def rounds(world: World, count: int) -> None:
    for _ in range(count):
        for engine in world.steppable():
            engine.step()
        await world.settle()


async def test_a_request_that_nothing_happens_to() -> None:
    world = World()
    await world.start("a")
    await world.start("b", sound=False)
    await world.run()
    world.check("a")
    world.check("b")
    await world.end()


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_is_down_from_any_step_to_any_other(stage: str, how: str, others: int) -> None:
    gone = ReplicaId(stage, 0)
    for at in range(STEPS):
        for until in range(at, STEPS + 1):
            world = World(**{stage: 1 + others})
            for name in "abc":
                await world.start(name, sound=name != "c")
            await rounds(world, at)
            if how == "kill":
                world.kill(gone)
            else:
                await world.freeze(gone)
            await world.settle()
            await rounds(world, until - at)
            await (world.up if how == "kill" else world.thaw)(gone)
            await world.run()
            for name in "abc":
                world.check(name)
            await world.end()


@pytest.mark.parametrize("stage", STAGES)
async def test_requests_that_begin_while_a_stage_is_away_wait_for_it(stage: str) -> None:
    world = World()
    world.kill(ReplicaId(stage, 0))
    await world.settle()
    for name in "ab":
        await world.start(name)
    await world.run()
    assert world.failures == {}
    assert len(world.orchestrator.machine.placement.waiting) == 2
    await world.up(ReplicaId(stage, 0))
    await world.run()
    for name in "ab":
        world.check(name)
    await world.end()


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_that_stays_away_is_an_error_after_the_limit(stage: str, at: int) -> None:
    world = World()
    await world.start("a")
    await rounds(world, at)
    world.kill(ReplicaId(stage, 0))
    await world.run()
    waits = len(world.orchestrator.machine.placement.waiting)
    await world.expire()
    if waits:
        assert isinstance(world.failures["a"], StageUnavailable)
        assert f"stage '{stage}'" in str(world.failures["a"]) and "replica_wait_timeout_s" in str(world.failures["a"])
        assert world.answers("a")[-1] is world.failures["a"]
    else:  # it was through with it
        world.check("a")
    await world.end()


@pytest.mark.parametrize("at", range(STEPS))
@pytest.mark.parametrize("stage", STAGES)
async def test_a_replica_that_never_comes_is_an_error_at_once(stage: str, at: int) -> None:
    """Only for those that need it: who is through with the stage goes on."""
    world = World()
    for name in "ab":
        await world.start(name, sound=name == "a")
    await rounds(world, at)
    gone = ReplicaId(stage, 0)
    world.kill(gone)
    await world.settle()
    made = len(world.texts["b"])
    through = {
        "text": len(world.texts["a"]) == TOKENS,
        "voice": world.closed("a"),
        "sound": world.finished("a"),
    }
    await world.orchestrator.never_up(gone, "its limit of restarts is reached")
    assert len(world.orchestrator.machine.placement.waiting) == 0
    await world.run()
    failed = set() if through[stage] else {"a"}
    if stage == "text" and made < TOKENS:
        failed.add("b")
    assert set(world.failures) == failed
    for name in "ab":
        if name in failed:
            assert isinstance(world.failures[name], StageUnavailable) and stage in str(world.failures[name])
        else:
            world.check(name)
    await world.end()


async def test_one_of_two_that_never_comes_is_no_error() -> None:
    world = World(voice=2)
    for i in range(2):
        world.kill(ReplicaId("voice", i))
    await world.start("a")
    await world.run()
    await world.orchestrator.never_up(ReplicaId("voice", 0), "no")
    assert len(world.orchestrator.machine.placement.waiting) == 1
    await world.up(ReplicaId("voice", 1))
    await world.run()
    world.check("a")
    await world.end()


async def test_where_anybody_may_join_a_replica_that_never_comes_is_waited_for() -> None:
    world = World(joinable=True)
    world.kill(ReplicaId("voice", 0), again=False)
    await world.start("a")
    await world.run()
    await world.orchestrator.never_up(ReplicaId("voice", 0), "no")
    assert world.failures == {} and len(world.orchestrator.machine.placement.waiting) == 1
    await world.up(ReplicaId("voice", 7))
    await world.run()
    world.check("a")
    await world.end()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_may_be_given_up_while_it_waits(stage: str) -> None:
    world = World()
    world.kill(ReplicaId(stage, 0))
    await world.settle()
    for name in "ab":
        await world.start(name)
    await world.run()
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
async def test_a_stop_string_while_the_voice_is_awaited(tokens: int) -> None:
    world = World()
    world.kill(ReplicaId("voice", 0))
    await world.settle()
    await world.start("a")
    await rounds(world, AHEAD + tokens)
    await world.orchestrator.text_stopped(["a"])
    await world.run()
    await world.up(ReplicaId("voice", 0))
    await world.run()
    assert world.samples("a") == spoken(text_of(world.prompt("a"), tokens))
    await world.end()


async def test_a_stop_string_while_the_text_stage_is_awaited() -> None:
    """What it has made already may hold a stop string: then nobody needs the stage any more."""
    world = World()
    await world.start("a")
    await rounds(world, AHEAD + 2)  # the voice has taken the hidden states
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


@pytest.mark.parametrize("ticks", range(12))
@pytest.mark.parametrize("stage", ["voice", "sound"])
async def test_a_replica_is_lost_while_it_is_sent_something(stage: str, ticks: int) -> None:
    """Sending takes a moment; the rest of what was to be sent is part of what the next replica is given."""
    for at in range(STEPS):
        world = World(**{stage: 2})
        for name in "ab":
            await world.start(name)
        await rounds(world, at)
        for engine in world.steppable():
            engine.step()
        for _ in range(ticks):
            await asyncio.sleep(0)
        busy = world.pools[stage].replica_of("a") or ReplicaId(stage, 0)
        world.kill(busy)
        await world.run()
        for name in "ab":
            world.check(name)
        await world.end()


@pytest.mark.parametrize("seed", seeds(150))
async def test_any_course_of_events(seed: int) -> None:
    """Everybody dies, freezes and comes back at random; once all are there, every answer is the undisturbed one."""
    rng = random.Random(seed)
    world = World(**{stage: rng.randint(1, 3) for stage in STAGES})
    everybody = list(world.engines)
    names = [chr(ord("a") + i) for i in range(rng.randint(1, 6))]
    late = list(names)
    for _ in range(rng.randint(10, 80)):
        match rng.randrange(8):
            case 0 if late:
                await world.start(late.pop(), sound=rng.random() < 0.8)
            case 1:
                world.kill(rng.choice(everybody))
            case 2:
                await world.up(rng.choice(everybody))
            case 3:
                await world.freeze(rng.choice(everybody))
            case 4:
                await world.thaw(rng.choice(everybody))
            case _:
                for engine in world.steppable():
                    if rng.random() < 0.7:
                        engine.step()
        for _ in range(rng.choice((0, 1, 3, 20))):
            await asyncio.sleep(0)
    while late:
        await world.start(late.pop())
    await world.settle()
    for replica in everybody:
        await world.thaw(replica)
        await world.up(replica)
    await world.run()
    for name in names:
        world.check(name)
    await world.end()


async def test_a_request_that_cannot_be_placed_again_fails_alone() -> None:
    world = World(voice=2)
    for name in "abcd":
        await world.start(name)
    await rounds(world, 2)
    gone = world.pools["voice"].replica_of("a")
    assert gone is not None
    mates = [name for name in "abcd" if world.pools["voice"].replica_of(name) == gone]
    assert len(mates) > 1

    def fail(stage: str) -> list[object]:
        raise KeyError("frames")

    world.flows[mates[0]].replay = fail  # type: ignore[method-assign,assignment]
    world.kill(gone)
    await world.run()
    assert isinstance(world.failures[mates[0]], RequestFailed)
    for name in set("abcd") - {mates[0]}:
        world.check(name)
    await world.end()


async def test_what_no_stage_can_ever_take_is_refused_before_it_begins() -> None:
    world = World()
    world.kill(ReplicaId("sound", 0), again=False)
    await world.settle()
    with pytest.raises(StageUnavailable, match="stage 'sound' has no live replica"):
        world.orchestrator.require(Speech())
    world.orchestrator.announce(ReplicaId("sound", 0))
    world.orchestrator.require(Speech())
    await world.end()
