"""Inputs of the talker in training equal its inputs in serving."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dev.training.tiny_omni import model as whole
from dev.training.tiny_omni import start
from dev.training.tiny_omni.lines import Asked, Line, batch_of, input_rows, line
from dev.training.tiny_omni.vocoder import Lexicon
from dev.training.tiny_omni.words import ids_of, world_vocabulary
from dev.training.tiny_omni.world import FRAME, VOICES, WORDS
from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import MULTIMODAL, SpecialIds, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.talker_feed import TalkerInputProvider

GROUPS = whole.TRAINED.num_code_groups
SPOKEN = "<|audio_start|>" + "<|audio_pad|>" * 5 + "<|audio_end|>what you hear"
SEEN = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>what you see"


@pytest.fixture(scope="module")
def model() -> Any:
    model = whole.build(0)
    start.fill(model.thinker, 0)
    start.fill(model.talker, 0)
    return model


@pytest.fixture(scope="module")
def ids(model: Any) -> SpecialIds:
    return SpecialIds.of(model.config)


@pytest.fixture(scope="module")
def world() -> Lexicon:
    random = np.random.default_rng(0)
    lengths = {(voice, word): int(random.integers(2, 5)) for voice in VOICES for word in WORDS}
    codes = {key: random.integers(1, 64, (length, GROUPS)) for key, length in lengths.items()}
    sounds = {key: np.zeros(length * FRAME, np.float32) for key, length in lengths.items()}
    return Lexicon(codes, sounds, SimpleNamespace(), np.zeros((0, 0)))  # type: ignore[arg-type]


def lines_of(model: Any, ids: SpecialIds, world: Lexicon) -> tuple[list[Asked], list[Line]]:
    width = whole.TRAINED.thinker["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    asked = [
        Asked("say seven blue left", ["seven", "blue", "left"]),
        Asked(SPOKEN, ["nine"], torch.randn(5, width, generator=generator)),
        Asked(SEEN, ["red", "circle"], torch.randn(6, width, generator=generator), torch.tensor([[1, 4, 6]])),
    ]
    voices = (VOICES[0], VOICES[1], VOICES[0])
    return asked, [line(one, voice, world, ids, model.talker) for one, voice in zip(asked, voices, strict=True)]


class Served:
    """The tables of the talker, as the input provider reads them."""

    def __init__(self, model: Any, ids: SpecialIds) -> None:
        self._talker = model.talker
        self.text_table = model.talker.text_projection(model.thinker.model.embed_tokens.weight).detach()
        self.codec_eos = ids.codec_eos
        self.code_predictor: Any = SimpleNamespace(groups=GROUPS, frame_rows=self._frame_rows)
        self.frames: Any = None

    def codec_rows(self, ids: Tensor) -> Tensor:
        return self._talker.model.codec_embedding(ids).detach()

    def project_hidden(self, rows: Tensor) -> Tensor:
        return self._talker.hidden_projection(rows).detach()

    def _frame_rows(self, codes: Tensor) -> Tensor:
        tables = self._talker.code_predictor.model.codec_embedding
        return sum(table(codes[:, group]) for group, table in enumerate(tables)).detach()


def served_rows(model: Any, ids: SpecialIds, asked: Asked, one: Line) -> Tensor:
    """The rows that the input provider computes for a request with this reply."""
    provider = TalkerInputProvider(Served(model, ids), device=torch.device("cpu"))
    track = [*ids_of(" ".join(asked.reply), world_vocabulary())[1:], ids.tts_eos]
    text = one.text[: len(one.codec)]
    prompt = TalkerPrompt(text=text, codec=one.codec, fill=ids.tts_pad, track=track, frames=one.frames.tolist())
    spans = [(place, place + 1) for place, token in enumerate(text) if token == MULTIMODAL]
    provider.open("a", prompt, spans, SimpleNamespace(temperature=0.0, seed=None))
    if asked.media is not None:
        provider.add_hidden_states("a", asked.media)
    return provider.rows([Span("a", 0, len(one.text))])


def test_rows_are_those_of_the_input_provider(model: Any, ids: SpecialIds, world: Lexicon) -> None:
    asked, lines = lines_of(model, ids, world)
    batch = batch_of(lines, ids.codec_eos)
    rows = input_rows(model.talker, model.thinker.model.embed_tokens.weight, batch).detach()
    for row, (request, one) in enumerate(zip(asked, lines, strict=True)):
        expected = served_rows(model, ids, request, one)
        torch.testing.assert_close(rows[row, : len(one.text)], expected, atol=1e-5, rtol=1e-5)


def test_positions_of_a_picture_are_those_of_the_model(model: Any, ids: SpecialIds, world: Lexicon) -> None:
    _, (plain, spoken, seen) = lines_of(model, ids, world)
    for one in (plain, spoken):
        assert one.positions.tolist() == [list(range(len(one.text)))] * 3
    first = 4  # <|im_start|> user \n <|vision_start|>
    assert seen.positions[:, first : first + 6].tolist() == [[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]]
    assert seen.positions[:, first + 6].tolist() == [7, 7, 7]
    assert seen.positions[:, -1].tolist() == [len(seen.text) - 1 - (6 - 3)] * 3
