"""The sound of each request is encoded in a call of its own."""

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
    if v2:
        state = SimpleNamespace(execute_mm_encoder=lambda due: seen.append(dict(due)))
        runner = SimpleNamespace(model_state=state, encoder_cache=SimpleNamespace(mm_features=features))
        encode_apart(runner)
        runner.model_state.execute_mm_encoder(due)
    else:

        def execute(step: Any) -> list[str]:
            seen.append(step.scheduled_encoder_inputs)
            return list(step.scheduled_encoder_inputs)

        requests = {name: SimpleNamespace(mm_features=features[name]) for name in names}
        runner = SimpleNamespace(requests=requests, _execute_mm_encoder=execute)
        encode_apart(runner)
        step = SimpleNamespace(scheduled_encoder_inputs=dict(due), other="kept")
        assert sorted(runner._execute_mm_encoder(step)) == sorted(names)
        assert step.scheduled_encoder_inputs == due
    assert [list(each) for each in seen] == calls
    assert all(each[name] == due[name] for each in seen for name in each)
