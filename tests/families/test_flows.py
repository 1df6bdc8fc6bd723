"""Flows of the families, and faulty ones, with a disturbance at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.families.conftest import NAMES
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.plugins.flow import Action, Emit, Finished, Produced, Submit
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.plugins.spec import ModelFamily, resolve
from vllm_omni_ext.testing import DISTURBANCES, Reply, Work, check_flow
from vllm_omni_ext.wire.envelope import StageError, StageProgress

Load = Callable[[str], ModelFamily]

pytestmark = pytest.mark.engine  # packages are installed
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
STEPS = 3


def runtime_of(family: ModelFamily) -> Any:
    """The family's runtime, made as an API server makes it."""
    pipeline = family.pipeline()
    return resolve(family.runtime)(RuntimeContext(hf_config=None, pipeline=pipeline.name, frontend=pipeline.frontend))


def options(*modalities: str, **fields: Any) -> RequestOptions:
    return RequestOptions(modalities=modalities, fields=fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_runtime_answers_the_modalities_of_its_pipeline_with_its_stages(family: Load, name: str) -> None:
    pipeline, capabilities = family(name).pipeline(), runtime_of(family(name)).capabilities()
    assert set(capabilities.modalities) == set(pipeline.modalities)
    assert all(route <= {stage.name for stage in pipeline.stages} for route in capabilities.routes.values())


def picture_of(tokens: Any, seed: int) -> np.ndarray:
    """A picture that depends on all of them."""
    return np.array([[[sum(tokens) % 256, len(tokens), seed]]], np.uint8)


def painter(work: Work) -> Iterator[Reply | None]:
    part = work.take()
    for done in range(1, STEPS):
        yield Reply(payload=StageProgress(done, STEPS))
    yield Reply(payload=picture_of(part.prompt, part.payload.seed), finish="stop")


def language_model(work: Work) -> Iterator[Reply | None]:
    work.take()
    for index in range(len(work.resumed), 4):
        yield Reply(tokens=(10 + index,), finish="length" if index == 3 else None)


def voicebox(work: Work) -> Iterator[Reply | None]:
    phase, part = 0.0, None
    while True:
        if (part := work.take()) is None:
            yield None
            continue
        for i, token in enumerate(part.prompt):
            phase += token
            last = i == len(part.prompt) - 1
            yield Reply(payload=np.full(3, phase, np.float32), finish="stop" if last else None)


@pytest.mark.parametrize(
    ("modalities", "think", "text", "seen"),
    [
        (("text",), False, (10, 11, 12, 13), None),
        (("image",), False, (), PROMPT),
        (("text", "image"), False, (10, 11, 12, 13), [*PROMPT, 10, 11, 12, 13]),
        (("image",), True, (10, 11, 12, 13), [*PROMPT, 10, 11, 12, 13]),
    ],
)
def test_a_route_with_or_without_text_survives_any_disturbance(
    family: Load, modalities: tuple[str, ...], think: bool, text: tuple[int, ...], seen: list[int] | None
) -> None:
    runtime = runtime_of(family("optional_text_image"))
    answer = check_flow(
        lambda: runtime.plan(Rendered(prompt=PROMPT), options(*modalities, think=think, seed=7)).flow,
        {"ar": language_model, "painter": painter},
        frontend="ar",
    )
    assert answer.text == text
    assert ("image" in answer.outputs) == (seen is not None)
    if seen is not None:
        np.testing.assert_array_equal(answer.outputs["image"], [picture_of(seen, 7)])


def test_sound_in_parts_survives_any_disturbance(family: Load) -> None:
    runtime = runtime_of(family("plain_tts"))
    answer = check_flow(
        lambda: runtime.plan(Rendered(prompt=PROMPT), options("audio")).flow,
        {"voicebox": voicebox},
        frontend="voicebox",
    )
    np.testing.assert_array_equal(answer.outputs["audio"], np.repeat(np.cumsum(PROMPT), 3))


class Faulty:
    """A flow of one picture with the fault `fault`."""

    stages = frozenset(("denoiser",))
    outputs = frozenset(("image",))

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.replayed = 0

    def begin(self) -> list[Action]:
        return self._submit()

    def _submit(self) -> list[Action]:
        return [Submit(stage="denoiser", prompt=PROMPT)]

    def handle(self, event: Produced) -> list[Action]:
        if isinstance(event.payload, StageError):
            return [] if self.fault == "deaf" else [Finished()]
        if event.finish is None or self.fault == "silent":
            return []
        return [Emit(ImageChunk(pixels=picture_of(PROMPT, self.replayed))), Finished()]

    def replay(self, stage: str) -> list[Action]:
        if self.fault == "changes its answer":
            self.replayed += 1
        return [] if self.fault == "forgetful" else self._submit()


def plain(work: Work) -> Iterator[Reply | None]:
    work.take()
    yield Reply(payload=StageProgress(1, 2))
    yield Reply(payload=1, finish="stop")


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("silent", "undisturbed: .*have not ended"),
        ("forgetful", "kill of denoiser at step 0: .*have not ended"),
        ("deaf", "refuse of denoiser at step 0: .*have not ended"),
        ("changes its answer", "kill of denoiser at step .* instead of"),
    ],
)
def test_check_flow_finds_faulty_flows(fault: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        check_flow(lambda: Faulty(fault), {"denoiser": plain}, frontend="denoiser", disturbances=DISTURBANCES)
