"""Qwen2.5-Omni's flows with any failure at any step: the sound depends on the prompt and the text alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from vllm_omni_ext.connectors.chunks import ALL, ChunkSchedule
from vllm_omni_ext.model_plugins.qwen2_5_omni.flow import CodecIds, ReadAloudFlow, SpeechFlow, SpeechPlan
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import MEDIA, Token2WavParams, Utterance
from vllm_omni_ext.plugins.flow import Fail, Open, Produced, Recompute
from vllm_omni_ext.testing import Reply, Work, check_flow
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError

IMAGE = 9
PROMPT = [10, IMAGE, IMAGE, 11, 12]
REPLY = (41, 42, 43, 44)
IDS = CodecIds(pad=900, begin=901, end=902, mask=903)
VOICE = 77
AFTER = 3
"""Codes after the last text token."""

DELAY = 2
"""Codes that must follow a code in the simulated token2wav."""

SCHEDULES = [ChunkSchedule((ALL,)), ChunkSchedule((1,)), ChunkSchedule((1, 2))]


def speech() -> SpeechPlan:
    utterance = Utterance(speaker="Ethan", params=Token2WavParams(seed=3))
    return SpeechPlan(
        prompt=PROMPT,
        media=frozenset({IMAGE}),
        voice=VOICE,
        ids=IDS,
        utterance=utterance,
        delay=DELAY,
        sample_rate=24_000,
    )


def state(position: int, token: int) -> int:
    return 1000 * position + token


def thinker(work: Work) -> Iterator[Reply | None]:
    """Export the hidden states of two positions a step, and the last ones with the first token."""
    message = work.take()
    aloud = isinstance(message, Open)
    known = list(message.prompt) if aloud else [*PROMPT, *work.resumed]
    assert not aloud or message.export == ((0, len(message.prompt)),)
    states = [state(i, token) for i, token in enumerate(known)]
    for start in range(0, len(states) - 2, 2):
        yield Reply(hidden_states=states[start : start + 2])
    rest = states[len(states) - len(states) % 2 - 2 * (len(states) % 2 == 0) :]
    if aloud or work.recompute:
        yield Reply(tokens=(0,), hidden_states=rest, finish="length")
        return
    index = len(work.resumed)
    while True:
        last = index == len(REPLY) - 1
        yield Reply(tokens=(REPLY[index],), hidden_states=rest, finish="stop" if last else None)
        rest = [state(len(PROMPT) + index, REPLY[index])]
        index += 1
        if last:
            return


def code(text: list[int], reply: list[int], hidden: list[int], codes: list[int]) -> int:
    """The next code; it depends on all input so far and on all codes before."""
    known = [*text, *reply[: len(codes) + 1], *hidden[: len(text) + min(len(reply), len(codes) + 1)], *codes]
    return sum((i + 1) * token for i, token in enumerate(known)) % 97


def talker(work: Work) -> Iterator[Reply | None]:
    opened = work.take()
    payload, codes, hidden = opened.payload, list(opened.payload.codes), list[int]()
    assert payload.voice == VOICE and opened.stop == (IDS.pad, IDS.end)
    assert opened.prompt == [IDS.mask] * len(PROMPT) + [IDS.pad, IDS.begin, *codes] and opened.done == len(codes)
    reply, ended, last, ref = list(payload.reply), payload.ended, opened.last, opened.hidden_states
    arrived, steps = opened.prompt_positions, opened.step_inputs
    while True:
        while (more := work.take()) is not None:
            reply += more.payload.reply if more.payload else ()
            ended |= bool(more.payload and more.payload.ended)
            arrived, steps, last, ref = (
                arrived + more.prompt_positions,
                steps + more.step_inputs,
                last or more.last,
                more.hidden_states or ref,
            )
        if ref is not None and len(hidden) < ref.count:
            if (stored := work.read(ref)) is None:
                yield Reply(payload=StageError("the hidden states are gone"), finish="error")
                return
            hidden += stored[len(hidden) :]
        assert arrived + steps == len(PROMPT) + 1 + len(reply) and last == ended
        if (
            arrived < len(opened.prompt) - opened.done
            or len(hidden) <= len(PROMPT)
            or (len(codes) > steps and not last)
        ):
            yield None
            continue
        assert len(hidden) >= len(PROMPT) + min(len(reply), len(codes) + 1), "a hidden state is missing"
        if last and len(codes) == len(reply) + AFTER:
            yield Reply(tokens=(IDS.end,), finish="stop")
            return
        codes.append(code(payload.text, reply, hidden, codes))
        yield Reply(tokens=(codes[-1],))


def token2wav(work: Work) -> Iterator[Reply | None]:
    codes: list[int] = []
    done = 0
    first = True
    while True:
        if (part := work.take()) is None:
            yield None
            continue
        assert (part.payload == speech().utterance) == first
        first = False
        codes += part.prompt
        final = len(codes) if part.last else max(done, len(codes) - DELAY)
        wave = np.cumsum(codes)[done:final]
        done = final
        yield Reply(payload=torch.from_numpy(wave).float(), finish="stop")


STAGES = {"thinker": thinker, "talker": talker, "token2wav": token2wav}


def spoken() -> np.ndarray:
    """The sound of the reply without its last token."""
    text = [MEDIA if token == IMAGE else token for token in PROMPT]
    reply, codes = list(REPLY[:-1]), list[int]()
    hidden = [state(i, token) for i, token in enumerate([*PROMPT, *reply])]
    while len(codes) < len(reply) + AFTER:
        codes.append(code(text, reply, hidden, codes))
    return np.cumsum(codes).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "frames"),
    [(SCHEDULES[0], SCHEDULES[0]), (SCHEDULES[1], ChunkSchedule((1, 2), 50.0)), (SCHEDULES[2], SCHEDULES[1])],
)
def test_a_reply_is_spoken_alike_with_any_failure(text: ChunkSchedule, frames: ChunkSchedule) -> None:
    answer = check_flow(partial(SpeechFlow, speech(), text=text, frames=frames), STAGES, frontend="thinker")
    assert answer.text == REPLY
    np.testing.assert_array_equal(answer.outputs["audio"], spoken())


@pytest.mark.slow
@pytest.mark.parametrize("text", SCHEDULES[:2])
def test_a_text_is_read_aloud_alike_with_any_failure(text: ChunkSchedule) -> None:
    flow = partial(ReadAloudFlow, speech(), REPLY[:-1], text=text, frames=SCHEDULES[2])
    answer = check_flow(flow, STAGES, frontend="thinker")
    assert answer.text == ()
    np.testing.assert_array_equal(answer.outputs["audio"], spoken())


def test_a_talker_that_ends_early_gets_no_more_hidden_states() -> None:
    """It has freed them, so the thinker's later steps have none to announce."""
    flow = SpeechFlow(speech(), text=SCHEDULES[1], frames=SCHEDULES[0])
    flow.begin()
    ready = HiddenStatesChunkReady(source="a", name="r", first=0, count=len(PROMPT))
    flow.handle(Produced("thinker", (REPLY[0],), ready))
    flow.handle(Produced("talker", (5,), None, "length"))
    assert flow.handle(Produced("thinker", (REPLY[1],))) == []
    assert flow.handle(Produced("thinker", (REPLY[2],), None, "stop")) == []


