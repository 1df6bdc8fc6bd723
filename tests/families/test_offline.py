"""The families through `LLM(checkpoint, omni=True)`, with two replicas of each stage that makes an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.families.oracles import SAMPLE_RATE, continued, painted, spoken, tokens_of
from tests.support.cluster import until
from vllm_omni_ext.errors import OmniError, RequestError

pytestmark = [pytest.mark.engine, pytest.mark.extended]

Checkpoint = Callable[[str], Path]
TEXTS = ["a red house by the sea", "a blue boat", "snow", "two birds"]
"""One prompt each; more prompts than replicas, so that each replica answers several."""

SIZE, SIDES = "16x12", (16, 12)
TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@contextmanager
def offline(checkpoint: Path, stage: str) -> Iterator[Any]:
    """An engine of a checkpoint with two replicas of a stage; at the end it holds no request."""
    with LLM(str(checkpoint), omni=True, max_model_len=1024, stage_overrides={stage: {"replicas": 2}}) as llm:
        connected = map(str, llm._omni.replica_connections.replicas)
        assert sorted(name for name in connected if name.startswith(stage)) == [f"{stage}/0", f"{stage}/1"]
        yield llm
        assert until(lambda: not llm._omni.orchestrator.held())


@pytest.fixture(scope="module")
def texts(checkpoint: Checkpoint) -> Iterator[Any]:
    with offline(checkpoint("optional_text_image"), "painter") as llm:
        yield llm


@pytest.fixture(scope="module")
def sounds(checkpoint: Checkpoint) -> Iterator[Any]:
    with offline(checkpoint("plain_tts"), "voicebox") as llm:
        yield llm


@pytest.mark.parametrize("modalities", [("text",), ("image",), ("text", "image")])
def test_optional_text_image_answers_text_and_pictures(
    texts: Any, checkpoint: Checkpoint, modalities: tuple[str, ...]
) -> None:
    folder, params = checkpoint("optional_text_image"), {"ar": GREEDY, "painter": {"steps": 5, "contrast": 0.5}}
    outputs = texts.generate(TEXTS, params, modalities=list(modalities), size=SIZE, seed=3)
    for text, output in zip(TEXTS, outputs, strict=True):
        prompt = tokens_of(folder, text)
        answer = continued(folder, prompt, TOKENS) if "text" in modalities else []
        assert output.error is None and list(output.outputs[0].token_ids) == answer
        assert len(output.images or ()) == ("image" in modalities)
        for image in output.images or ():
            np.testing.assert_array_equal(image, painted(folder, [*prompt, *answer], SIDES, 3, 5, 0.5))


@pytest.mark.parametrize(("voice", "pitch"), [("tenor", 1.0), ("bass", 0.5)])
def test_plain_tts_makes_the_sound_of_its_oracle(sounds: Any, checkpoint: Checkpoint, voice: str, pitch: float) -> None:
    for text, output in zip(TEXTS, sounds.generate(TEXTS, voice=voice), strict=True):
        assert output.sample_rate == SAMPLE_RATE and output.frames is None and output.error is None
        np.testing.assert_array_equal(output.audio, spoken(checkpoint("plain_tts"), text, pitch))


def test_wrong_fields_are_refused_and_a_wrong_prompt_fails_alone(sounds: Any, checkpoint: Checkpoint) -> None:
    for fields, parameter in (({"voice": "alto"}, "voice"), ({"modalities": ["text"]}, "modalities")):
        with pytest.raises(RequestError) as refused:
            sounds.generate(TEXTS[0], use_tqdm=False, **fields)
        assert refused.value.parameter == parameter
    empty, good = sounds.generate([{"prompt_token_ids": []}, TEXTS[0]])
    assert isinstance(empty.error, OmniError) and empty.outputs[0].finish_reason == "error" and empty.audio is None
    np.testing.assert_array_equal(good.audio, spoken(checkpoint("plain_tts"), TEXTS[0]))
