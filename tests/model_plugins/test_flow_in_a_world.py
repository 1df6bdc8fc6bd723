"""Qwen3-Omni's flows with any failure at any step: the sound depends on the prompt and the text alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.examples import examples
from tests.support.talker_ids import AUDIO, HEADER, IDS, IMAGE, SYSTEM, turn, user
from vllm_omni_ext.connectors.chunks import ALL, ChunkSchedule
from vllm_omni_ext.model_plugins.qwen3_omni import flow as qwen3_flow
from vllm_omni_ext.model_plugins.qwen3_omni.flow import ReadAloudFlow, SpeechFlow, SpeechPlan
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import find_parts
from vllm_omni_ext.plugins.flow import Finish
from vllm_omni_ext.testing import Reply, Stage, Work, check_flow
from vllm_omni_ext.wire.envelope import StageError

PROMPT = turn(SYSTEM, 30) + user(20, 21) + HEADER
REPLY = (41, 42, 43, 44)
AFTER = 2
"""Frames after the last text token."""

GROUPS = 2
SCHEDULES = [ChunkSchedule((ALL,)), ChunkSchedule((1,)), ChunkSchedule((1, 2))]
PAIRS = [(text, SCHEDULES[(i + shift) % 3]) for shift in range(3) for i, text in enumerate(SCHEDULES)]
"""All of two schedules; the first three have each of them on either side."""


MEDIA = turn(SYSTEM, 30) + user(20, AUDIO, AUDIO, 21, IMAGE) + HEADER
"""A prompt with three multimodal positions, in two ranges."""

HIDDEN = [311, 312, 313]
"""The thinker's hidden states of these positions."""


def speech(prompt: list[int] = PROMPT) -> SpeechPlan:
    parts = find_parts(prompt, IDS)
    assert parts is not None
    return SpeechPlan(prompt=prompt, parts=parts, voice="ethan", ids=IDS, sample_rate=24_000)


def frame(text: list[int], track: list[int], frames: list[list[int]], hidden: list[int]) -> list[int]:
    """The next frame; it depends on all input so far and on all frames before."""
    known = [*hidden, *text, *track[: len(frames) + 1], *(code for each in frames for code in each)]
    return [sum((i + 1) * token for i, token in enumerate(known)) % 97, len(frames)]


def thinker(work: Work) -> Iterator[Reply | None]:
    work.take()
    for index in range(len(work.resumed), len(REPLY)):
        yield Reply(tokens=(REPLY[index],), finish="stop" if index == len(REPLY) - 1 else None)


def thinker_of_media(with_token: int) -> Stage:
    """A thinker that exports one hidden state per step of the prefill, and the last `with_token` with its token."""

    def run(work: Work) -> Iterator[Reply | None]:
        work.take()
        for index in range(len(HIDDEN) - with_token):
            yield Reply(hidden_states=HIDDEN[index : index + 1])
        index, rest = len(work.resumed), HIDDEN[len(HIDDEN) - with_token :]
        ended: Finish = "length" if work.recompute else "stop"
        last = work.recompute or index == len(REPLY) - 1
        yield Reply(tokens=(REPLY[index],), hidden_states=rest, finish=ended if last else None)
        while not last:
            index += 1
            last = index == len(REPLY) - 1
            yield Reply(tokens=(REPLY[index],), finish=ended if last else None)

    return run


def talker(work: Work) -> Iterator[Reply | None]:
    opened = work.take()
    text, track, last, ref = list(opened.payload.text), list(opened.payload.track), opened.last, opened.hidden_states
    frames, hidden = [list(each) for each in opened.payload.frames], list[int]()
    expected = sum(stop - start for start, stop in opened.hidden_spans)
    assert len(frames) == opened.done
    while True:
        while (more := work.take()) is not None:
            text += more.payload.text if more.payload else ()
            track += more.payload.track if more.payload else ()
            last |= more.last
            ref = more.hidden_states or ref
        if ref is not None and len(hidden) < ref.count:
            if (stored := work.read(ref)) is None:
                yield Reply(payload=StageError("the hidden states are gone"), finish="error")
                return
            hidden += stored[len(hidden) :]
        complete = len(text) == len(opened.payload.codec) and len(hidden) == expected
        if not complete or (len(frames) >= len(track) and not last):
            yield None
        elif last and len(frames) == len(track) + AFTER:
            yield Reply(tokens=(IDS.codec_eos,), payload=np.zeros((1, GROUPS), np.int64), finish="stop")
        else:
            frames.append(frame(text, track, frames, hidden))
            yield Reply(tokens=(frames[-1][0],), payload=np.array(frames[-1:]))


