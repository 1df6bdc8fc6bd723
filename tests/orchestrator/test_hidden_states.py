"""Unclaimed hidden states are freed at their replica; lost ones are computed again by a separate engine request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.orchestrator.test_orchestrator import end
from tests.support.fakes import Bench, output, text_request
from tests.support.loop_clock import settle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests, prompt_request
from vllm_omni_ext.orchestrator.messages import SendOpen, SendPrompt
from vllm_omni_ext.plugins.flow import Action, Finished, Open, Produced, Recompute
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError, pack
from vllm_omni_ext.wire.stage_input import EXPORT, OPEN_END, HiddenStatesRef

READY = HiddenStatesChunkReady(source="tcp://a", name="0/r", first=0, count=3)
LOST = pack(StageError("lost"))
FORGET = ("collective_rpc_async", "forget_hidden_states", None, (["0/r"],))


def ready() -> torch.Tensor:
    return pack(READY)


def speaks(event: Produced) -> list[Action]:
    """Opens the voice at the first token; done when it has spoken, or at the token 5."""
    if event.stage == "voice":
        return [Recompute("text")] if isinstance(event.payload, StageError) else [Finished()]
    opened = Open(stage="voice", prompt=[0], hidden_states=HiddenStatesRef(source="tcp://a", name="0/r", count=3))
    return [Finished()] if 5 in event.tokens else [opened] if event.tokens else []


async def start(made: Bench) -> str:
    ticket, _ = await made.start("r", request=text_request("r", {EXPORT: [[0, 3]]}))
    return ticket


async def test_the_consumer_frees_hidden_states_that_it_took() -> None:
    made = Bench(speaks)
    await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    await made.produce("voice", "r", 1, end="stop")
    await settle()
    assert made.of("text/0").calls == []


async def test_hidden_states_of_which_no_consumer_has_the_location_are_freed() -> None:
    """Two replicas have exported them: the consumer frees one copy only."""
    made = Bench(speaks, text=2)
    await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    holder = made.replica_of("text", "r")
    assert holder is not None
    await made.orchestrator.replica_down(holder, "killed")
    other = f"text/{1 - holder.index}"
    again = msgspec.structs.replace(READY, source="tcp://b", name="9/r")
    await made.produce("text", "r", 1, tensor=pack(again))
    await made.produce("voice", "r", 1, end="stop")
    await settle()
    assert ("collective_rpc_async", "forget_hidden_states", None, (["9/r"],)) in made.of(other).calls


async def test_the_late_output_of_a_stopped_text_frees_nothing_that_is_read() -> None:
    made = Bench(speaks)
    ticket = await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    await made.orchestrator.text_stopped([ticket])
    assert not await made.orchestrator.produced(ReplicaId("text", 0), output("r", 2, tensor=ready()))
    await settle()
    assert made.of("text/0").calls == []
    await end(made, ticket)


async def test_hidden_states_taken_by_a_dead_consumer_are_freed() -> None:
    made = Bench(speaks, voice=2)
    ticket = await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    await made.produce("text", "r", end="length")
    gone = made.replica_of("voice", "r")
    assert gone is not None
    await made.orchestrator.replica_down(gone, "killed")
    await made.produce("voice", "r", 1, end="stop")
    await settle()
    assert made.of("text/0").calls == [FORGET]
    await end(made, ticket)


@pytest.mark.parametrize(
    ("first", "tokens"),
    [("output", []), ("output", [1]), ("output", [5]), ("abort", [])],
    ids=["aborted", "aborted with an open consumer", "without a consumer", "announced after the abort"],
)
async def test_unclaimed_hidden_states_are_freed(first: str, tokens: list[int]) -> None:
    made = Bench(speaks)
    ticket = await start(made)
    if first == "abort":
        await end(made, ticket)
    await made.produce("text", "r", *tokens, tensor=ready())
    await end(made, ticket)
    await settle()
    assert made.of("text/0").calls == [FORGET]


async def test_recomputing_hidden_states_produces_no_tokens() -> None:
    made = Bench(speaks)
    ticket = await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    await made.produce("voice", "r", tensor=LOST, end="error")
    first, again = made.of("text/0").added
    assert again.request_id != first.request_id and again.prompt_token_ids == first.prompt_token_ids
    assert again.sampling_params is not None and again.sampling_params.extra_args == {EXPORT: [[0, 3]]}
    events = made.flows[0].events
    before = len(events)
    replica, text = ReplicaId("text", 0), again.request_id
    for finish in ("", "length"):
        assert not await made.orchestrator.produced(replica, output(text, 7, tensor=ready(), end=finish))
    assert [(e.stage, e.tokens, e.payload, e.finish) for e in events[before:]] == [("text", (), READY, None)] * 2
    await end(made, ticket)


async def read_again() -> tuple[Bench, str, str]:
    """A bench whose request recomputes lost hidden states, its ticket, and the engine request that does so."""
    made = Bench(speaks)
    ticket = await start(made)
    await made.produce("text", "r", 1, tensor=ready())
    await made.produce("voice", "r", tensor=LOST, end="error")
    return made, ticket, made.of("text/0").added[-1].request_id


async def test_a_recomputation_moves_to_another_replica_also_if_its_text_could_not() -> None:
    def recomputes(event: Produced) -> list[Action]:
        return [Recompute("text", tokens=(1, 2))] if isinstance(event.payload, StageError) else speaks(event)

    made = Bench(recomputes, text=2)
    request = text_request("r", {EXPORT: [[0, 3]]})
    assert request.sampling_params is not None
    request.sampling_params.frequency_penalty = 1.0
    ticket, _ = await made.start("r", request=request)
    await made.produce("text", "r", 1, tensor=ready())
    await made.produce("text", "r", 2, end="length")
    await made.produce("voice", "r", tensor=LOST, end="error")
    (holder,) = [
        name
        for name in ("text/0", "text/1")
        if made.of(name).added[-1:] and "again" in made.of(name).added[-1].request_id
    ]
    await made.orchestrator.replica_down(ReplicaId.parse(holder), "killed")
    other = made.of({"text/0": "text/1", "text/1": "text/0"}[holder]).added[-1]
    assert "again" in other.request_id and other.prompt_token_ids[-2:] == [1, 2]
    await end(made, ticket)


async def test_an_abort_ends_the_recomputation_of_a_prompt() -> None:
    made, ticket, again = await read_again()
    await made.orchestrator.abort([ticket])
    assert set(made.of("text/0").aborted) == {"r", again}
    assert made.orchestrator.held() == 0


def test_recomputing_a_prompt_generates_one_token() -> None:
    text = text_request("r")
    text.sampling_params = SamplingParams(max_tokens=50, min_tokens=9, logprobs=3, temperature=0.7)
    again = prompt_request(SendPrompt(ReplicaId("text", 0), "r", "r/again/0", request=text, recompute=True))
    params: Any = again.sampling_params
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.temperature) == (1, 0, None, 0.7)
    assert text.sampling_params.max_tokens == 50 and (text.request_id, again.request_id) == ("r", "r/again/0")


@pytest.mark.parametrize("limit", [50, 2])
def test_recomputing_a_prompt_with_its_answer(limit: int) -> None:
    """Also if the answer has all tokens that the request allows."""
    text = text_request("r")
    text.sampling_params = SamplingParams(max_tokens=limit)
    prompt = list(text.prompt_token_ids or ())
    send = SendPrompt(ReplicaId("text", 0), "r", "r/again/0", request=text, recompute=True, tokens=(7, 8))
    again = prompt_request(send)
    assert again.prompt_token_ids == [*prompt, 7, 8] and again.sampling_params.max_tokens == 1  # type: ignore[union-attr]


def test_a_request_that_a_flow_opens_exports_the_ranges_of_open() -> None:
    def extra(**more: Any) -> tuple[Any, bool | None]:
        send = SendOpen(
            ReplicaId("text", 0), "r", "r/text", action=Open(stage="text", prompt=[1, 2], **more), params=None, budget=1
        )
        params: Any = EngineRequests().make(send).sampling_params
        return params.extra_args.get(EXPORT), params.skip_reading_prefix_cache

    assert extra(export=((0, OPEN_END),)) == ([[0, OPEN_END]], True)
    assert extra()[0] is None and not extra()[1]


async def test_the_end_of_a_request_ends_the_recomputation_and_frees_its_hidden_states() -> None:
    made, ticket, again = await read_again()
    await made.produce("text", "r", 5, end="stop")
    assert made.of("text/0").aborted == [again]
    assert not await made.orchestrator.produced(ReplicaId("text", 0), output(again, 7, tensor=ready()))
    await settle()
    assert made.of("text/0").calls == [FORGET]
    await end(made, ticket)
