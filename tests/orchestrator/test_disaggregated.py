"""One stage computes prompts, another one answers; whoever dies, whenever, answers stay and nothing is held."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.support.examples import seeds
from tests.support.fakes import owners, text_request
from tests.support.simulation import PREFILL, STAGES, TOKENS, Engine, Speech, World, text_of
from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests, can_be_split, prompt_request
from vllm_omni_ext.orchestrator.messages import SendKVRelease, SendPrompt
from vllm_omni_ext.orchestrator.router import Pair
from vllm_omni_ext.wire.stage_input import EXPORT

STEPS = TOKENS + 6
"""Rounds of all engines that a request takes at least: two for its prompt."""

P0, P1 = ReplicaId(PREFILL, 0), ReplicaId(PREFILL, 1)
D0, D1 = ReplicaId("text", 0), ReplicaId("text", 1)


async def rounds(world: World, count: int) -> None:
    for _ in range(count):
        for engine in world.steppable():
            engine.step()
        await world.settle()


def processes(world: World, stage: str) -> list[Engine]:
    return [engine for engine in world.processes.values() if engine.id.stage == stage]


def total(world: World, stage: str, count: str) -> int:
    return sum(getattr(engine, count) for engine in processes(world, stage))


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 1), (1, 2), (3, 2)])
async def test_every_prompt_is_computed_once_and_fetched_once(prefills: int, decodes: int) -> None:
    world = World(prefill=prefills, text=decodes)
    names = "abcdefgh"
    for name in names:
        await world.start(name, sound=name not in "bd")
    await world.run()
    for name in names:
        world.check(name)
    assert total(world, PREFILL, "prefilled") == total(world, "text", "fetched") == len(names)
    assert total(world, "text", "recomputed") == 0
    assert all(engine.prefilled for engine in processes(world, PREFILL))
    assert all(engine.fetched for engine in processes(world, "text"))
    await world.end()


async def test_later_stages_get_no_output_of_the_prefill_stage() -> None:
    """Its token is dropped, and what it says about the KV cache stays here."""
    world = World(prefill=1)
    await world.start("a", sound=False)
    await world.settle()
    prefill, decode = (world.engines[each] for each in (P0, D0))
    prefill.step()
    out = prefill.said.get_nowait()
    assert out.kv_transfer_params is not None and out.new_token_ids == [7]
    assert not await world.orchestrator.produced(P0, out)
    decode.step()
    out = decode.said.get_nowait()
    out.kv_transfer_params = {"remote_host": "10.0.0.1"}
    assert await world.orchestrator.produced(D0, out)
    assert (out.request_id, out.kv_transfer_params) == ("a", None)
    await world.orchestrator.abort(["a"])
    await world.end()


async def test_decode_is_not_bothered_before_there_is_something_to_fetch() -> None:
    world = World(prefill=1)
    await world.start("a")
    await world.settle()
    assert world.pools["text"].replica_of("a") is None
    await rounds(world, 2)
    assert (world.pools[PREFILL].replica_of("a"), world.pools["text"].replica_of("a")) == (None, D0)
    await world.orchestrator.abort(["a"])
    await world.end()


async def test_without_a_prefill_replica_decode_does_both() -> None:
    world = World(prefill=1)
    world.kill(P0, again=False)
    await world.settle()
    await world.orchestrator.never_up(P0, "no")
    world.orchestrator.require(Speech())
    for name in "ab":
        await world.start(name, sound=name == "a")
    await world.run()
    for name in "ab":
        world.check(name)
    assert total(world, "text", "recomputed") == 2
    await world.end()


async def test_without_a_decode_replica_nothing_can_be_answered() -> None:
    world = World(prefill=1)
    world.kill(D0, again=False)
    await world.settle()
    with pytest.raises(StageUnavailable, match="stage 'text' has no live replica"):
        world.orchestrator.require(Speech())
    await world.start("a")
    await world.run()
    assert isinstance(world.failures["a"], StageUnavailable)
    await world.up(D0)
    await world.run()  # it has the prompt freed that nobody fetches
    await world.end()


async def test_a_prefill_replica_dies_before_decode_has_fetched() -> None:
    """With another one: computed there at once. The attempt before is ended, not waited for."""
    world = World(prefill=2)
    await world.start("a")
    await world.settle()
    busy = world.pools[PREFILL].replica_of("a")
    assert busy is not None
    for _ in range(2):  # decode has been asked and has done nothing yet
        world.engines[busy].step()
        await world.settle()
    assert world.pools["text"].replica_of("a") == D0
    world.kill(busy)
    await world.run()
    world.check("a")
    assert total(world, "text", "fetched") == 1 and total(world, "text", "recomputed") == 0
    assert total(world, PREFILL, "prefilled") == 2
    await world.end()


@pytest.mark.parametrize("sound", [False, True])
async def test_the_only_prefill_replica_dies_before_decode_has_fetched(sound: bool) -> None:
    """The decode replica keeps the request, and computes the prompt again for its lost hidden states."""
    world = World(prefill=1)
    await world.start("a", sound=sound)
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    world.kill(P0)
    await world.run()
    world.check("a")
    assert total(world, "text", "recomputed") == 1 + sound
    assert [len(engine.known) for engine in processes(world, "text")] == [1 + sound]
    await world.end()


async def test_a_prefill_replica_that_has_been_fetched_from_may_die() -> None:
    world = World(prefill=2)
    await world.start("a")
    await rounds(world, 3)
    for replica in (P0, P1):
        world.kill(replica)
    await world.run()
    world.check("a")
    assert total(world, PREFILL, "prefilled") == 1
    await world.end()


async def test_lost_hidden_states_are_recomputed_by_the_prefill_stage() -> None:
    """They are freed there like all others, and decode goes on as if nothing had happened."""
    world = World(prefill=2)
    await world.start("a")
    await world.settle()
    first = world.pools[PREFILL].replica_of("a")
    assert first is not None
    for _ in range(2):
        world.engines[first].step()
        await world.settle()
    world.engines[D0].step()  # it has fetched the prompt; the hidden states are not taken
    world.kill(first)
    await world.run()
    world.check("a")
    (other,) = {P0, P1} - {first}
    assert owners(world.engines[other].known) == ["a"]
    assert total(world, PREFILL, "prefilled") == 2 and total(world, "text", "recomputed") == 0
    assert world.engines[other].hidden_states == {}
    await world.end()


@pytest.mark.parametrize("ticks", range(8))
async def test_tokens_during_a_replay_of_the_voice_reach_it(ticks: int) -> None:
    world = World(prefill=1, voice=1)
    await world.start("a")
    await world.settle()
    for stage in (PREFILL, PREFILL, "text"):
        world.engines[ReplicaId(stage, 0)].step()
        await world.settle()
    world.kill(P0)
    await world.settle()
    world.engines[ReplicaId("voice", 0)].step()  # it cannot take its hidden states
    for _ in range(ticks):
        await asyncio.sleep(0)
    world.engines[D0].step()
    await world.run()
    world.check("a")
    await world.end()


@pytest.mark.parametrize("at", range(3))
async def test_hidden_states_of_an_ended_request_are_freed_at_the_prefill_replica(at: int) -> None:
    """Also those that are told of when the request has ended already."""
    world = World(prefill=1)
    await world.start("a")
    await world.settle()
    prefill = world.engines[P0]
    for _ in range(at):
        prefill.step()
    assert len(prefill.hidden_states) == bool(at)
    await world.orchestrator.abort(["a"])
    await world.run()
    assert prefill.hidden_states == {} and prefill.kept == {}
    await world.end()


async def test_a_decode_replica_that_dies_leaves_no_prompt_behind() -> None:
    """Nor if it was the only one: the next one says that nobody will fetch it."""
    world = World(prefill=1, text=1)
    for name in "abc":
        await world.start(name)
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    assert len(world.engines[P0].kept) == 3
    world.kill(D0)
    await world.settle()
    assert len(world.engines[P0].kept) == 3
    await world.up(D0)
    await world.run()
    for name in "abc":
        world.check(name)
    assert total(world, "text", "fetched") == total(world, "text", "farewells") == 3
    await world.end()


async def test_fetched_kv_caches_are_not_released() -> None:
    world = World(prefill=1, text=2)
    for name in "ab":
        await world.start(name)
    await rounds(world, 3)  # both have begun to answer
    for replica in (D0, D1):
        world.kill(replica)
        await world.settle()
        await world.up(replica)
    await world.run()
    await world.start("c")
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    await world.orchestrator.abort(["c"])  # its decode replica has not done anything for it
    await world.run()
    for name in "ab":
        world.check(name)
    assert total(world, "text", "farewells") == 0
    await world.end()


@pytest.mark.parametrize("again", ["another", "the same one"])
async def test_a_decode_replica_that_dies_before_it_has_read_an_abort(again: str) -> None:
    """It would have had the prompt freed that it was asked to fetch: somebody else does."""
    world = World(prefill=1, text=2 if again == "another" else 1)
    await world.start("a")
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    target = world.pools["text"].replica_of("a")
    assert target is not None
    await world.orchestrator.abort(["a"])
    world.kill(target)
    await world.settle()
    if again == "the same one":
        assert len(world.engines[P0].kept) == 1
        await world.up(target)
    await world.run()
    assert world.engines[P0].kept == {}
    assert total(world, "text", "farewells") == 1
    await world.end()


async def test_a_decode_replica_that_dies_before_it_reads_a_kv_release() -> None:
    """And so does the next one."""
    world = World(prefill=1, text=3)
    await world.start("a")
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    await world.orchestrator.abort(["a"])
    for _ in range(2):
        busy = next(engine for engine in world.steppable() if engine.id.stage == "text" and engine.commands)
        world.kill(busy.id)
        await world.settle()
    assert len(world.engines[P0].kept) == 1
    await world.run()
    assert world.engines[P0].kept == {}
    await world.end()


async def test_processed_kv_releases_are_not_sent_again() -> None:
    """What it answers later tells that it has."""
    world = World(prefill=1, text=1)
    await world.start("a")
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    await world.orchestrator.abort(["a"])
    await world.start("b")
    await rounds(world, 4)
    assert world.texts["b"] and world.engines[P0].kept == {}
    world.kill(D0)
    await world.settle()
    await world.up(D0)
    await world.run()
    world.check("b")
    assert total(world, "text", "farewells") == 0
    await world.end()


@pytest.mark.parametrize("at", range(STEPS))
async def test_an_abort_at_any_step_leaves_nothing(at: int) -> None:
    world = World(prefill=1)
    for name in "ab":
        await world.start(name)
    await rounds(world, at)
    await world.orchestrator.abort(["a"])
    await world.run()
    world.check("b")
    assert world.engines[P0].kept == {}
    await world.end()


async def test_an_abort_that_meets_the_finished_prompt() -> None:
    """The engine was through when the abort came: what it then says about the KV cache is answered."""
    world = World(prefill=1)
    await world.start("a", sound=False)
    await world.settle()
    prefill = world.engines[P0]
    prefill.step()
    assert len(prefill.kept) == 1
    await world.orchestrator.abort(["a"])
    assert len(prefill.kept) == 1  # its answer has not been read yet
    await world.run()
    assert prefill.kept == {}
    await world.end()


@pytest.mark.parametrize("turns", range(12))
async def test_an_abort_that_meets_the_loss_of_a_replica(turns: int) -> None:
    """What is being given to another one at that moment is not begun there, or is ended."""
    world = World(prefill=2, text=2)
    for name in "ab":
        await world.start(name)
    for _ in range(3):
        for replica in (P0, P1):
            world.engines[replica].step()
        await world.settle()
    lost = world.pools["text"].replica_of("a")
    assert lost is not None
    world.kill(lost)
    for _ in range(turns):
        await asyncio.sleep(0)
    await world.orchestrator.abort(["a"])
    await world.settle()
    assert all(pool.replica_of("a") is None for pool in world.pools.values())
    await world.run()
    world.check("b")
    await world.end()


@pytest.mark.parametrize("ticks", range(6))
async def test_an_abort_while_hidden_states_of_a_finished_prompt_are_announced(ticks: int) -> None:
    world = World(prefill=1)
    await world.start("a")
    await world.settle()
    prefill = world.engines[P0]
    for _ in range(2):
        prefill.step()
    for _ in range(ticks):
        await asyncio.sleep(0)
    await world.orchestrator.abort(["a"])
    await world.run()
    assert prefill.kept == {} and prefill.hidden_states == {}
    await world.end()


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("stage", [PREFILL, *STAGES])
async def test_a_loss_of_a_replica_that_meets_an_abort(stage: str, turns: int) -> None:
    """The abort is complete, wherever it was."""
    world = World(prefill=1)
    await world.start("a")
    await rounds(world, STEPS - 2)  # every stage has it, and code2wav's has a stream
    abort = asyncio.create_task(world.orchestrator.abort(["a"]))
    for _ in range(turns):
        await asyncio.sleep(0)
    world.kill(ReplicaId(stage, 0))
    await abort
    await world.settle()
    await world.up(ReplicaId(stage, 0))
    await world.run()
    await world.end()


@pytest.mark.parametrize("tokens", range(1, TOKENS))
async def test_a_stop_string(tokens: int) -> None:
    world = World(prefill=1)
    await world.start("a")
    await rounds(world, 2 + tokens)
    await world.orchestrator.text_stopped(["a"])
    await world.run()
    assert world.texts["a"] == text_of(world.prompt("a"), tokens)
    await world.end()


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [PREFILL, "text"])
async def test_a_stage_is_down_from_any_step_to_any_other(stage: str, how: str, others: int) -> None:
    gone = ReplicaId(stage, 0)
    for at in range(STEPS):
        for until in range(at, STEPS + 1):
            world = World(**{PREFILL: 1, stage: 1 + others})
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


DIED_UNREAD = (490, 1175, 1459)
"""Courses in which a decode replica dies before it has read what somebody who gave up has sent it."""

LEFT_ON_THE_WAY = (1519, 1872)
"""In which a client leaves while its request is given to another replica, or while a replica that has it dies."""


@pytest.mark.parametrize("seed", [*seeds(200), *DIED_UNREAD, *LEFT_ON_THE_WAY])
async def test_any_course_of_events(seed: int) -> None:
    """Everybody dies, freezes, comes back, and clients leave, at random; who stays gets the undisturbed answer."""
    rng = random.Random(seed)
    world = World(**{stage: rng.randint(1, 3) for stage in (PREFILL, *STAGES)})
    everybody = list(world.engines)
    names = [chr(ord("a") + i) for i in range(rng.randint(1, 6))]
    late, left = list(names), set[str]()
    for _ in range(rng.randint(10, 80)):
        match rng.randrange(9):
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
            case 5 if rng.random() < 0.3 and len(late) < len(names):
                left.add(rng.choice([name for name in names if name not in late]))
                await world.orchestrator.abort(sorted(left))
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
    for name in set(names) - left:
        world.check(name)
    await world.end()


# -- the two requests -------------------------------------------------------------------------------------------------


def asked(**params: Any) -> Any:
    request = text_request("a")
    request.sampling_params = SamplingParams(**params)
    return request


@pytest.mark.parametrize(
    ("params", "split"),
    [
        ({}, True),
        ({"logprobs": 3, "n": 2, "stop": ["x"], "seed": 4}, True),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, True),
        ({"prompt_logprobs": 1}, False),
        ({"prompt_logprobs": 1, "extra_args": {EXPORT: [[0, 1]]}}, False),
        ({"skip_reading_prefix_cache": True}, False),
        ({"skip_reading_prefix_cache": True, "extra_args": {EXPORT: [[0, 1]]}}, True),
    ],
)
def test_which_prompts_can_be_split(params: dict[str, Any], split: bool) -> None:
    assert can_be_split(asked(**params)) is split


def test_a_prompt_of_one_token_is_not_worth_it() -> None:
    request = asked()
    request.prompt_token_ids = [1]
    assert not can_be_split(request)
    request.prompt_token_ids = [1, 2]
    assert can_be_split(request)
    request.prompt_token_ids = None
    assert not can_be_split(request)


def test_the_prompt_is_asked_for_without_what_belongs_to_the_answer() -> None:
    given = {"max_tokens": 40, "min_tokens": 5, "stop": ["x"], "stop_token_ids": [3], "logprobs": 2, "temperature": 1.0}
    structured = StructuredOutputsParams(regex="a+")
    export = {EXPORT: [[0, 1]], "other": 1}
    request = asked(**given, structured_outputs=structured, extra_args=export, skip_reading_prefix_cache=True)
    request.sampling_params._all_stop_token_ids = {3, 9}
    sends = [SendPrompt(P0, "a", f"a/p{i}", request=request, side="prefill") for i in range(2)]
    first, second = map(prompt_request, sends)
    params = first.sampling_params
    assert first.request_id == "a/p0" and first.prompt_token_ids == request.prompt_token_ids
    assert params is not None and second.sampling_params is not None
    assert (params.max_tokens, params.min_tokens, params.ignore_eos, params.detokenize) == (1, 0, True, False)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.structured_outputs) == ([], [], None, None)
    assert params._all_stop_token_ids == set() and params.skip_reading_prefix_cache
    assert params.extra_args is not None and set(params.extra_args) == {KEY, EXPORT}
    assert params.extra_args[KEY]["transfer_id"] != (second.sampling_params.extra_args or {})[KEY]["transfer_id"]
    assert request.sampling_params.extra_args == export and request.request_id == "a"


def test_the_answer_is_asked_for_as_the_client_did() -> None:
    request = asked(
        max_tokens=40, logprobs=2, extra_args={EXPORT: [[0, 1]], "other": 1}, skip_reading_prefix_cache=True
    )
    answer = {"do_remote_prefill": True, "transfer_id": "t"}
    decode = prompt_request(SendPrompt(D0, "a", "a/d0", request=request, side="decode", kv=answer)).sampling_params
    assert decode is not None
    assert decode.extra_args == {"other": 1, KEY: answer}
    assert (decode.max_tokens, decode.logprobs, decode.skip_reading_prefix_cache) == (40, 2, False)
    alone = prompt_request(SendPrompt(D0, "a", "a/d1", request=request))
    assert alone.request_id == "a/d1" and alone.sampling_params == request.sampling_params


def test_a_kv_release_request_ends_at_once() -> None:
    request = EngineRequests().make(SendKVRelease(D0, "", "x", kv={"transfer_id": "t"}))
    assert request.abort_immediately
    assert request.sampling_params is not None and request.sampling_params.extra_args == {KEY: {"transfer_id": "t"}}


async def test_pairs() -> None:
    world = World(prefill=1, text=1)
    for name in "ab":
        await world.start(name)
    for _ in range(3):
        world.engines[P0].step()
        await world.settle()
    assert world.orchestrator.pairs() == [Pair(P0, D0, handed=2, fetching=2)]
    await rounds(world, 1)
    assert world.orchestrator.pairs() == [Pair(P0, D0, handed=2, fetching=0)]
    world.kill(P0)
    await world.settle()
    await world.up(P0)
    assert world.orchestrator.pairs() == []
    await world.run()
    await world.end()
    assert World().orchestrator.pairs() == []
