"""Actions become engine requests, outputs become events, and nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs

from tests.support.fakes import (
    VOICE_BUDGET,
    Bench,
    Words,
    drained,
    output,
    owners,
    part,
    text_request,
)
from tests.support.loop_clock import stopped_clock
from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.observability.engine_stats import tokens_of
from vllm_omni_ext.plugins.flow import Action, Emit, Extend, Finished, Open, Produced
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.wire.stage_input import CHUNK, INPUT, HiddenStatesRef, PartHeader

FRAMES = np.array([[1, 2], [3, 4]])


def emit(samples: Any = (), *, last: bool = True, note: str | None = None) -> Emit:
    wave = np.asarray(samples, np.float32).reshape(-1)
    return Emit(AudioChunk(samples=wave, sample_rate=24_000, frames=FRAMES, note=note, last=last))


def pipeline(event: Produced) -> list[Action]:
    """Text -> voice (opened with the first token, extended with each) -> sound -> the client."""
    last = event.finish is not None
    match event.stage:
        case "text" if event.tokens == (10,):
            return [Open(stage="voice", prompt=[0, 0], payload=Words(), last=False, stop=(75,))]
        case "text":
            return [Extend(stage="voice", payload=Words(list(event.tokens)), last=last)]
        case "voice":
            return [part([1, 2, 3, 4])] if last else []
        case _:
            return [emit(event.payload[1]), Finished()]


SOUND = torch.tensor([[0.5], [-0.5]])
STEPS: list[tuple[str, tuple[int, ...], Any, str]] = [
    ("text", (10,), None, ""),
    ("text", (11,), None, ""),
    ("voice", (7,), torch.zeros(1), ""),
    ("text", (12,), None, "stop"),
    ("voice", (75,), None, "stop"),
    ("sound", (), SOUND, "stop"),
]
"""One request's outputs from beginning to end."""


async def play(bench: Bench, request_id: str, steps: Any = STEPS) -> None:
    for stage, tokens, tensor, end in steps:
        await bench.produce(stage, request_id, *tokens, tensor=tensor, end=end)


async def end(bench: Bench, *tickets: str) -> None:
    """Abort requests; nothing is held afterwards."""
    await bench.orchestrator.abort(tickets)
    assert bench.orchestrator.held() == 0


# -- the way of a request --------------------------------------------------------------------------


async def test_a_request_is_answered_with_the_sound_of_its_stages() -> None:
    bench = Bench(pipeline)
    ticket, sink = await bench.start("r")
    await play(bench, "r")
    (audio,) = drained(sink)
    assert isinstance(audio, AudioChunk)
    assert (audio.request_id, audio.sample_rate, audio.last, audio.note) == ("external r", 24_000, True, None)
    np.testing.assert_array_equal(audio.samples, np.array([0.5, -0.5], np.float32))
    assert audio.frames.tolist() == [[1, 2], [3, 4]]
    await end(bench, ticket)
    assert [r.aborted for r in bench.replicas.values()] == [[], [], []]
    assert bench.flows[0].events == [
        Produced(
            stage, tokens, None if tensor is None else (stage, tensor), end or None, 0 if stage == "sound" else None
        )
        for stage, tokens, tensor, end in STEPS
    ]


async def test_a_stage_of_chunks_is_sent_an_opening_and_chunks() -> None:
    bench = Bench(pipeline)
    await bench.start("r")
    await play(bench, "r", STEPS[:4])
    opened, *chunks = bench.of("voice/0").added
    params = opened.sampling_params
    assert (opened.request_id, opened.prompt_token_ids, opened.resumable) == ("r", [0, 0], False)
    assert params.extra_args == {INPUT: {"last": False, "payload": {"track": [], "text": [], "again": False}}}
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (0.9, 40, [75])
    assert 75 in params.all_stop_token_ids
    assert (params.output_kind, params.detokenize) == (RequestOutputKind.DELTA, False)
    assert [chunk.sampling_params.extra_args for chunk in chunks if chunk.sampling_params] == [
        {CHUNK: {"prompt_positions": 0, "last": False, "payload": {"track": [11], "text": [], "again": False}}},
        {CHUNK: {"prompt_positions": 0, "payload": {"track": [12], "text": [], "again": False}}},
    ]
    assert all((chunk.request_id, chunk.resumable, chunk.prompt_embeds) == ("r", True, None) for chunk in chunks)


async def test_a_stage_of_parts_is_sent_parts() -> None:
    bench = Bench(pipeline)
    await bench.start("r")
    await play(bench, "r", STEPS[:5])
    (request,) = bench.of("sound/0").added
    assert (request.prompt_token_ids, request.sampling_params) == ([1, 2, 3, 4], None)
    assert request.pooling_params.task == "token_embed"
    assert PartHeader.of(request.pooling_params.extra_kwargs) == PartHeader(stream="r/0", part=0, last=True)


