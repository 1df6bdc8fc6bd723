"""Who is encoded together with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.engine.encoding import by_request

FEATURES = {
    "sound": ["audio"],
    "two sounds": ["audio", "audio"],
    "picture": ["image"],
    "both": ["image", "audio"],
    "sound in the cache": [None],
}


def feature(modality: str | None) -> Any:
    return SimpleNamespace(modality=modality or "audio", data=None if modality is None else "data")


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
def test_requests_with_sound_are_apart(names: list[str], calls: list[list[str]]) -> None:
    seen: list[dict[str, list[int]]] = []

    def execute(step: Any) -> list[str]:
        seen.append(step.scheduled_encoder_inputs)
        return list(step.scheduled_encoder_inputs)

    requests = {name: SimpleNamespace(mm_features=[feature(each) for each in FEATURES[name]]) for name in names}
    runner = SimpleNamespace(requests=requests, _execute_mm_encoder=execute)
    due = {name: list(range(len(FEATURES[name]))) for name in names}
    step = SimpleNamespace(scheduled_encoder_inputs=dict(due), other="kept")
    made = by_request(runner)(step)
    assert [list(each) for each in seen] == calls
    assert all(each[name] == due[name] for each in seen for name in each)
    assert sorted(made) == sorted(names) and step.scheduled_encoder_inputs == due