def exported(source: str, first: int, count: int, start: int = 0) -> HiddenStatesChunkReady:
    return HiddenStatesChunkReady(source=source, name="r", first=first, count=count, start=start)


def lost() -> Produced:
    return Produced("talker", (), StageError("gone"), "error")


def test_the_talker_waits_for_nothing_while_only_the_prefill_replica_is_lost() -> None:
    """The decode replica goes on: it exports nothing of the prompt. The talker is opened when all is computed again."""
    size = len(PROMPT)
    flow = SpeechFlow(speech(), text=SCHEDULES[1], frames=SCHEDULES[0])
    flow.begin()
    flow.handle(Produced("thinker", (), exported("prefill", 0, size)))
    flow.handle(Produced("thinker", REPLY[:2], exported("decode", size, 1, start=size)))
    assert flow.handle(lost()) == []
    for number, token in enumerate(REPLY[2:-1]):
        assert flow.handle(Produced("thinker", (token,), exported("decode", size + 1 + number, 1, start=size))) == []
    (again,) = flow.handle(Produced("thinker", REPLY[-1:], None, "stop"))
    assert again == Recompute("thinker", tokens=tuple(REPLY[:-1]))
    (opened,) = flow.handle(Produced("thinker", (), exported("new", 0, size + len(REPLY) - 1)))
    assert isinstance(opened, Open) and opened.last
    assert opened.hidden_states is not None and opened.hidden_states.source == "new"


def test_a_text_read_aloud_is_computed_again_after_a_second_loss() -> None:
    flow = ReadAloudFlow(speech(), REPLY[:-1], text=SCHEDULES[0], frames=SCHEDULES[0])
    flow.begin()
    whole = len(PROMPT) + len(REPLY) - 1
    for source in "ABC":
        flow.handle(Produced("thinker", (), exported(source, 0, whole)))
        if source != "C":
            assert flow.handle(lost()) == [], "decode is to end first"
        actions = flow.handle(Produced("thinker", (0,), None, "length"))
        assert [type(action) for action in actions] == ([Open] if source != "C" else [])
    assert flow.handle(lost())[-1].stage == "thinker"


@pytest.mark.parametrize(("retry", "status"), [(False, 500), (True, 503)])
def test_an_utterance_for_which_token2wav_has_no_room_may_be_requested_again(retry: bool, status: int) -> None:
    flow = SpeechFlow(speech(), text=SCHEDULES[1], frames=SCHEDULES[0])
    flow.begin()
    (fail,) = flow.handle(Produced("token2wav", payload=StageError("no room", retry=retry), part=0))
    assert isinstance(fail, Fail) and fail.status == status and "no room" in fail.message
