"""`benchmarks/soak.py`: how answers are compared, and what counts as lost or left over. No server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile


@pytest.fixture
def soak(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("soak")


SAMPLES = np.arange(-5, 5, dtype="<i2")


def wav() -> bytes:
    soundfile.write(file := io.BytesIO(), SAMPLES, 24_000, format="wav", subtype="PCM_16")
    return file.getvalue()


def event(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_answers_of_every_kind_are_read(soak: ModuleType) -> None:
    encoded = base64.b64encode(wav()).decode()
    chat = json.dumps({"choices": [{"message": {"content": "moon", "audio": {"data": encoded}}}]}).encode()
    half = [base64.b64encode(part.tobytes()).decode() for part in np.split(SAMPLES, 2)]
    stream = event(content="mo") + event(audio={"data": half[0]}) + event(content="on") + event(audio={"data": half[1]})
    assert soak.same(soak.heard("spoken", chat), ("moon", SAMPLES))
    assert soak.same(soak.heard("read aloud", wav()), ("", SAMPLES))
    assert soak.same(soak.heard("streamed", stream + b"data: [DONE]\n\n"), ("moon", SAMPLES))
    with pytest.raises(soak.Wrong, match="gone"):
        soak.heard("streamed", stream + b'data: {"error": {"message": "gone"}}\n\n')


def test_only_rounding_may_differ(soak: ModuleType) -> None:
    assert soak.same(("a", SAMPLES), ("a", SAMPLES + 1))
    assert not soak.same(("a", SAMPLES), ("a", SAMPLES + 2))
    assert not soak.same(("a", SAMPLES), ("a", SAMPLES[1:]))
    assert not soak.same(("a", SAMPLES), ("b", SAMPLES))
    assert not soak.same(("a", np.array([2**15 - 1], "i2")), ("a", np.array([-(2**15)], "i2")))


def level(soak: ModuleType, **changes: Any) -> Any:
    memory = {"pss": {"head": 100}, "rss": {"head": 200}}
    usual = {**memory, "descriptors": {"head": 9}, "threads": {"head": 3}, "zmq_threads": {"head": 1}}
    return soak.Level(**usual | {"shared_bytes": 5, "shared_names": 2, "requests": 0.0, "blocks": 0.0} | changes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"descriptors": {"head": 8}, "shared_names": 1}, []),
        ({"descriptors": {"head": 11}}, ["head: 2 more descriptors"]),
        ({"threads": {"head": 4}}, ["head: 1 more threads"]),
        ({"threads": {"head": 3, "api_server/0": 22}}, []),
        ({"threads": {"head": 3, "api_server/0": 23}}, ["api_server/0: 23 more threads"]),
        ({"zmq_threads": {"head": 1, "api_server/0": 2}}, []),
        ({"zmq_threads": {"head": 1, "api_server/0": 4}}, ["api_server/0: 4 more threads of connections"]),
        ({"zmq_threads": {"head": 3}}, ["head: 2 more threads of connections"]),
        ({"shared_names": 3}, ["1 more names in /dev/shm"]),
        ({"requests": 1.0, "blocks": 0.5}, ["requests are held", "blocks are held"]),
    ],
)
def test_what_is_left_over(soak: ModuleType, changes: dict[str, Any], found: list[str]) -> None:
    assert level(soak, **changes).left_over(level(soak)) == found


def test_growth_is_that_of_all_processes(soak: ModuleType) -> None:
    levels = [level(soak), level(soak, pss={"head": 90, "talker/0": 20}, rss={"head": 150, "talker/0": 50})]
    assert soak.Result(levels=levels).growth() == pytest.approx({"pss": 0.1, "rss": 0.0})
