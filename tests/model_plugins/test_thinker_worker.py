"""The sound of each request is encoded in a call of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_ext.model_plugins.qwen3_omni.sound_blocks import LENGTH
from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import correct_positions, encode_apart
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import Clock

FEATURES: dict[str, list[str | None]] = {
    "sound": ["audio"],
    "two sounds": ["audio", "audio"],
    "picture": ["image"],
    "both": ["image", "audio"],
    "sound in the cache": [None],
}


def feature(modality: str | None) -> Any:
    data = {LENGTH: SimpleNamespace(data=40)}
    return SimpleNamespace(modality=modality or "audio", data=None if modality is None else data)


class Cache:
    """Media of Model Runner V2's requests."""

    def __init__(self) -> None:
        self.mm_features: dict[str, list[Any]] = {}

    def add_request(self, req_id: str, features: list[Any]) -> None:
        self.mm_features[req_id] = list(features)

    def remove_request(self, req_id: str) -> None:
        del self.mm_features[req_id]

    def add(self, requests: dict[str, list[Any]]) -> None:
        for req_id, features in requests.items():
            self.add_request(req_id, features)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("names", "calls"),
    [
        ([], [[]]),
        (["sound"], [["sound"]]),
        (["sound", "picture"], [["sound", "picture"]]),
        (["two sounds", "sound in the cache"], [["two sounds", "sound in the cache"]]),
        (["sound", "picture", "two sounds"], [["picture"], ["sound"], ["two sounds"]]),
        (["both", "sound"], [[], ["both"], ["sound"]]),
    ],
    ids=str,
)
def test_requests_with_sound_are_encoded_apart(names: list[str], calls: list[list[str]], v2: bool) -> None:
    seen: list[dict[str, list[int]]] = []
    features = {name: [feature(each) for each in FEATURES[name]] for name in names}
    due = {name: list(range(len(FEATURES[name]))) for name in names}
    chunk: Any = SimpleNamespace(frames=0)
    if v2:
        state = SimpleNamespace(execute_mm_encoder=lambda due: seen.append(dict(due)))
        runner = SimpleNamespace(model_state=state, encoder_cache=Cache())
        encode_apart(runner, chunk)
        runner.encoder_cache.add(features)
        runner.model_state.execute_mm_encoder(due)
    else:

        def execute(step: Any) -> list[str]:
            seen.append(step.scheduled_encoder_inputs)
            return list(step.scheduled_encoder_inputs)

        requests = {name: SimpleNamespace(mm_features=features[name]) for name in names}
        runner = SimpleNamespace(requests=requests, _execute_mm_encoder=execute)
        encode_apart(runner, chunk)
        step = SimpleNamespace(scheduled_encoder_inputs=dict(due), other="kept")
        assert sorted(runner._execute_mm_encoder(step)) == sorted(names)
        assert step.scheduled_encoder_inputs == due
    assert [list(each) for each in seen] == calls
    assert all(each[name] == due[name] for each in seen for name in each)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("due", "calls"),
    [
        (
            {"short": [1], "long": [1], "whole": [0, 1]},
            [([], 0), (["short"], 0), (["long"], 100), (["whole"], 0)],
        ),
        ({"shorter": [0]}, [(["shorter"], 40)]),
        ({"shorter": [1], "shorter too": [0]}, [([], 0), (["shorter"], 0), (["shorter too"], 40)]),
        ({"short": [1], "picture": [2]}, [(["short", "picture"], 0)]),
        ({"long": [1], "picture": [2]}, [(["long", "picture"], 100)]),
        ({"picture": [2]}, [(["picture"], 0)]),
        ({}, [([], 0)]),
    ],
    ids=str,
)
def test_sounds_are_padded_as_in_a_call_with_all_sounds_of_the_prompt(
    due: dict[str, list[int]], calls: list[tuple[list[str], int]], v2: bool
) -> None:
    """A longer sound may be in the encoder cache: of this prompt, or of the prompt of an image."""
    names = ("short", "shorter", "long")
    features = {name: [feature("audio"), feature("audio"), feature("image")] for name in names}
    features["shorter"][0].data[LENGTH].data = 30
    features["long"][0].data[LENGTH].data = 250
    features["whole"] = features["picture"] = features["long"]
    features["shorter too"] = features["shorter"]
    chunk: Any = SimpleNamespace(frames=0)
    seen: list[tuple[list[str], int]] = []

    def execute(given: Any) -> list[str]:
        due = given if v2 else given.scheduled_encoder_inputs
        seen.append((list(due), chunk.frames))
        return []

    if v2:
        state = SimpleNamespace(execute_mm_encoder=execute)
        runner = SimpleNamespace(model_state=state, encoder_cache=Cache())
        encode_apart(runner, chunk)
        runner.encoder_cache.add(features)
        runner.model_state.execute_mm_encoder(due)
    else:
        requests = {name: SimpleNamespace(mm_features=each) for name, each in features.items()}
        runner = SimpleNamespace(requests=requests, _execute_mm_encoder=execute)
        encode_apart(runner, chunk)
        runner._execute_mm_encoder(SimpleNamespace(scheduled_encoder_inputs=due))
    assert seen == calls


def test_sounds_are_padded_with_a_longer_one_whose_data_is_gone() -> None:
    """vLLM 0.33 drops the data of computed media."""
    chunk: Any = SimpleNamespace(frames=0)
    seen: list[int] = []
    cache = Cache()
    state = SimpleNamespace(execute_mm_encoder=lambda due: seen.append(chunk.frames))
    encode_apart(SimpleNamespace(model_state=state, encoder_cache=cache), chunk)
    long, short = feature("audio"), feature("audio")
    long.data[LENGTH].data = 250
    cache.add({"r": [long, short]})
    cache.mm_features["r"][0] = SimpleNamespace(modality="audio", data=None)
    state.execute_mm_encoder({"r": [1]})
    assert seen == [100]
    cache.remove_request("r")
    assert cache.mm_features == {}


def test_a_thinker_without_media_is_loaded() -> None:
    """Model Runner V2 has no encoder cache if `limit_mm_per_prompt` allows no media."""
    state = SimpleNamespace(execute_mm_encoder="stock")
    chunk: Any = SimpleNamespace(frames=0)
    encode_apart(SimpleNamespace(model_state=state, encoder_cache=None), chunk)
    assert state.execute_mm_encoder == "stock"


def test_positions_are_computed_for_whole_sounds() -> None:
    model = SimpleNamespace(get_mrope_input_positions=lambda tokens, features: (torch.tensor(tokens), len(features)))
    correct_positions(model, Clock(per_second=13, merge=2, own_marks=True))
    place = [SimpleNamespace(offset=at, length=2, is_embed=None) for at in (1, 3, 6)]
    features = [feature("audio") for _ in place]
    for each, where in zip(features, place, strict=True):
        each.mm_position, each.identifier, each.data[LENGTH].field = where, "name", None
    assert model.get_mrope_input_positions([7], features) == (torch.tensor([7]), 2)
