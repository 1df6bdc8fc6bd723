"""The families through `LLM(checkpoint, omni=True)`, with two replicas of each stage that makes an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams

from tests.families.oracles import SAMPLE_RATE, continued, denoised, painted, spoken, tokens_of
from tests.support.cluster import until
from vllm_omni_ext.errors import OmniError, RequestError

pytestmark = pytest.mark.engine

Checkpoint = Callable[[str], Path]
TEXTS = ["a red house by the sea", "a blue boat", "snow", "two birds"]
"""One prompt each; more prompts than replicas, so that each replica answers several."""

SIZE, SIDES = "16x12", (16, 12)
TOKENS = 8


@contextmanager
def offline(checkpoint: Path, stage: str) -> Iterator[Any]:
    """An engine of a checkpoint with two replicas of a stage; at the end it holds no request."""
    with LLM(str(checkpoint), omni=True, max_model_len=1024, stage_overrides={stage: {"replicas": 2}}) as llm:
        assert sorted(map(str, replicas(llm, stage))) == [f"{stage}/0", f"{stage}/1"]
        yield llm
        assert until(lambda: not llm._omni.orchestrator.held())


def replicas(llm: Any, stage: str) -> list[Any]:
    return [replica for replica in llm._omni.replica_connections.replicas if replica.stage == stage]


def wrong(llm: Any, **fields: Any) -> RequestError:
    """The error of a request with a wrong field."""
    with pytest.raises(RequestError) as refused:
        llm.generate(TEXTS[0], use_tqdm=False, **fields)
    return refused.value


@pytest.fixture(scope="module")
def pictures(checkpoint: Checkpoint) -> Iterator[Any]:
    with offline(checkpoint("onestage_image"), "denoiser") as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(checkpoint: Checkpoint) -> Iterator[Any]:
    with offline(checkpoint("optional_text_image"), "painter") as llm:
        yield llm


@pytest.fixture(scope="module")
def sounds(checkpoint: Checkpoint) -> Iterator[Any]:
    with offline(checkpoint("plain_tts"), "voicebox") as llm:
        yield llm


def test_onestage_image_makes_the_pictures_of_its_oracle(pictures: Any, checkpoint: Checkpoint) -> None:
    outputs = pictures.generate(TEXTS, size=SIZE, seed=5)
    for text, output in zip(TEXTS, outputs, strict=True):
        (image,) = output.images
        expected = denoised(checkpoint("onestage_image"), text, SIDES, 5)[-1]
        np.testing.assert_array_equal(np.asarray(image), expected)
        assert output.error is None and output.audio is None and not output.outputs[0].text


def test_onestage_image_reads_parameters_of_its_only_stage(pictures: Any, checkpoint: Checkpoint) -> None:
    (output,) = pictures.generate(TEXTS[0], {"denoiser": {"steps": 9}}, size=SIZE, seed=1)
    assert output.error is None
    expected = denoised(checkpoint("onestage_image"), TEXTS[0], SIDES, 1, 9)[-1]
    np.testing.assert_array_equal(np.asarray(output.images[0]), expected)


def test_onestage_image_through_chat(pictures: Any, checkpoint: Checkpoint) -> None:
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    for text, output in zip(TEXTS, pictures.chat(conversations, size=SIZE, seed=2), strict=True):
        expected = denoised(checkpoint("onestage_image"), text, SIDES, 2)[-1]
        np.testing.assert_array_equal(np.asarray(output.images[0]), expected)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"size": "9999x9999"}, "size"),
        ({"size": "large"}, "size"),
        ({"seed": -1}, "seed"),
        ({"previews": 4}, "previews"),
        ({"modalities": ["text"]}, "modalities"),
    ],
)
def test_onestage_image_names_the_wrong_field(pictures: Any, fields: dict[str, Any], parameter: str) -> None:
    assert wrong(pictures, **fields).parameter == parameter


def test_a_prompt_that_cannot_be_served_fails_alone(pictures: Any, checkpoint: Checkpoint) -> None:
    empty, good = pictures.generate([{"prompt_token_ids": []}, TEXTS[0]], size=SIZE, seed=3)
    assert isinstance(empty.error, OmniError) and "prompt" in str(empty.error)
    assert empty.outputs[0].finish_reason == "error" and not empty.images
    expected = denoised(checkpoint("onestage_image"), TEXTS[0], SIDES, 3)[-1]
    np.testing.assert_array_equal(np.asarray(good.images[0]), expected)


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def test_optional_text_image_answers_text_alone(texts: Any, checkpoint: Checkpoint) -> None:
    folder = checkpoint("optional_text_image")
    for text, output in zip(TEXTS, texts.generate(TEXTS, greedy(), modalities=["text"]), strict=True):
        assert list(output.outputs[0].token_ids) == continued(folder, tokens_of(folder, text), TOKENS)
        assert not output.images and output.error is None


def test_optional_text_image_paints_the_prompt(texts: Any, checkpoint: Checkpoint) -> None:
    folder = checkpoint("optional_text_image")
    outputs = texts.generate(TEXTS, modalities=["image"], size=SIZE, seed=1)
    for text, output in zip(TEXTS, outputs, strict=True):
        expected = painted(folder, tokens_of(folder, text), SIDES, 1)
        np.testing.assert_array_equal(np.asarray(output.images[0]), expected)
        assert not output.outputs[0].token_ids


def test_optional_text_image_paints_prompt_and_text(texts: Any, checkpoint: Checkpoint) -> None:
    folder = checkpoint("optional_text_image")
    params = {"ar": greedy(), "painter": {"steps": 5, "contrast": 0.5}}
    outputs = texts.generate(TEXTS, params, modalities=["text", "image"], size=SIZE, seed=3)
    for text, output in zip(TEXTS, outputs, strict=True):
        prompt = tokens_of(folder, text)
        answer = continued(folder, prompt, TOKENS)
        assert list(output.outputs[0].token_ids) == answer
        expected = painted(folder, [*prompt, *answer], SIDES, 3, 5, 0.5)
        np.testing.assert_array_equal(np.asarray(output.images[0]), expected)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [({"size": "0x12"}, "size"), ({"think": "perhaps"}, "think"), ({"modalities": ["audio"]}, "modalities")],
)
def test_optional_text_image_names_the_wrong_field(texts: Any, fields: dict[str, Any], parameter: str) -> None:
    assert wrong(texts, **{"modalities": ["image"], **fields}).parameter == parameter


@pytest.mark.parametrize(("voice", "pitch"), [("tenor", 1.0), ("bass", 0.5)])
def test_plain_tts_makes_the_sound_of_its_oracle(sounds: Any, checkpoint: Checkpoint, voice: str, pitch: float) -> None:
    for text, output in zip(TEXTS, sounds.generate(TEXTS, voice=voice), strict=True):
        assert output.sample_rate == SAMPLE_RATE and output.frames is None and output.error is None
        np.testing.assert_array_equal(output.audio, spoken(checkpoint("plain_tts"), text, pitch))


def test_plain_tts_names_the_wrong_field(sounds: Any) -> None:
    refused = wrong(sounds, voice="alto")
    assert refused.parameter == "voice" and "bass, tenor" in str(refused)
