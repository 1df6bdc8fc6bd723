"""What a pipeline asks of the compilation, beside what the user asks of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.topology.compilation import FIELD, with_custom_ops


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, {"custom_ops": ["+rope"]}),
        ({}, {"custom_ops": ["+rope"]}),
        (3, {"mode": 3, "custom_ops": ["+rope"]}),
        ({"mode": 3, "custom_ops": ["none", "+norm"]}, {"mode": 3, "custom_ops": ["none", "+norm", "+rope"]}),
        ({"custom_ops": ["all", "-rope"]}, {"custom_ops": ["all", "-rope"]}),
        ({"custom_ops": ["+rope"]}, {"custom_ops": ["+rope"]}),
    ],
    ids=str,
)
def test_what_the_user_says_stays(said: Any, expected: dict[str, Any]) -> None:
    args = {"seed": 1} if said is None else {"seed": 1, FIELD: said}
    assert with_custom_ops(args, ("rope",)) == {"seed": 1, FIELD: expected}


def test_an_object_is_copied() -> None:
    """As `--compilation-config` of vLLM's command line makes it."""
    said = SimpleNamespace(mode=3, custom_ops=["none"])
    made = with_custom_ops({FIELD: said}, ("rope",))[FIELD]
    assert (made.mode, made.custom_ops) == (3, ["none", "+rope"]) and said.custom_ops == ["none"]


def test_nothing_is_asked_of_most_stages() -> None:
    assert with_custom_ops({"seed": 1}, ()) == {"seed": 1}
