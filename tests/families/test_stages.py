"""The families' stages and flows in this process, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families.engine_room import EngineRoom, produced
from tests.families.oracles import denoised, painted, spoken, tokens_of
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.chunks import AudioChunk, ImageChunk
from vllm_omni_ext.plugins.flow import Emit, Finished, Forward, Produced, Progress, Submit
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.plugins.spec import ModelFamily, resolve
from vllm_omni_ext.wire.envelope import StageError, StageProgress, unpack
from vllm_omni_ext.wire.stage_input import FILLER, PartHeader

Load = Callable[[str], ModelFamily]
Write = Callable[[str], Path]

pytestmark = pytest.mark.engine  # packages are installed
TEXT = "a red house by the sea"


def runtime_of(family: ModelFamily) -> Any:
    """The family's runtime, made as an API server makes it."""
    pipeline = family.pipeline()
    return resolve(family.runtime)(RuntimeContext(hf_config=None, pipeline=pipeline.name, frontend=pipeline.frontend))


def options(*modalities: str, **fields: Any) -> RequestOptions:
    """A request's options."""
    return RequestOptions(modalities=modalities, fields=fields)


def drive(room: EngineRoom, flow: Any, runtime: Any, lose_at: int = -1) -> list[Any]:
    """Run a flow of one stage by hand; at that output the stage loses it. Returns the chunks it emitted."""
    (stage,) = flow.stages
    actions, chunks, seen, attempt = list(flow.begin()), [], 0, 0
    while actions:
        match actions.pop(0):
            case Submit() as part:
                room.add(f"{attempt}-{part.part}", part, stream=f"stream {attempt}")
            case Emit(chunk=chunk):
                chunks.append(chunk)
        while not actions and room.scheduler.has_requests():
            for _, output in room.step():
                if seen == lose_at:
                    room.abort(*room.requests)
                    attempt += 1
                    actions += flow.replay(stage)
                    seen += 1
                    break
                seen += 1
                actions += flow.handle(produced(stage, output, runtime))
    return chunks


def test_families_are_found_by_their_entry_points(family: Load) -> None:
    pipelines = {name: family(name).pipeline() for name in ("onestage_image", "optional_text_image", "plain_tts")}
    assert {name: each.frontend for name, each in pipelines.items()} == {
        "onestage_image": "denoiser",
        "optional_text_image": "ar",
        "plain_tts": "voicebox",
    }
    for name, pipeline in pipelines.items():
        runtime = runtime_of(family(name))
        stages = {stage.name for stage in pipeline.stages}
        assert all(route <= stages for route in runtime.capabilities().routes.values())
        assert set(runtime.capabilities().modalities) == set(pipeline.modalities)


def test_a_picture_is_the_oracles(family: Load, checkpoint: Write) -> None:
    folder, loaded = checkpoint("onestage_image"), family("onestage_image")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder)
    rendered = Rendered(prompt=tokens_of(folder, TEXT))
    flow = runtime.plan(rendered, options("image", size="20x12", seed=7, previews=1)).flow
    chunks = drive(room, flow, runtime)
    steps = denoised(folder, TEXT, (20, 12), 7)
    assert [chunk.partial for chunk in chunks] == [True, False]
    assert all(isinstance(chunk, ImageChunk) and chunk.seed == 7 for chunk in chunks)
    np.testing.assert_array_equal(chunks[0].pixels, steps[1])
    np.testing.assert_array_equal(chunks[1].pixels, steps[3])


@pytest.mark.parametrize("seats", [1, 2, 4])
def test_requests_beside_each_other_get_their_own_pictures(family: Load, checkpoint: Write, seats: int) -> None:
    folder, loaded = checkpoint("onestage_image"), family("onestage_image")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder, seats)
    for seed in range(4):
        plan = runtime.plan(Rendered(prompt=tokens_of(folder, TEXT)), options("image", size="8x8", seed=seed))
        (action,) = plan.flow.begin()
        room.add(str(seed), action, params={"steps": 2 + seed}, client=seed % 2)
    assert room.scheduler.get_request_counts() == (0, 4)
    found = room.run()
    for seed in range(4):
        outputs, steps = found[str(seed)], 2 + seed
        expected = [StageProgress(done, steps) for done in range(1, steps)]
        assert [unpack(output.pooling_output) for output in outputs[:-1]] == expected
        picture = outputs[-1].pooling_output.numpy()
        np.testing.assert_array_equal(picture, denoised(folder, TEXT, (8, 8), seed, steps)[-1])
    assert room.scheduler.get_request_counts() == (0, 0)
    assert not room.model.pictures


@pytest.mark.parametrize("step", range(4))
def test_an_aborted_picture_leaves_nothing(family: Load, checkpoint: Write, step: int) -> None:
    folder, loaded = checkpoint("onestage_image"), family("onestage_image")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder)
    (action,) = runtime.plan(Rendered(prompt=[1]), options("image")).flow.begin()
    room.add("x", action)
    for _ in range(step):
        assert room.step()
    room.abort("x")
    assert not room.run()
    assert not room.requests and not room.model.pictures