async def test_sampling_given_with_the_request_is_copied() -> None:
    given = SamplingParams(temperature=0.1, stop_token_ids=[5], max_tokens=1000)
    bench = Bench(pipeline)
    await bench.start("r", RequestOptions(modalities=("audio",), params={"voice": given}))
    await play(bench, "r", STEPS[:1])
    params = bench.of("voice/0").added[0].sampling_params
    assert (params.temperature, params.stop_token_ids, params.max_tokens) == (0.1, [5, 75], VOICE_BUDGET)
    assert (given.stop_token_ids, given.extra_args, given.max_tokens) == ([5], None, 1000)


async def test_positions_and_hidden_states_are_sent_with_the_input() -> None:
    ready = HiddenStatesRef(source="tcp://a", name="0/r", count=3)

    def with_hidden_states(event: Produced) -> list[Action]:
        return [
            Open(stage="voice", prompt=[0], prompt_positions=4, hidden_spans=[(1, 4)], last=False, done=0),
            Extend(stage="voice", prompt_positions=1, step_inputs=2, hidden_states=ready),
        ]

    bench = Bench(with_hidden_states)
    await bench.start("r")
    await bench.produce("text", "r", 10)
    opened, chunk = bench.of("voice/0").added
    sent = opened.sampling_params.extra_args[INPUT]
    assert {**sent, "hidden_spans": [list(span) for span in sent["hidden_spans"]]} == {
        "prompt_positions": 4,
        "hidden_spans": [[1, 4]],
        "last": False,
    }
    assert chunk.sampling_params.extra_args == {
        CHUNK: {
            "prompt_positions": 1,
            "step_inputs": 2,
            "last": False,
            "hidden_states": {"source": "tcp://a", "name": "0/r", "count": 3},
        }
    }
    assert (chunk.request_id, chunk.prompt_token_ids, chunk.resumable) == ("r", [0], True)


async def test_a_stage_that_has_ended_the_request_gets_no_more() -> None:
    bench = Bench(pipeline)
    await bench.start("r")
    await play(bench, "r", [*STEPS[:1], STEPS[4], *STEPS[1:2], STEPS[3]])
    assert len(bench.of("voice/0").added) == 1
    assert len(bench.of("sound/0").added) == 1


async def test_a_tensor_does_not_reach_the_client() -> None:
    bench = Bench(pipeline)
    await bench.open(text_request("r"))
    made = output("r", 10, tensor=torch.zeros(2))
    await bench.orchestrator.produced(ReplicaId("text", 0), made)
    assert (made.pooling_output, made.new_token_ids) == (None, [10])


async def test_tokens_after_an_abort_are_not_counted() -> None:
    bench = Bench(pipeline)
    ticket, _ = await bench.start("r")
    sent = bench.of("text/0").added[0].request_id
    inside, late = output(sent, 10), output(sent, 11)
    await bench.orchestrator.produced(ReplicaId("text", 0), inside)
    await bench.orchestrator.abort([ticket])
    assert not await bench.orchestrator.produced(ReplicaId("text", 0), late)
    counted = [tokens_of(EngineCoreOutputs(outputs=[each])).num_generation_tokens for each in (inside, late)]
    assert counted == [1, 0]


# -- the end comes early ---------------------------------------------------------------------------


@pytest.mark.parametrize("done", range(len(STEPS) + 1))
async def test_an_abort_at_any_point_ends_the_request_in_all_its_stages(done: int) -> None:
    bench = Bench(pipeline)
    ticket, sink = await bench.start("r")
    await play(bench, "r", STEPS[:done])
    bound = [stage for stage in bench.pools if bench.replica_of(stage, "r")]
    await bench.orchestrator.abort([ticket, "unknown"])
    assert bench.orchestrator.held() == 0
    aborted = {name.stage: owners(r.aborted) for name, r in bench.replicas.items() if r.aborted}
    assert aborted == {s: ["r"] for s in bound}
    drained(sink)
    sent = [len(r.added) for r in bench.replicas.values()]
    await play(bench, "r", STEPS[done:])  # outputs on their way
    assert [len(r.added) for r in bench.replicas.values()] == sent
    assert drained(sink) == []
    await end(bench, ticket)


