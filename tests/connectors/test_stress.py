"""Hundreds of streams, some aborted, while producers and consumers are killed: nothing is left and nothing hangs."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.streams import Storm
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.conformance import child, consume

LONGEST_S = 60.0
STREAMS = 1000


def shared() -> set[str]:
    """What is in /dev/shm; `psm_` is Python's own, and other programs'."""
    return {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")}


@pytest.mark.engine
@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
def test_streams_in_a_storm(name: str) -> None:
    config = ConnectorConfig(name=name)
    with child(consume, config):  # the server that forks the tests' processes has files of its own
        before = shared()
    began = time.monotonic()
    Storm(config, STREAMS).run()
    assert time.monotonic() - began < LONGEST_S
    assert shared() == before