def test_what_is_no_request_of_the_flow_is_refused(family: Load, checkpoint: Write) -> None:
    folder, loaded = checkpoint("onestage_image"), family("onestage_image")
    room = EngineRoom(loaded.pipeline().stages[0], folder)
    room.send("x", PartHeader(stream="x", part=0, last=True, payload={"type": "paint"}), FILLER)
    (output,) = room.run()["x"]
    assert str(output.finish_reason) == "error"
    assert "width" in str(unpack(output.pooling_output)) or "tokens" in str(unpack(output.pooling_output))


@pytest.mark.parametrize("name", ["onestage_image", "optional_text_image"])
def test_a_wrong_size_is_refused(family: Load, name: str) -> None:
    runtime = runtime_of(family(name))
    with pytest.raises(RequestError, match="size"):
        runtime.validate(options("image", size="0x9999"))


def test_the_painter_answers_its_steps_and_then_the_picture(family: Load, checkpoint: Write) -> None:
    folder, loaded = checkpoint("optional_text_image"), family("optional_text_image")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stage("painter"), folder)
    tokens = tokens_of(folder, TEXT)
    for seed in (1, 2):
        plan = runtime.plan(Rendered(prompt=tokens), options("image", size="9x5", seed=seed))
        assert plan.flow.stages == {"painter"} and plan.flow.outputs == {"image"}
        (action,) = plan.flow.begin()
        room.add(str(seed), action, params={"steps": 2, "contrast": 0.5})
    found = room.run()
    for seed in (1, 2):
        progress, picture = found[str(seed)]
        assert unpack(progress.pooling_output) == StageProgress(1, 2)
        expected = painted(folder, tokens, (9, 5), seed, steps=2, contrast=0.5)
        np.testing.assert_array_equal(picture.pooling_output.numpy(), expected)
    assert not room.requests and not room.worker._running


def test_only_routes_that_need_text_use_the_language_model(family: Load) -> None:
    runtime = runtime_of(family("optional_text_image"))
    rendered = Rendered(prompt=[5])
    text = runtime.plan(rendered, options("text")).flow
    both = runtime.plan(rendered, options("text", "image", seed=3)).flow
    thought = runtime.plan(rendered, options("image", think=True)).flow
    assert (text.stages, text.outputs) == ({"ar"}, {"text"})
    assert (both.stages, both.outputs) == ({"ar", "painter"}, {"text", "image"})
    assert (thought.stages, thought.outputs) == ({"ar", "painter"}, {"image"})
    assert both.begin() == [Forward("ar")]
    assert both.handle(Produced("ar", (6,))) == []
    (paint,) = both.handle(Produced("ar", (7,), finish="length"))
    assert list(paint.prompt) == [5, 6, 7]
    assert both.handle(Produced("painter", (), StageProgress(1, 2), part=0)) == [Progress("painter", 1, 2)]
    emit, finished = both.handle(Produced("painter", (), np.zeros((1, 1, 3), np.uint8), "stop", 0))
    assert emit.chunk.last and finished == Finished()


def test_sound_goes_on_without_a_jump_from_part_to_part(family: Load, checkpoint: Write) -> None:
    folder, loaded = checkpoint("plain_tts"), family("plain_tts")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder)
    flow = runtime.plan(Rendered(prompt=tokens_of(folder, TEXT)), options("audio", voice="bass")).flow
    chunks = drive(room, flow, runtime)
    assert [chunk.last for chunk in chunks] == [False] * (len(TEXT) - 1) + [True]
    assert all(isinstance(chunk, AudioChunk) and chunk.sample_rate == 16000 for chunk in chunks)
    np.testing.assert_array_equal(np.concatenate([c.samples for c in chunks]), spoken(folder, TEXT, pitch=0.5))
    room.run()
    assert not room.model.parts and not room.model.phases


@pytest.mark.parametrize("lose_at", range(len(TEXT)))
def test_sound_is_the_same_after_a_loss(family: Load, checkpoint: Write, lose_at: int) -> None:
    folder, loaded = checkpoint("plain_tts"), family("plain_tts")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder)
    flow = runtime.plan(Rendered(prompt=tokens_of(folder, TEXT)), options("audio")).flow
    chunks = drive(room, flow, runtime, lose_at)
    np.testing.assert_array_equal(np.concatenate([c.samples for c in chunks]), spoken(folder, TEXT))
    assert [chunk.last for chunk in chunks].index(True) == len(chunks) - 1


def test_the_end_of_a_stream_and_missing_parts(family: Load, checkpoint: Write) -> None:
    folder, loaded = checkpoint("plain_tts"), family("plain_tts")
    runtime, room = runtime_of(loaded), EngineRoom(loaded.pipeline().stages[0], folder)
    (part, *_) = runtime.plan(Rendered(prompt=list(range(20))), options("audio")).flow.begin()
    room.add("a", part, stream="s")
    room.run()
    assert room.model.phases
    room.send("b", PartHeader.end("s"), FILLER)
    (output,) = room.run()["b"]
    assert str(output.finish_reason) == "stop" and not room.model.phases
    room.send("c", PartHeader(stream="s", part=1, last=True, payload=part.payload), [1])
    (output,) = room.run()["c"]
    assert unpack(output.pooling_output) == StageError("an earlier part of the stream is missing")
