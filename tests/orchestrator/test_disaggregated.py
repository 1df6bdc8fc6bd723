"""Prefill in one stage, decode in another: if any replica dies at any step, answers stay and nothing is held."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.support.examples import seeds
from tests.support.fakes import owners, text_request
from tests.support.simulation import (
    PREFILL,
    STAGES,
    TOKENS,
    Engine,
    Speech,
    World,
    any_course_of_events,
    down_from_any_step_to_any_other,
    text_of,
)
from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests, cache_scope, can_be_split, prompt_request
from vllm_omni_ext.orchestrator.messages import SendKVRelease, SendPrompt
from vllm_omni_ext.orchestrator.router import Pair
from vllm_omni_ext.wire.stage_input import EXPORT, EXPORTED, OPEN_END, RESUMED

STEPS = TOKENS + 6
"""Rounds of all engines that a request takes at least: two for its prompt."""

P0, P1 = ReplicaId(PREFILL, 0), ReplicaId(PREFILL, 1)
D0, D1 = ReplicaId("text", 0), ReplicaId("text", 1)


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


async def test_decode_gets_a_request_when_its_prompt_is_computed() -> None:
    world = World(prefill=1)
    await world.start("a")
    await world.settle()
    assert world.replica_of("text", "a") is None
    await world.rounds(2)
    assert (world.replica_of(PREFILL, "a"), world.replica_of("text", "a")) == (None, D0)
    await world.orchestrator.abort(["a"])
    await world.end()


async def test_without_a_prefill_replica_decode_computes_prompts() -> None:
    world = World(prefill=1)
    world.kill(P0, again=False)
    await world.settle()
    await world.orchestrator.never_up(P0, "no")
    world.orchestrator.require(Speech())
    for name in "ab":
        await world.start(name, sound=name == "a")
    await world.run()
    world.check(*"ab")
    assert total(world, "text", "recomputed") == 2
    await world.end()


@pytest.mark.parametrize("again", [False, True])
async def test_decode_computes_the_prompts_of_suspects_when_no_prefill_replica_is_left(again: bool) -> None:
    """Requests of a prefill replica that has ended wait, one at a time, for another one."""
    world = World(prefill=2)
    await world.start(*"abcd", sound=False)
    await world.settle()
    for replica in (P0, P1):
        world.kill(replica, again=again)
        await world.settle()
    assert not world.orchestrator.machine.placement.waiting
    await world.run()
    left = [name for name in "abcd" if name not in world.failures]
    world.check(*left)
    assert len(left) >= 3, "one may have ended both"
    await world.end()


async def test_without_a_decode_replica_requests_are_refused() -> None:
    world = World(prefill=1)
    world.kill(D0, again=False)
    await world.settle()
    with pytest.raises(StageUnavailable, match="stage 'text' has no live replica"):
        world.orchestrator.require(Speech())
    await world.start("a")
    await world.run()
    assert isinstance(world.failures["a"], StageUnavailable)
    await world.up(D0)
    await world.run()  # D0 has the unclaimed prompt freed
    await world.end()


async def test_another_prefill_replica_computes_a_prompt_that_was_lost_before_its_fetch() -> None:
    """Another prefill replica computes the prompt at once; the attempt before is ended."""
    world = World(prefill=2)
    await world.start("a")
    await world.settle()
    busy = world.replica_of(PREFILL, "a")
    await world.rounds(2, busy)  # decode has received the request and made no step
    assert world.replica_of("text", "a") == D0
    world.kill(busy)
    await world.run()
    world.check("a")
    assert total(world, "text", "fetched") == 1 and total(world, "text", "recomputed") == 0
    assert total(world, PREFILL, "prefilled") == 2
    await world.end()


@pytest.mark.parametrize("sound", [False, True])
async def test_decode_computes_a_prompt_that_the_only_prefill_replica_has_lost(sound: bool) -> None:
    """The decode replica keeps the request, and computes the prompt again for its lost hidden states."""
    world = World(prefill=1)
    await world.start("a", sound=sound)
    await world.rounds(3, P0)
    world.kill(P0)
    await world.run()
    world.check("a")
    assert total(world, "text", "recomputed") == 1 + sound
    assert [len(engine.known) for engine in processes(world, "text")] == [1 + sound]
    await world.end()


async def test_lost_hidden_states_are_recomputed_by_the_prefill_stage() -> None:
    world = World(prefill=2)
    await world.start("a")
    await world.settle()
    first = world.replica_of(PREFILL, "a")
    await world.rounds(2, first)
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
    await world.rounds(2, P0)
    await world.rounds(1, D0)
    world.kill(P0)
    await world.settle()
    world.engines[ReplicaId("voice", 0)].step()  # it cannot take its hidden states
    for _ in range(ticks):
        await asyncio.sleep(0)
    world.engines[D0].step()
    await world.end("a")


async def test_the_prompts_of_a_dead_decode_replica_are_freed_by_the_next() -> None:
    world = World(prefill=1, text=1)
    await world.start(*"abc")
    await world.rounds(3, P0)
    assert len(world.engines[P0].kept) == 3
    world.kill(D0)
    await world.settle()
    assert len(world.engines[P0].kept) == 3
    await world.up(D0)
    await world.run()
    world.check(*"abc")
    assert total(world, "text", "fetched") == total(world, "text", "farewells") == 3
    await world.end()


@pytest.mark.parametrize("released", [False, True])
async def test_fetched_and_released_kv_caches_are_not_released_again(released: bool) -> None:
    """An answer to a later message shows that the decode replica has read the abort, which releases a KV cache."""
    world = World(prefill=1)
    if released:
        await world.start("a")
        await world.rounds(3, P0)
        await world.orchestrator.abort(["a"])
    await world.start("b")
    await world.rounds(4)
    assert world.texts["b"] and world.engines[P0].kept == {}
    world.kill(D0)
    await world.settle()
    await world.up(D0)
    await world.run()
    world.check("b")
    assert total(world, "text", "farewells") == 0
    await world.end()


@pytest.mark.parametrize(("decodes", "deaths"), [(1, 1), (2, 1), (3, 2)])
async def test_an_unclaimed_prompt_is_freed_when_decode_replicas_die_before_they_read_the_abort(
    decodes: int, deaths: int
) -> None:
    """Another decode replica has the prompt freed, or the same one after its restart."""
    world = World(prefill=1, text=decodes)
    await world.start("a")
    await world.rounds(3, P0)
    await world.orchestrator.abort(["a"])
    for _ in range(deaths):
        busy = next(engine for engine in world.steppable() if engine.id.stage == "text" and engine.commands)
        world.kill(busy.id)
        await world.settle()
    assert len(world.engines[P0].kept) == 1
    if deaths == decodes:
        await world.up(busy.id)
    await world.run()
    assert world.engines[P0].kept == {} and total(world, "text", "farewells") == 1
    await world.end()


async def abort_a(world: World, unread: int, ticks: int) -> None:
    """Abort request "a" with unread outputs of the prefill replica, and check that "b" is answered."""
    for _ in range(unread):
        world.engines[P0].step()
    for _ in range(ticks):
        await asyncio.sleep(0)
    await world.orchestrator.abort(["a"])
    await world.run()
    world.check("b")


@pytest.mark.slow
@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("at", range(STEPS))
async def test_an_abort_at_any_moment_leaves_nothing(at: int, sound: bool) -> None:
    """Also if the orchestrator reads outputs of the prefill replica during the abort, or after it."""
    for unread, ticks in itertools.product(range(3), (0, 1, 3)):
        world = World(prefill=1)
        await world.start("a", sound=sound)
        await world.start("b")
        await world.rounds(at)
        await abort_a(world, unread, ticks)
        prefill = world.engines[P0]
        assert prefill.kept == {} and prefill.hidden_states == {}
        await world.end()


@pytest.mark.parametrize("turns", range(12))
async def test_an_abort_during_a_failover_ends_the_request(turns: int) -> None:
    world = World(prefill=2, text=2)
    await world.start(*"ab")
    await world.rounds(3, P0, P1)
    lost = world.replica_of("text", "a")
    world.kill(lost)
    for _ in range(turns):
        await asyncio.sleep(0)
    await world.orchestrator.abort(["a"])
    await world.settle()
    assert all(world.replica_of(stage, "a") is None for stage in world.pools)
    await world.end("b")


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("stage", [PREFILL, *STAGES])
async def test_the_loss_of_a_replica_during_an_abort_leaves_nothing(stage: str, turns: int) -> None:
    world = World(prefill=1)
    await world.start("a")
    await world.rounds(STEPS - 2)  # every stage has it, and code2wav's has a stream
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
async def test_a_stop_string_ends_prefill_and_decode(tokens: int) -> None:
    world = World(prefill=1)
    await world.start("a")
    await world.rounds(2 + tokens)
    await world.orchestrator.text_stopped(["a"])
    await world.run()
    assert world.texts["a"] == text_of(world.prompt("a"), tokens)
    await world.end()


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("stage", [PREFILL, "text"])
async def test_no_answer_changes_while_a_stage_is_down(stage: str, how: str, others: int) -> None:
    await down_from_any_step_to_any_other(stage, how, STEPS, **{PREFILL: 1, stage: 1 + others})


DIED_UNREAD = (490, 1175, 1459)
"""Courses in which a decode replica dies before it has read the abort of a client that left."""

LEFT_ON_THE_WAY = (1519, 1872)
"""In which a client leaves while its request moves to another replica, or while its replica dies."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*seeds(200), *DIED_UNREAD, *LEFT_ON_THE_WAY])
async def test_no_answer_changes_in_any_course_of_events(seed: int) -> None:
    await any_course_of_events(seed, PREFILL, *STAGES)


