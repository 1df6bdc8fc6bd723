"""Chunk sizes of a request."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.options import read_chunks

CONFIGURED = {"text": (1,), "frames": (4, 25), "adaptive": True}


def test_sizes_of_known_edges_are_taken_as_they_are() -> None:
    given = {"text": "all", "frames": [4, 25], "adaptive": False}
    assert read_chunks(given, CONFIGURED) == given
    assert read_chunks(None, CONFIGURED) == read_chunks({}, {"adaptive": True}) == {}


@pytest.mark.parametrize(
    ("given", "parameter", "words"),
    [
        ([4], "chunks", 'must be an object such as {"frames": [4, 25]}'),
        ({"frame": [1]}, "chunks.frame", "use one of text, frames, adaptive"),
        ({1: [1]}, "chunks.1", "is unknown"),
        ({"frames": [0]}, "chunks.frames", "sizes >= 1 such as [4, 25], or 'all', got [0]"),
        ({"frames": None}, "chunks.frames", "got None"),
        ({"text": "some"}, "chunks.text", "or 'all', got 'some'"),
        ({"adaptive": 1}, "chunks.adaptive", "must be true or false"),
    ],
    ids=str,
)
def test_refusals_name_the_entry_and_its_allowed_values(given: Any, parameter: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_chunks(given, CONFIGURED)
    message = str(refused.value)
    assert refused.value.parameter == parameter and message.startswith(f"{parameter}: ") and words in message


def test_a_model_without_chunks_refuses_them() -> None:
    with pytest.raises(RequestError, match=r"^chunks: this model") as refused:
        read_chunks({"adaptive": True}, {"adaptive": True})
    assert refused.value.parameter == "chunks"
