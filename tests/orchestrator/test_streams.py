"""Streams of parts go to one replica and end with their request; late input ends a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.orchestrator.test_orchestrator import emit, end
from tests.support.fakes import Bench, Words, drained, output, part
from tests.support.loop_clock import stopped_clock
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.flow import Action, Emit, Extend, Finished, Open, Produced
from vllm_omni_ext.wire.envelope import StageError, pack
from vllm_omni_ext.wire.stage_input import END, PartHeader

PARTS = 4


class Script:
    """Text opens the voice; each output of the voice is a part for the sound; each answer goes to the client."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, event: Produced) -> list[Action]:
        match event.stage:
            case "text":
                return [Open(stage="voice", prompt=[0])]
            case "voice":
                number, self.given = self.given, self.given + 1
                return [part([number] if number < PARTS - 1 else [], number, last=number == PARTS - 1)]
            case _:
                last = event.part == PARTS - 1
                action: Emit = emit(event.payload[1], last=last)
                return [action, Finished()] if last else [action]


SOUND = torch.zeros(2, 1)


async def begun(bench: Bench, name: str = "r") -> tuple[str, asyncio.Queue[Any]]:
    ticket, sink = await bench.start(name)
    await bench.produce("text", name, 10, end="stop")
    return ticket, sink


async def speak(bench: Bench, parts: int, name: str = "r") -> None:
    for _ in range(parts):
        await bench.produce("voice", name, 7)


async def answer(bench: Bench, parts: int, name: str = "r") -> None:
    for _ in range(parts):
        await bench.produce("sound", name, tensor=SOUND, end="stop")


def marks(bench: Bench, replica: str = "sound/0") -> list[PartHeader]:
    return [PartHeader.of(r.pooling_params.extra_kwargs) for r in bench.of(replica).added if r.pooling_params]


async def test_a_request_is_bound_until_its_last_part_is_answered() -> None:
    bench = Bench(Script(), sound=3)
    ticket, sink = await begun(bench)
    await speak(bench, 2)
    where = bench.bound("sound", "r")
    await answer(bench, 2)
    assert bench.bound("sound", "r") is where
    await speak(bench, PARTS - 2)
    await answer(bench, PARTS - 2)
    assert bench.replica_of("sound", "r") is None
    sent = marks(bench, str(where.id))
    assert sent == [PartHeader(stream="r/0", part=i, last=i == PARTS - 1, empty=i == PARTS - 1) for i in range(PARTS)]
    assert [request.prompt_token_ids for request in where.added] == [[0], [1], [2], [0]]
    assert len({request.request_id for request in where.added}) == PARTS
    assert [piece.last for piece in drained(sink)] == [False] * (PARTS - 1) + [True]
    await end(bench, ticket)
    assert where.aborted == []


@pytest.mark.parametrize("given", range(1, PARTS + 1))
@pytest.mark.parametrize("answered", range(PARTS))
async def test_an_abort_ends_the_parts_and_the_stream(given: int, answered: int) -> None:
    bench = Bench(Script())
    ticket, sink = await begun(bench)
    await speak(bench, given)
    await answer(bench, min(answered, given))
    on_the_way = [r.request_id for r in bench.of("sound/0").added][min(answered, given) :]
    await bench.orchestrator.abort([ticket])
    assert bench.of("sound/0").aborted == on_the_way
    assert marks(bench)[-1] == PartHeader.end("r/0")
    assert bench.orchestrator.held() == 0
    drained(sink)
    for engine_id in [*on_the_way, bench.of("sound/0").added[-1].request_id]:
        await bench.orchestrator.produced(ReplicaId("sound", 0), output(engine_id, tensor=SOUND, end="stop"))
    assert drained(sink) == []


async def test_the_text_goes_on_when_all_other_outputs_end() -> None:
    bench = Bench(Script())
    ticket, sink = await bench.start("r")
    await bench.produce("text", "r", 10)
    await speak(bench, 2)
    await answer(bench, 1)
    (voice,), (_, second) = bench.of("voice/0").added, bench.of("sound/0").added
    await bench.orchestrator.text_only([ticket, "unknown"])
    assert bench.of("voice/0").aborted == [voice.request_id]
    assert bench.of("sound/0").aborted == [second.request_id]
    assert marks(bench)[-1] == PartHeader.end("r/0")
    assert bench.of("text/0").aborted == []
    drained(sink)
    await bench.orchestrator.text_only([ticket])
    await bench.produce("text", "r", 11, end="stop")
    assert drained(sink) == []
    await end(bench, ticket)
    assert bench.orchestrator.held() == 0


