"""Prefill and decode apart. Mooncake listens on all interfaces: `test_accuracy.py` runs this where only loopback is."""

from __future__ import annotations

from pathlib import Path

from examples.server import Server
from tests.accuracy.answers import Answer
from tests.accuracy.broken import answers_of
from tests.accuracy.cases import Case
from tests.accuracy.test_accuracy import check_alike
from tests.support.cluster import LENGTH


def test_prefill_and_decode_apart(trained: Path, asked: list[Case], usual: dict[str, Answer], tmp_path: Path) -> None:
    with Server(trained, tmp_path / "log", [*LENGTH, "--stage-config", "qwen3_omni_pd"]) as server:
        check_alike(answers_of(server, asked), usual)
