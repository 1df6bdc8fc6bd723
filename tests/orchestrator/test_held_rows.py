"""Rows that nobody takes are freed where they are kept; lost ones are made again by a request of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.orchestrator.fakes import Bench, output, text_request
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.flow import Action, Finished, Open, Produced, Repeat
from vllm_omni_ext.orchestrator.repeats import Repeats
from vllm_omni_ext.orchestrator.requests import TextRequest
from vllm_omni_ext.wire.handoff import EXPORT
from vllm_omni_ext.wire.rows import Notice

NOTICE = Notice(source="tcp://a", name="0/r", first=0, count=3)
FORGET = ("collective_rpc_async", "forget_rows", None, (["0/r"],))


def speaks(event: Produced) -> list[Action]:
    """Opens the voice at the first token; done when it has spoken, or at the token 5."""
    if event.stage == "voice":
        return [Repeat("text")] if event.payload == "lost" else [Finished()]
    return [Finished()] if 5 in event.tokens else [Open("voice", [0])] if event.tokens else []


def bench(**counts: int) -> Bench:
    made = Bench(speaks, **counts)

    def export(request: TextRequest) -> None:
        request.extra_args[EXPORT] = [[0, 3]]

    made.plugin.change = export
    made.plugin.decode = lambda stage, tensor: tensor  # type: ignore[method-assign]
    return made


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_the_voice_has_taken_it_frees_itself() -> None:
    made = bench()
    await made.start("r")
    await made.produce("text", "r", 1, tensor=NOTICE)
    await made.produce("voice", "r", 1, end="stop")
    await settle()
    assert made.of("text/0").calls == []


async def test_what_one_of_two_voices_had_taken_when_it_died_is_freed() -> None:
    """The other one's leaving frees nothing, as long as the first is not known to be gone."""
    made = bench(voice=2)
    ticket, _ = await made.start("r")
    await made.produce("text", "r", 1, tensor=NOTICE)
    await made.produce("text", "r", end="length")
    gone = made.pools["voice"].replica_of("r")
    assert gone is not None
    await made.orchestrator.replica_down(gone, "killed")
    await made.produce("voice", "r", 1, end="stop")
    await settle()
    assert made.of("text/0").calls == [FORGET]
    await made.orchestrator.withdraw(ticket)
    assert made.orchestrator.held() == 0


@pytest.mark.parametrize("voice", [False, True])
async def test_an_aborted_requests_rows_are_freed(voice: bool) -> None:
    made = bench()
    ticket, _ = await made.start("r")
    await made.produce("text", "r", *([1] if voice else []), tensor=NOTICE)
    await made.orchestrator.withdraw(ticket)
    await settle()
    assert made.of("text/0").calls == [FORGET]
    assert made.orchestrator.held() == 0


async def test_a_request_that_ends_without_a_voice_frees_its_rows() -> None:
    made = bench()
    await made.start("r")
    await made.produce("text", "r", 5, tensor=NOTICE)
    await settle()
    assert made.of("text/0").calls == [FORGET]


async def test_a_notice_that_comes_too_late_frees_what_it_tells_of() -> None:
    made = bench()
    ticket, _ = await made.start("r")
    await made.orchestrator.withdraw(ticket)
    await made.produce("text", "r", tensor=NOTICE)
    await settle()
    assert made.of("text/0").calls == [FORGET]


async def test_lost_rows_are_made_again_and_nobody_hears_what_is_said() -> None:
    made = bench()
    ticket, _ = await made.start("r")
    await made.produce("text", "r", 1, tensor=NOTICE)
    await made.produce("voice", "r", tensor="lost", end="error")
    first, again = made.of("text/0").added
    assert again.request_id != first.request_id and again.prompt_token_ids == first.prompt_token_ids
    assert again.sampling_params is not None and again.sampling_params.extra_args == {EXPORT: [[0, 3]]}
    events = made.plugin.flows[0].events
    before = len(events)
    replica, text = ReplicaId("text", 0), again.request_id
    for end in ("", "length"):
        assert not await made.orchestrator.produced(replica, output(text, 7, tensor=NOTICE, end=end))
    assert [(e.stage, e.tokens, e.payload, e.finish) for e in events[before:]] == [("text", (), NOTICE, None)] * 2
    await made.orchestrator.withdraw(ticket)
    assert made.orchestrator.held() == 0


async def read_again() -> tuple[Bench, str, str]:
    """A bench whose request lost its rows, so that its prompt is read again: the ticket, and that engine request."""
    made = bench()
    ticket, _ = await made.start("r")
    await made.produce("text", "r", 1, tensor=NOTICE)
    await made.produce("voice", "r", tensor="lost", end="error")
    return made, ticket, made.of("text/0").added[-1].request_id


async def test_a_prompt_that_is_read_again_ends_with_its_request() -> None:
    made, ticket, again = await read_again()
    await made.orchestrator.withdraw(ticket)
    assert set(made.of("text/0").aborted) == {"r", again}
    assert made.orchestrator.held() == 0


def test_it_asks_for_one_token_and_nothing_else() -> None:
    text = text_request("r")
    text.sampling_params = SamplingParams(max_tokens=50, min_tokens=9, logprobs=3, temperature=0.7)
    repeats = Repeats()
    again: Any = repeats.request("r", text).sampling_params
    assert (again.max_tokens, again.min_tokens, again.logprobs, again.temperature) == (1, 0, None, 0.7)
    assert text.sampling_params.max_tokens == 50
    (engine_id,) = repeats.of(["r"])
    assert repeats.of(["other"]) == [] and repeats.owner(engine_id) == "r"
    repeats.finished(engine_id)
    assert repeats.of(["r"]) == [] and len(repeats) == 0


async def test_a_request_that_ends_first_stops_the_reading_and_frees_what_came_of_it() -> None:
    made, ticket, again = await read_again()
    await made.produce("text", "r", 5, end="stop")
    assert made.of("text/0").aborted == [again]
    assert not await made.orchestrator.produced(ReplicaId("text", 0), output(again, 7, tensor=NOTICE))
    await settle()
    assert made.of("text/0").calls == [FORGET]
    await made.orchestrator.withdraw(ticket)
    assert made.orchestrator.held() == 0