@pytest.mark.parametrize("seed", seeds(100))
async def test_no_answer_of_a_flow_that_opens_the_frontend_changes_in_any_course_of_events(seed: int) -> None:
    await any_course_of_events(seed, PREFILL, *STAGES, plans=0.7)


async def test_a_prompt_of_a_flow_is_computed_once_and_fetched_once() -> None:
    world = World(prefill=1)
    await world.plan(*"ab")
    await world.run()
    world.check(*"ab")
    assert total(world, PREFILL, "prefilled") == total(world, "text", "fetched") == 2
    assert total(world, "text", "recomputed") == 0
    await world.end()


@pytest.mark.parametrize("at", range(STEPS))
async def test_an_abort_of_a_prompt_of_a_flow_leaves_nothing(at: int) -> None:
    for unread, ticks in itertools.product(range(3), (0, 1, 3)):
        world = World(prefill=1)
        await world.plan(*"ab")
        await world.rounds(at)
        await abort_a(world, unread, ticks)
        assert world.engines[P0].kept == {}
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
        ({"skip_reading_prefix_cache": True, "extra_args": {EXPORT: [[0, 3]]}}, True),
        ({"skip_reading_prefix_cache": True, "extra_args": {EXPORT: [[0, OPEN_END]]}}, False),
        ({"skip_reading_prefix_cache": True, "extra_args": {EXPORT: [[0, OPEN_END]], EXPORTED: 0}}, True),
    ],
)
def test_parameters_and_length_decide_if_a_prompt_can_be_split(params: dict[str, Any], split: bool) -> None:
    request = asked(**params)
    assert can_be_split(request) is split
    for prompt in ([1], None):
        request.prompt_token_ids = prompt
        assert not can_be_split(request)