async def test_a_text_goes_on_with_the_tokens_it_has() -> None:
    bench = Bench(pipeline, text=2)
    await bench.start("r")
    await play(bench, "r", STEPS[:2])
    first = bench.of("text/0").added[0]
    assert first.prompt_token_ids is not None and first.sampling_params is not None
    await bench.orchestrator.replica_down(ReplicaId("text", 0), "gone")
    (again,) = bench.of("text/1").added
    assert again.prompt_token_ids == [*first.prompt_token_ids, 10, 11]
    assert again.sampling_params is not None and first.sampling_params.max_tokens is not None
    assert again.sampling_params.max_tokens == first.sampling_params.max_tokens - 2


async def test_a_later_stage_goes_on_after_its_own_outputs() -> None:
    bench = Bench(pipeline, voice=2)
    await bench.start("r")
    await play(bench, "r", STEPS[:3])
    await bench.orchestrator.replica_down(ReplicaId("voice", 0), "gone")
    (again,) = bench.of("voice/1").added
    assert (again.request_id, again.prompt_token_ids) == ("r", [9, 9, 9])
    assert again.sampling_params.max_tokens == 40 - 1


@pytest.mark.parametrize(
    ("params", "goes_on"),
    [({"presence_penalty": 0.5}, False), ({"frequency_penalty": 0.5}, False), ({"repetition_penalty": 1.3}, True)],
)
async def test_a_later_stage_whose_penalties_count_its_outputs_fails_once_it_has_begun(
    params: dict[str, Any], goes_on: bool
) -> None:
    """The outputs become prompt, which vLLM counts for `repetition_penalty` alone."""
    bench = Bench(pipeline, voice=2)
    options = RequestOptions(modalities=("audio",), params={"voice": SamplingParams(**params)})
    ticket, sink = await bench.start("r", options)
    await play(bench, "r", STEPS[:3])
    assert len(bench.of("voice/0").added) == 2 and drained(sink) == []
    await bench.orchestrator.replica_down(ReplicaId("voice", 0), "gone")
    assert [each.prompt_token_ids for each in bench.of("voice/1").added] == ([[9, 9, 9]] if goes_on else [])
    errors = drained(sink)
    assert [type(error) for error in errors] == ([] if goes_on else [StageUnavailable])
    assert goes_on or "no other request can continue the tokens that stage 'voice' has generated" in str(errors[0])
    await end(bench, ticket)


async def test_a_text_that_depends_on_more_than_its_tokens_fails_once_it_has_begun() -> None:
    bench = Bench(pipeline, text=3)
    request = text_request("r")
    request.sampling_params.prompt_logprobs = 1
    ticket, sink = await bench.start("r", request=request)
    first = bench.bound("text", "r")
    await bench.orchestrator.replica_down(first.id, "gone")
    second = bench.bound("text", "r")
    assert second.added == first.added and drained(sink) == []
    for token in (10, 11, 12):  # after these the suspect's trial is over
        await bench.produce("text", "r", token)
    drained(sink)
    await bench.orchestrator.replica_down(second.id, "gone")
    (error,) = drained(sink)
    assert isinstance(error, StageUnavailable) and bench.failures == [("r", error)]
    await end(bench, ticket)


async def test_a_stop_string_ends_the_text_and_not_the_sound() -> None:
    """Tokens that the engine makes before it reads the abort are dropped."""
    bench = Bench(pipeline)
    ticket, sink = await bench.start("r")
    await play(bench, "r", STEPS[:2])
    await bench.orchestrator.text_stopped(["r", "unknown"])
    assert bench.of("text/0").aborted == ["r"]
    for token in (90, 91):
        await bench.produce("text", "r", token)
    assert [e for e in bench.flows[0].events if e.stage == "text"][2:] == [Produced("text", finish="stop")]
    await play(bench, "r", [STEPS[2], *STEPS[4:]])
    assert [type(answer) for answer in drained(sink)] == [AudioChunk]
    await end(bench, ticket)


# -- failures --------------------------------------------------------------------------------------


def at_first(answer: Any) -> Any:
    """A script that fails for requests whose first token is 66 and goes the usual way for others."""

    def script(event: Produced) -> list[Action]:
        if event.tokens == (66,):
            if isinstance(answer, Exception):
                raise answer
            return [answer]
        return pipeline(event)

    return script


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (KeyError("frame"), RequestFailed, "frame"),
        (RequestError("prompt: odd", parameter="prompt"), RequestError, "prompt: odd"),
        (Extend(stage="nowhere"), RequestFailed, "nowhere"),
        (part([1], stage="nowhere"), RequestFailed, "nowhere"),
    ],
    ids=str,
)
async def test_a_failure_ends_one_request_alone(answer: Any, kind: type[OmniError], says: str) -> None:
    bench = Bench(at_first(answer))
    (bad, bad_sink), (good, good_sink) = await bench.start("bad"), await bench.start("good")
    await play(bench, "good", STEPS[:2])
    await bench.produce("text", "bad", 66)
    (error,) = drained(bad_sink)
    assert isinstance(error, kind)
    assert says in str(error)
    assert bench.of("text/0").aborted == ["bad"]
    await play(bench, "good", STEPS[2:])
    assert [type(answer) for answer in drained(good_sink)] == [AudioChunk]
    for ticket in (bad, good):
        await end(bench, ticket)


