"""Who is encoded together with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.model_plugins.qwen3_omni.thinker_worker import encode_apart

FEATURES = {
    "sound": ["audio"],
    "two sounds": ["audio", "audio"],
    "picture": ["image"],
    "both": ["image", "audio"],
    "sound in the cache": [None],
}


def feature(modality: str | None) -> Any:
    return SimpleNamespace(modality=modality or "audio", data=None if modality is None else "data")


CALLS = pytest.mark.parametrize(
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


@CALLS
def test_requests_with_sound_are_apart(names: list[str], calls: list[list[str]]) -> None:
    seen: list[dict[str, list[int]]] = []

    def execute(step: Any) -> list[str]:
        seen.append(step.scheduled_encoder_inputs)
        return list(step.scheduled_encoder_inputs)

    requests = {name: SimpleNamespace(mm_features=[feature(each) for each in FEATURES[name]]) for name in names}
    runner = SimpleNamespace(requests=requests, _execute_mm_encoder=execute)
    encode_apart(runner)
    due = {name: list(range(len(FEATURES[name]))) for name in names}
    step = SimpleNamespace(scheduled_encoder_inputs=dict(due), other="kept")
    made = runner._execute_mm_encoder(step)
    assert [list(each) for each in seen] == calls
    assert all(each[name] == due[name] for each in seen for name in each)
    assert sorted(made) == sorted(names) and step.scheduled_encoder_inputs == due


@CALLS
def test_requests_with_sound_are_apart_on_v2(names: list[str], calls: list[list[str]]) -> None:
    seen: list[dict[str, list[int]]] = []
    features = {name: [feature(each) for each in FEATURES[name]] for name in names}
    state = SimpleNamespace(execute_mm_encoder=lambda due: seen.append(dict(due)))
    runner = SimpleNamespace(model_state=state, encoder_cache=SimpleNamespace(mm_features=features))
    encode_apart(runner)
    due = {name: list(range(len(FEATURES[name]))) for name in names}
    runner.model_state.execute_mm_encoder(due)
    assert [list(each) for each in seen] == calls
    assert all(each[name] == due[name] for each in seen for name in each)
