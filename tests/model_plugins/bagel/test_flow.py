"""The flows of pictures in a simulated world: replicas die, freeze and refuse, and clients disconnect, at any step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.model_plugins.bagel.requests.flow import DrawFlow, ThinkFlow
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams, Draw, Drawn, Preview, Text
from vllm_omni_ext.plugins.flow import Emit, Fail, Produced, Submit
from vllm_omni_ext.testing import Reply, Work, check_flow
from vllm_omni_ext.wire.envelope import StageError, StageProgress

START, END = 1, 2
THOUGHT = [31, 32, 33, 34]
PROMPT = [START, 5, END, START]
DRAW = Draw(parts=[Text([START, 7, END])], parameters=DitParams(seed=11, think=True), previews=2, latent=True)
PIXELS = 16


def picture_of(draw: Draw) -> bytes:
    """Depends on all that is drawn."""
    value = (sum(draw.thought or [0]) + (draw.parameters.seed or 0)) % 256
    return bytes([value]) * (16 * 32 * 3)


def dit(work: Work) -> Iterator[Reply | None]:
    draw = work.take().payload
    pixels = picture_of(draw)
    for step in range(4):
        if step in (1, 3):
            yield Reply(payload=Preview(number=step // 2, height=16, width=32, pixels=pixels, done=step, total=5))
        yield Reply(payload=StageProgress(step + 1, 5))
    thought = f"plan {draw.thought}"
    latent = np.arange(8, dtype=np.float32).tobytes()
    yield Reply(
        payload=Drawn(height=16, width=32, pixels=pixels, latent=latent, thought=thought, seconds={"steps": 1.0}),
        finish="stop",
    )


def ar(work: Work) -> Iterator[Reply | None]:
    opened = work.take()
    assert list(opened.prompt[: len(PROMPT)]) == PROMPT
    assert list(opened.prompt[len(PROMPT) :]) == THOUGHT[: opened.done]
    assert opened.stop == (END,)
    for id_ in THOUGHT[opened.done :]:
        yield Reply(tokens=(id_,))
    yield Reply(tokens=(END,), finish="stop")


def thinking(text: bool = True) -> ThinkFlow:
    params = SamplingParams(temperature=0, max_tokens=20)
    return ThinkFlow(DRAW, prompt=PROMPT, end=END, params=params, pixels=PIXELS, text=text)


@pytest.mark.parametrize("text", [True, False])
def test_a_picture_is_the_same_with_any_failure(text: bool) -> None:
    answer = check_flow(lambda: DrawFlow(DRAW, pixels=PIXELS, text=text), {"dit": dit}, frontend="dit")
    np.testing.assert_array_equal(answer.outputs["image"], [np.full((16, 32, 3), 11, np.uint8)])
    assert answer.outputs.get("text") == ("plan None" if text else None)


@pytest.mark.slow
@pytest.mark.parametrize("text", [True, False])
def test_a_thought_and_its_picture_are_the_same_with_any_failure(text: bool) -> None:
    answer = check_flow(lambda: thinking(text), {"ar": ar, "dit": dit}, frontend="ar")
    np.testing.assert_array_equal(answer.outputs["image"], [np.full((16, 32, 3), sum(THOUGHT) + 11, np.uint8)])
    assert answer.outputs.get("text") == (f"plan {THOUGHT}" if text else None)
    assert [chunk.text for chunk in answer.outputs["thought"]] == [f"plan {THOUGHT}"]


def test_a_thought_that_is_cut_off_is_used_as_it_is() -> None:
    flow = thinking()
    flow.begin()
    assert flow.handle(Produced("ar", tokens=(31, 32))) == []
    [submitted] = flow.handle(Produced("ar", tokens=(33,), finish="length"))
    assert isinstance(submitted, Submit) and isinstance(submitted.payload, Draw)
    assert submitted.payload.thought == [31, 32, 33]


def test_previews_are_sent_once_and_the_picture_has_its_latent_seed_and_times() -> None:
    flow, actions, work = DrawFlow(DRAW, pixels=PIXELS), list[Any](), Work()
    work.messages.append(("x", Submit(stage="dit", payload=DRAW)))
    replies = [reply for reply in dit(work) if reply is not None]
    for reply in replies[:3]:
        actions += flow.handle(Produced("dit", payload=reply.payload))
    flow.replay("dit")
    for reply in replies:
        actions += flow.handle(Produced("dit", payload=reply.payload, finish=reply.finish))
    found = [action.chunk for action in actions if isinstance(action, Emit)]
    previews = [chunk for chunk in found if isinstance(chunk, ImageChunk) and chunk.partial]
    assert [(chunk.index, chunk.last, chunk.seed) for chunk in previews] == [(0, False, 11), (1, False, 11)]
    image = found[-1]
    assert (image.seed, image.latent.shape, image.seconds, image.last) == (11, (2, 4), {"steps": 1.0}, True)


@pytest.mark.parametrize("make", [lambda: DrawFlow(DRAW, pixels=PIXELS), thinking])
def test_a_stage_that_fails_ends_the_request(make: Any) -> None:
    for event in (
        Produced("dit", payload=StageError("no")),
        Produced("dit", finish="error"),
        Produced("dit", finish="stop"),
    ):
        [failed] = make().handle(event)
        assert isinstance(failed, Fail)
    [failed] = thinking().handle(Produced("ar", finish="abort"))
    assert isinstance(failed, Fail)