async def test_a_lost_replica_means_a_new_stream() -> None:
    bench = Bench(Script(), sound=2)
    ticket, sink = await begun(bench)
    await speak(bench, 2)
    first = bench.bound("sound", "r")
    await answer(bench, 1)
    await bench.orchestrator.replica_down(first.id, "gone")
    (again,) = bench.bound("sound", "r").added
    assert PartHeader.of(again.pooling_params.extra_kwargs) == PartHeader(stream="r/1", part=0, last=True)
    assert again.request_id not in [request.request_id for request in first.added]
    await bench.orchestrator.produced(first.id, output(first.added[1].request_id, tensor=SOUND, end="stop"))
    assert len(drained(sink)) == 1  # outputs of the old stream on their way are dropped
    await end(bench, ticket)


@pytest.mark.parametrize("finish", ["stop", "error"])
async def test_a_stream_that_its_stage_has_dropped_is_sent_again(finish: str) -> None:
    """A pooling stage ends the part with "stop", a plain stage with "error"."""
    bench = Bench(Script())
    ticket, sink = await begun(bench)
    await speak(bench, 3)
    await answer(bench, 1)
    replica = bench.bound("sound", "r")
    lost = pack(StageError("part 1 came for a stream that is not open", lost=True))
    await bench.produce("sound", "r", tensor=lost, end=finish)
    *_, late, again = replica.added
    assert PartHeader.of(again.pooling_params.extra_kwargs) == PartHeader(stream="r/1", part=0, last=True)
    assert bench.bound("sound", "r") is replica and replica.aborted == [] and bench.failures == []
    await bench.orchestrator.produced(replica.id, output(late.request_id, tensor=lost, end=finish))
    assert len(replica.added) == 4 and len(drained(sink)) == 1  # the answer of part 0, and no error
    await bench.orchestrator.produced(replica.id, output(again.request_id, tensor=SOUND, end="stop"))
    assert len(drained(sink)) == 1
    await end(bench, ticket)


async def test_a_first_part_for_which_there_is_no_stream_is_the_flows_to_handle() -> None:
    bench = Bench(Script())
    ticket, _ = await begun(bench)
    await speak(bench, 1)
    lost = StageError("part 0 came for a stream that is not open", lost=True)
    await bench.produce("sound", "r", tensor=pack(lost), end="stop")
    assert bench.flows[0].events[-1].payload == lost
    assert [mark.part for mark in marks(bench)] == [0, END]  # this flow fails
    await end(bench, ticket)


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_part_that_fails_ends_its_stream(finish: str) -> None:
    bench = Bench(Script())
    ticket, _ = await begun(bench)
    await speak(bench, 1)
    await bench.produce("sound", "r", tensor=SOUND, end=finish)
    assert bench.flows[0].events[-1].finish == finish
    assert bench.replica_of("sound", "r") is None
    await end(bench, ticket)


LIMIT_S = 5.0


def owing(event: Produced) -> list[Action]:
    if event.stage == "text":
        opening = event.tokens == (10,)
        last = event.finish is not None
        more = Extend(stage="voice", payload=Words(list(event.tokens)), last=last)
        return [Open(stage="voice", prompt=[0], last=last) if opening else more]
    return []


async def test_late_input_of_a_stage_ends_its_request() -> None:
    bench = Bench(owing, chunk_timeout_s=LIMIT_S)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        await bench.produce("text", "r", 10)
        await advance(LIMIT_S)
    (error,) = drained(sink)
    assert isinstance(error, RequestFailed)
    assert str(error) == "the voice stage got nothing more from the text stage for 5 s (timeouts.chunk_timeout_s)"
    assert bench.of("voice/0").aborted == bench.of("text/0").aborted == ["r"]
    await end(bench, ticket)


async def test_a_late_part_of_a_stream_ends_its_request() -> None:
    bench = Bench(Script(), chunk_timeout_s=LIMIT_S)
    with stopped_clock() as advance:
        ticket, sink = await begun(bench)
        await speak(bench, 1)
        await advance(LIMIT_S)
    (error,) = drained(sink)
    assert "the sound stage got nothing more from the voice stage" in str(error)
    assert marks(bench)[-1].part == END
    await end(bench, ticket)