def test_hidden_states_of_the_prompt_are_exported_by_prefill_and_later_ones_by_decode() -> None:
    for ranges, decode in (([[0, 2]], {}), ([[0, OPEN_END]], {EXPORT: [[0, OPEN_END]], EXPORTED: 5})):
        given = {EXPORT: ranges, EXPORTED: 0}
        request = asked(skip_reading_prefix_cache=True, extra_args=given)
        send = partial(SendPrompt, D0, "r", "r", request=request, tokens=(7, 8))
        first = prompt_request(send(side="prefill")).sampling_params
        then = prompt_request(send(side="decode", kv={"a": 1})).sampling_params
        assert first is not None and then is not None and first.extra_args is not None
        assert {key: value for key, value in first.extra_args.items() if key != KEY} == {**given, RESUMED: 2}
        assert first.skip_reading_prefix_cache and not then.skip_reading_prefix_cache
        later = {key: value for key, value in then.extra_args.items() if key in (EXPORT, EXPORTED)}  # type: ignore[union-attr]
        assert later == decode or (not decode and EXPORT not in later)


def test_requests_share_a_scope_of_caches_if_salt_and_adapter_are_equal() -> None:
    scopes = set()
    for salt in (None, "a", "b"):
        for adapter in (None, LoRARequest("x", 1, "/x"), LoRARequest("x", 2, "/x"), LoRARequest("x", 1, "/y")):
            request = asked()
            request.cache_salt, request.lora_request = salt, adapter
            scopes.add(cache_scope(request))
    assert len(scopes) == 12 and "" in scopes


