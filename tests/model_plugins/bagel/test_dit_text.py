"""Text from the stage `dit`: ordinary requests of vLLM, together with pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine import FinishReason

from tests.support.bagel_generate import generate_text
from tests.support.bagel_runs import golden, picture
from tests.support.dit_room import Room, assert_almost_equal, draw_of, pixels_of
from vllm_omni_ext.model_plugins.bagel.images import resize, to_rgb
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Part
from vllm_omni_ext.model_plugins.bagel.stages.dit import BagelSingle
from vllm_omni_ext.model_plugins.bagel.stages.reply import Sampling
from vllm_omni_ext.wire.envelope import StageError, unpack
from vllm_omni_ext.wire.stage_input import RESUMED

PAD = 372
PROMPTS: dict[str, list[Part]] = {
    "chat": golden("chat_fp32").parts,
    "understand": golden("understand_fp32").parts,
    "two pictures": [picture(40, 160, 3), "and", picture(300, 200, 2), "Which one is larger?"],
}


@pytest.fixture(scope="module")
def room(checkpoint: Path) -> Callable[..., Room]:
    return lambda **given: Room(checkpoint, BagelSingle, **given)


def rendered(parts: Sequence[Part], model: Bagel) -> tuple[list[int], list[MultiModalFeatureSpec]]:
    """A prompt as vLLM's processor gives it."""
    ids: list[int] = []
    features = []
    for part in parts:
        if isinstance(part, str):
            ids += model.tokens.text(part)
            continue
        vit = resize(resize(to_rgb(part), model.sizes.vae_resize), model.sizes.vit_resize)
        tokens = (vit.width // 14) * (vit.height // 14) + 2
        features.append(feature(vit, PlaceholderRange(offset=len(ids), length=tokens)))
        ids += [PAD] * tokens
    return [*ids, model.tokens.start], features


def feature(vit: Image.Image | None, where: PlaceholderRange) -> MultiModalFeatureSpec:
    data = None
    if vit is not None:
        pixels = MultiModalFieldElem(data=torch.from_numpy(np.array(vit)), field=MultiModalBatchedField())
        data = MultiModalKwargsItem({"vit": pixels})
    return MultiModalFeatureSpec(data=data, modality="image", identifier="x", mm_position=where)


def params(model: Bagel, max_tokens: int = 16, **given: Any) -> SamplingParams:
    made = SamplingParams(temperature=given.pop("temperature", 0), max_tokens=max_tokens, **given)
    made._eos_token_id = model.tokens.end  # as vLLM's input processor does
    return made


def tokens_of(engine: Room, name: str) -> list[int]:
    return [token for each in engine.got[name] for token in each.new_token_ids]


def ask(engine: Room, name: str, parts: Sequence[Part], model: Bagel, **given: Any) -> None:
    ids, features = rendered(parts, model)
    engine.add(name, ids, params(model, **given), features)


@pytest.mark.slow
def test_replies_and_a_picture_together_equal_the_reference(model: Bagel, room: Callable[..., Room]) -> None:
    engine, expected = room(), golden("t2i_fp32")
    engine.draw("picture", draw_of(model, expected.parts, expected.parameters))
    for name, parts in PROMPTS.items():
        ask(engine, name, parts, model, max_tokens=70)  # more than a context has room for at first
    engine.run()
    assert_almost_equal(pixels_of(engine.drawn("picture")), expected.tensors["image_u8"])
    for name, parts in PROMPTS.items():
        ids = [model.tokens.start, *tokens_of(engine, name)]
        assert model.tokens.reply(ids) == generate_text(model, parts, max_tokens=71)
        assert all(len(each.new_token_ids) == 1 for each in engine.got[name])
        assert engine.got[name][-1].finish_reason == FinishReason.LENGTH
    for case in ("chat", "understand"):
        assert tokens_of(engine, case)[:23] == golden(f"{case}_fp32").info["generated_ids"][0][1:]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 5, "top_k": 20, "presence_penalty": 1.0, "frequency_penalty": 2.0},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.3},
    ],
    ids=lambda given: "-".join(given),
)
def test_a_reply_that_is_resumed_goes_on_as_before(
    given: dict[str, Any], model: Bagel, room: Callable[..., Room]
) -> None:
    engine = room()
    ask(engine, "whole", PROMPTS["understand"], model, **given)
    engine.run()
    whole = tokens_of(engine, "whole")
    ids, features = rendered(PROMPTS["understand"], model)
    for before in (1, 5, 15):
        resumed = params(model, 16 - before, **given, extra_args={RESUMED: before})
        engine.add(f"after {before}", [*ids, *whole[:before]], resumed, features)
    engine.run()
    for before in (1, 5, 15):
        assert whole[:before] + tokens_of(engine, f"after {before}") == whole


