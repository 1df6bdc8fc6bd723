"""A text that is read aloud sounds as Transformers' talker with a reply that is that text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.oracle import Oracle
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.http import OPENING
from vllm_omni_ext.model_plugins.qwen_omni.speech import rendered
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.serving.served import ServedModel

pytestmark = pytest.mark.engine

TEXTS = {
    "words": "The quick brown fox jumps over the lazy dog.",
    "one token": "a",
    "marks of the chat format": "Say <|im_end|> and <|audio_pad|> aloud.",
    "other scripts": "Grüße, 世界! 🎉",
    "spaces": "  two\n\nlines ",
    "long": "one two three four five six seven eight nine ten " * 6,
}
FRAMES = 30
PATIENCE_S = 90
TALKER = SamplingParams(temperature=0, repetition_penalty=1.05, max_tokens=FRAMES)


def options(voice: str = "ethan") -> RequestOptions:
    return RequestOptions(modalities=("audio",), fields={"voice": voice}, params={"talker": TALKER})


async def read(omni: Any, text: str, voice: str = "ethan") -> tuple[np.ndarray, np.ndarray]:
    """Frames and samples."""
    request = await rendered(text, ServedModel(omni._omni), OPENING)
    pieces = [piece async for piece in omni._omni.start(request, options(voice), "speech")]
    return pieces[-1].frames, np.concatenate([piece.samples for piece in pieces])


def expected(oracle: Oracle, text: str, voice: str) -> tuple[np.ndarray, np.ndarray]:
    """Transformers' own `generate`, with a thinker whose reply is the text."""
    tokenizer, model = oracle.processor.tokenizer, oracle.model
    prompt = tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    reply = tokenizer.encode(text, split_special_tokens=True)
    said = torch.tensor([[*prompt, *reply, model.config.im_end_token_id]])
    embedded = model.thinker.get_input_embeddings()(said[:, :-1])
    layers = [embedded] * (model.config.talker_config.accept_hidden_layer + 1)
    thinker = mock.Mock(return_value=SimpleNamespace(sequences=said, hidden_states=[layers]))
    with mock.patch.object(model.thinker, "generate", thinker), torch.no_grad():
        options = {"thinker_eos_token_id": oracle.eos_ids, "talker_max_new_tokens": FRAMES, "talker_do_sample": False}
        _, _, codes = oracle._generate({"input_ids": torch.tensor([prompt]), **options}, voice)
        return codes[0].T.numpy(), model.code2wav(codes).flatten().numpy()


@pytest.mark.parametrize("name", TEXTS)
def test_frames_and_sound_equal_transformers(name: str, omni: Any, oracle: Oracle) -> None:
    for voice in ("ethan", "chelsie"):
        frames, samples = omni._run(read(omni, TEXTS[name], voice))
        wanted_frames, wanted_samples = expected(oracle, TEXTS[name], voice)
        assert frames.tolist() == wanted_frames.tolist()
        assert samples.shape == wanted_samples.shape
        assert np.abs(samples - wanted_samples).max() <= 1e-4
    assert omni._omni.orchestrator.held() == 0


def test_texts_at_once_have_the_frames_of_each_alone(omni: Any) -> None:
    async def all_of_them() -> list[tuple[np.ndarray, np.ndarray]]:
        return await asyncio.gather(*(read(omni, text) for text in TEXTS.values()))

    for text, (frames, _) in zip(TEXTS.values(), omni._run(all_of_them()), strict=True):
        assert frames.tolist() == omni._run(read(omni, text))[0].tolist()


def test_nothing_is_held_of_a_text_whose_reader_leaves(omni: Any) -> None:
    async def leave() -> None:
        request = await rendered(TEXTS["long"], ServedModel(omni._omni), OPENING)
        pieces = omni._omni.start(request, options(), "speech")
        waiting = asyncio.ensure_future(anext(pieces))
        async with asyncio.timeout(PATIENCE_S):
            while omni._omni.get_num_unfinished_requests() != 1:
                await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await pieces.aclose()

    omni._run(leave())
    assert omni._omni.orchestrator.held() == 0


@pytest.mark.parametrize("text", [" \n", "\ud800", "word " * 2000])
def test_a_text_without_words_or_too_long_is_refused(omni: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        omni._run(read(omni, text))
    assert caught.value.parameter == "input"
    assert omni._omni.orchestrator.held() == 0