def test_the_prefill_request_has_no_parameters_of_the_answer() -> None:
    given = {"max_tokens": 40, "min_tokens": 5, "stop": ["x"], "stop_token_ids": [3], "logprobs": 2, "temperature": 1.0}
    structured = StructuredOutputsParams(regex="a+")
    export = {EXPORT: [[0, 1]], "other": 1}
    request = asked(**given, structured_outputs=structured, extra_args=export, skip_reading_prefix_cache=True)
    request.sampling_params._all_stop_token_ids = {3, 9}
    sends = [SendPrompt(P0, "a", f"a/p{i}", request=request, side="prefill") for i in range(2)]
    first, second = map(prompt_request, sends)
    params = first.sampling_params
    assert first.request_id == "a/p0" and first.prompt_token_ids == request.prompt_token_ids
    assert (params.max_tokens, params.min_tokens, params.ignore_eos, params.detokenize) == (1, 0, True, False)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.structured_outputs) == ([], [], None, None)
    assert params._all_stop_token_ids == set() and params.skip_reading_prefix_cache
    assert {**params.extra_args, KEY: None} == {**export, KEY: None}
    assert params.extra_args[KEY]["transfer_id"] != second.sampling_params.extra_args[KEY]["transfer_id"]
    assert request.sampling_params.extra_args == export and request.request_id == "a"


def test_the_decode_request_has_the_parameters_of_the_client() -> None:
    request = asked(
        max_tokens=40, logprobs=2, extra_args={EXPORT: [[0, 1]], "other": 1}, skip_reading_prefix_cache=True
    )
    answer = {"do_remote_prefill": True, "transfer_id": "t"}
    decode = prompt_request(SendPrompt(D0, "a", "a/d0", request=request, side="decode", kv=answer)).sampling_params
    assert decode.extra_args == {"other": 1, KEY: answer}
    assert (decode.max_tokens, decode.logprobs, decode.skip_reading_prefix_cache) == (40, 2, False)
    alone = prompt_request(SendPrompt(D0, "a", "a/d1", request=request))
    assert alone.request_id == "a/d1" and alone.sampling_params == request.sampling_params
    release = EngineRequests().make(SendKVRelease(D0, "", "x", kv={"transfer_id": "t"}))
    assert release.abort_immediately and release.sampling_params.extra_args == {KEY: {"transfer_id": "t"}}


async def test_pairs_count_the_kv_caches_between_replicas() -> None:
    world = World(prefill=1, text=1)
    await world.start(*"ab")
    await world.rounds(3, P0)
    assert world.orchestrator.pairs() == [Pair(P0, D0, handed=2, fetching=2)]
    await world.rounds(1)
    assert world.orchestrator.pairs() == [Pair(P0, D0, handed=2, fetching=0)]
    world.kill(P0)
    await world.settle()
    await world.up(P0)
    assert world.orchestrator.pairs() == []
    await world.run()
    await world.end()
    assert World().orchestrator.pairs() == []