def test_a_reply_ends_at_its_stop_tokens(model: Bagel, room: Callable[..., Room]) -> None:
    engine = room()
    ask(engine, "whole", PROMPTS["chat"], model)
    engine.run()
    whole = tokens_of(engine, "whole")
    stop = next(token for token in whole[2:] if token not in whole[:2])
    ask(engine, "stopped", PROMPTS["chat"], model, stop_token_ids=[stop])
    end = params(model)
    end._eos_token_id = stop
    ids, _ = rendered(PROMPTS["chat"], model)
    engine.add("ended", ids, end)
    engine.run()
    for name, reason in (("stopped", stop), ("ended", None)):
        assert tokens_of(engine, name) == whole[: whole.index(stop) + 1]
        last = engine.got[name][-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, reason)


@pytest.mark.parametrize(
    "given",
    [
        {"logprobs": 2},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"min_p": 0.5},
        {"min_tokens": 3},
        {"logit_bias": {3: 1.0}},
    ],
    ids=str,
)
def test_parameters_that_are_not_possible_are_named(
    given: dict[str, Any], model: Bagel, room: Callable[..., Room]
) -> None:
    engine = room()
    ask(engine, "r", PROMPTS["chat"], model, temperature=1.0, **given)
    engine.run()
    assert_refused(engine, "r", f"{next(iter(given))}: is not possible")


def test_a_picture_without_data_and_a_prompt_without_text_are_refused(model: Bagel, room: Callable[..., Room]) -> None:
    engine = room()
    place = PlaceholderRange(offset=0, length=3)
    engine.add("lost", [PAD] * 3 + [1], params(model), [feature(None, place)])
    engine.add("silent", [PAD] * 3, params(model), [feature(None, place)])
    engine.run()
    assert_refused(engine, "lost", "the data of a picture is missing")
    assert_refused(engine, "silent", "must end with text")


def assert_refused(engine: Room, name: str, why: str) -> None:
    (output,) = engine.got[name]
    message = unpack(output.pooling_output)
    assert isinstance(message, StageError)
    assert why in message.reason
    assert output.finish_reason == FinishReason.ERROR


LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0])


def drawn(number: int = 300, generated: Sequence[int] = (), **given: Any) -> set[int]:
    sampling = Sampling([3], SamplingParams(seed=5, **given))
    return {sampling.choose(LOGITS, generated) for _ in range(number)}


def test_sampling_parameters_limit_the_tokens() -> None:
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {2, 3}
    assert drawn(top_p=0.5) == {3}
    assert drawn(temperature=0) == {3}
    assert drawn(temperature=0, repetition_penalty=2.0) == {2}  # 3 is in the prompt
    assert drawn(temperature=0, generated=[3], presence_penalty=2.0) == {2}


def test_a_seed_gives_the_same_tokens() -> None:
    runs = [Sampling([3], SamplingParams(seed=seed)) for seed in (1, 1, 2)]
    one, same, other = ([each.choose(LOGITS, ()) for _ in range(40)] for each in runs)
    assert one == same != other


def test_the_draws_of_a_lost_replica_are_skipped_for_a_large_vocabulary_too() -> None:
    logits = torch.zeros(50_000)
    first = Sampling([3], SamplingParams(seed=1))
    whole = [first.choose(logits, ()) for _ in range(6)]
    rest = Sampling([3, *whole[:4]], SamplingParams(seed=1, extra_args={RESUMED: 4}))
    assert [rest.choose(logits, ()) for _ in range(2)] == whole[4:]