async def test_each_chunk_begins_the_input_deadline_again() -> None:
    bench = Bench(owing, chunk_timeout_s=LIMIT_S)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        for token in range(10, 16):
            await bench.produce("text", "r", token)
            await advance(LIMIT_S - 0.1)
        assert drained(sink) == []
        await advance(0.1)
    (error,) = drained(sink)
    assert isinstance(error, RequestFailed)
    await bench.orchestrator.abort([ticket])


@pytest.mark.parametrize("how", ["last chunk", "end of the stage", "loss"])
async def test_a_stage_that_expects_no_input_has_no_deadline(how: str) -> None:
    bench = Bench(owing, voice=2, chunk_timeout_s=LIMIT_S)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        await bench.produce("text", "r", 10)
        match how:
            case "last chunk":
                await bench.produce("text", "r", 11, end="stop")
            case "end of the stage":
                await bench.produce("voice", "r", 7, end="length")
            case _:  # replayed with everything it is owed
                await bench.orchestrator.replica_down(ReplicaId("voice", 0), "gone")
                await bench.produce("text", "r", 11, end="stop")
        await advance(4 * LIMIT_S)
    assert drained(sink) == []
    await end(bench, ticket)


async def test_a_request_that_waits_for_a_replica_has_no_input_deadline() -> None:
    """The wait for a replica has a limit of its own; afterwards input is due as before."""
    bench = Bench(owing, chunk_timeout_s=LIMIT_S, wait_s=6 * LIMIT_S)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        await bench.produce("text", "r", 10)
        bench.flows[0].replay = lambda stage: [Open(stage=stage, prompt=[9], last=False)]
        bench.orchestrator.announce(ReplicaId("voice", 0))
        await bench.orchestrator.replica_down(ReplicaId("voice", 0), "gone")
        await advance(4 * LIMIT_S)
        assert drained(sink) == []
        await bench.orchestrator.replica_up(bench.of("voice/0"))
        await advance(LIMIT_S)
    (error,) = drained(sink)
    assert str(error).startswith("the voice stage got nothing more from the text stage")
    await end(bench, ticket)


@pytest.mark.parametrize("stage", ["text", "voice"])
async def test_a_sleep_does_not_count_as_a_wait_for_input(stage: str) -> None:
    """Afterwards most of the limit is left, whenever the sleep ends."""
    bench, asleep = Bench(owing, chunk_timeout_s=LIMIT_S), ReplicaId(stage, 0)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        for steps in (3, 9, 29, 40):  # of a tenth of the limit
            await bench.produce("text", "r", 10 if steps == 3 else 11)
            await advance(0.1 * LIMIT_S)
            bench.pools[stage].mark_asleep(asleep)
            for _ in range(steps):
                await advance(0.1 * LIMIT_S)
            bench.pools[stage].mark_awake(asleep)
            await advance(0.7 * LIMIT_S)
            assert drained(sink) == []
        await advance(0.3 * LIMIT_S)
    (error,) = drained(sink)
    assert str(error).startswith("the voice stage got nothing more from the text stage")
    await end(bench, ticket)


async def test_a_sleep_is_noticed_however_late_the_timer_is() -> None:
    bench = Bench(owing, chunk_timeout_s=LIMIT_S)
    ticket, sink = await bench.start("r")
    with stopped_clock() as advance:
        await bench.produce("text", "r", 10)
        bench.pools["text"].mark_asleep(ReplicaId("text", 0))
        await advance(4 * LIMIT_S)
        bench.pools["text"].mark_awake(ReplicaId("text", 0))
    assert drained(sink) == []
    await end(bench, ticket)


async def test_a_part_may_be_answered_several_times() -> None:
    bench = Bench(Script())
    ticket, sink = await begun(bench)
    await speak(bench, 1)
    (sent,) = bench.of("sound/0").added
    for finish in ("", "", "stop"):
        await bench.orchestrator.produced(ReplicaId("sound", 0), output(sent.request_id, tensor=SOUND, end=finish))
    heard = [event for event in bench.flows[0].events if event.stage == "sound"]
    assert [(event.part, event.finish) for event in heard] == [(0, None), (0, None), (0, "stop")]
    assert len(drained(sink)) == 3 and bench.replica_of("sound", "r") is not None
    await bench.orchestrator.produced(ReplicaId("sound", 0), output(sent.request_id, tensor=SOUND))
    assert drained(sink) == [], "nothing follows its last answer"
    await end(bench, ticket)