def code2wav(work: Work) -> Iterator[Reply | None]:
    total = 0
    while True:
        if (part := work.take()) is None:
            yield None
            continue
        wave = []
        for codes in zip(*[iter(part.prompt)] * GROUPS, strict=True):
            total += sum(codes)
            wave += [total, -total]
        yield Reply(payload=torch.tensor(wave, dtype=torch.float32), finish="stop")


def spoken(track: list[int], prompt: list[int] = PROMPT, hidden: list[int] | None = None) -> np.ndarray:
    """The sound of a text."""
    frames: list[list[int]] = []
    flow = ReadAloudFlow(speech(prompt), track, frames=SCHEDULES[0])
    (opened,) = flow.begin()
    text, track = list(opened.payload.text), list(opened.payload.track)
    while len(frames) < len(track) + AFTER:
        frames.append(frame(text, track, frames, hidden or []))
    totals = np.cumsum([sum(each) for each in frames])
    return np.stack([totals, -totals], 1).ravel().astype(np.float32)


STAGES = {"talker": talker, "code2wav": code2wav}


@pytest.mark.slow
def test_text_that_is_held_while_the_talker_has_some_is_spoken_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen3_flow, "MOST_JOINED", -6)
    flow = partial(SpeechFlow, speech(), text=ChunkSchedule((1,)), frames=ChunkSchedule((2,), 12.5))
    answer = check_flow(flow, {"thinker": thinker, **STAGES}, frontend="thinker")
    assert answer.text == REPLY
    np.testing.assert_array_equal(answer.outputs["audio"], spoken(list(REPLY[:-1])))


@pytest.mark.slow
@pytest.mark.parametrize(("text", "frames"), PAIRS[: examples(len(PAIRS))])
def test_a_reply_is_spoken_alike_with_any_failure(text: ChunkSchedule, frames: ChunkSchedule) -> None:
    flow = partial(SpeechFlow, speech(), text=text, frames=frames)
    answer = check_flow(flow, {"thinker": thinker, **STAGES}, frontend="thinker")
    assert answer.text == REPLY
    np.testing.assert_array_equal(answer.outputs["audio"], spoken(list(REPLY[:-1])))


@pytest.mark.slow
@pytest.mark.parametrize("frames", SCHEDULES)
def test_a_text_is_read_aloud_alike_with_any_failure(frames: ChunkSchedule) -> None:
    flow = partial(ReadAloudFlow, speech(), REPLY[:-1], frames=frames)
    answer = check_flow(flow, {"thinker": thinker, **STAGES}, frontend="thinker")
    assert answer.text == ()
    np.testing.assert_array_equal(answer.outputs["audio"], spoken(list(REPLY[:-1])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "with_token"), [(SCHEDULES[0], 0), (SCHEDULES[1], 0), (SCHEDULES[1], 2), (SCHEDULES[2], 3)]
)
def test_a_reply_to_media_is_spoken_alike_with_any_failure(text: ChunkSchedule, with_token: int) -> None:
    flow = partial(SpeechFlow, speech(MEDIA), text=text, frames=SCHEDULES[2])
    answer = check_flow(flow, {"thinker": thinker_of_media(with_token), **STAGES}, frontend="thinker")
    assert answer.text == REPLY
    np.testing.assert_array_equal(answer.outputs["audio"], spoken(list(REPLY[:-1]), MEDIA, HIDDEN))