async def test_requests_that_cannot_be_sent_fail_and_are_not_held() -> None:
    bench = Bench(pipeline)
    ticket, sink = await bench.start("sound")
    bench.of("voice/0").error = OSError("no voice")
    await play(bench, "sound", STEPS[:1])
    (error,) = drained(sink)
    assert isinstance(error, RequestFailed) and "no voice" in str(error)
    await end(bench, ticket)
    bench.failures.clear()
    bench.of("text/0").error = OSError("broken pipe")
    await bench.open(text_request("r"))
    ((name, error),) = bench.failures
    assert name == "r" and isinstance(error, RequestFailed) and "broken pipe" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert bench.orchestrator.held() == 0
    await bench.orchestrator.replica_down(ReplicaId("text", 0), "gone")
    await bench.open(text_request("s"))
    name, error = bench.failures[-1]
    assert name == "s" and isinstance(error, StageUnavailable) and "text" in str(error)
    assert bench.orchestrator.held() == 0


async def test_an_abort_while_the_request_is_sent() -> None:
    """The cancelled caller does not stop the effects that were decided."""
    bench = Bench(pipeline, beginning=(AHEAD,))
    opening = asyncio.create_task(bench.start("r"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await bench.orchestrator.abort(["r"])
    for _ in range(9):
        await asyncio.sleep(0)
    for stage in ("text", "voice"):
        replica = bench.of(f"{stage}/0")
        assert [each.request_id for each in replica.added] == replica.aborted == ["r"]
    assert bench.orchestrator.held() == 0


async def test_all_waiting_callers_get_the_shutdown_error() -> None:
    bench = Bench(pipeline)
    sinks = [(await bench.start(name))[1] for name in "ab"]
    error = StageUnavailable("the server is shutting down")
    bench.orchestrator.fail_all(error)
    assert [drained(sink) for sink in sinks] == [[error], [error]]


# -- a stage that is opened with the request -------------------------------------------------------

AHEAD = Open(stage="voice", prompt=[0, 0], payload=Words(text=[1]), last=False)


def follows(event: Produced) -> list[Action]:
    """The rest of the prompt with the first text, the end with the last."""
    if event.stage != "text":
        return [Finished()]
    if event.tokens == (10,):
        return [Extend(stage="voice", payload=Words([11], [7]))]
    return [Extend(stage="voice", last=True)]


def ahead(**more: Any) -> Bench:
    return Bench(follows, beginning=(AHEAD,), **more)


async def test_the_input_deadline_begins_with_the_first_text() -> None:
    bench = ahead(chunk_timeout_s=5.0)
    with stopped_clock() as advance:
        ticket, sink = await bench.start("r")
        await advance(20.0)
        assert sink.empty() and bench.of("voice/0").aborted == []
        await bench.produce("text", "r", 10)
        await advance(5.0)
    (error,) = drained(sink)
    assert "the voice stage got nothing more from the text stage for 5 s" in str(error)
    await end(bench, ticket)


async def test_a_stage_that_was_opened_in_vain_gets_an_abort() -> None:
    def silent(event: Produced) -> list[Action]:
        return [emit(note="nothing to say"), Finished()]

    bench = ahead()
    bench.script = silent
    ticket, sink = await bench.start("r")
    await bench.produce("text", "r", 9, end="stop")
    assert len(drained(sink)) == 1
    assert bench.of("voice/0").aborted == ["r"]
    assert bench.of("text/0").aborted == []
    await end(bench, ticket)


async def test_text_continues_after_a_later_stage_has_ended() -> None:
    bench = ahead()
    await bench.start("r")
    await bench.produce("text", "r", 10)
    await bench.produce("voice", "r", 1, end="length")
    assert bench.of("voice/0").aborted == bench.of("text/0").aborted == []
    assert bench.replica_of("text", "r") is not None


async def test_without_a_stage_to_open_the_request_fails_as_a_whole() -> None:
    bench = ahead(voice=0)
    ticket, sink = await bench.start("r")
    (error,) = drained(sink)
    assert isinstance(error, StageUnavailable) and "voice" in str(error)
    assert bench.of("text/0").aborted == ["r"]
    await end(bench, ticket)
