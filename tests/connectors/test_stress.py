"""A thousand streams, some aborted, while producers and consumers are killed: no stream hangs, nothing is left."""

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
    """Return the names in /dev/shm, except Python's own `psm_`."""
    return {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")}


@pytest.mark.engine
@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
def test_each_stream_ends_as_planned_or_is_lost_with_its_producer(name: str) -> None:
    config = ConnectorConfig(name=name)
    with child(consume, config):  # the server that forks the tests' processes has files of its own
        before = shared()
    began = time.monotonic()
    Storm(config, STREAMS).run()
    assert time.monotonic() - began < LONGEST_S
    assert shared() == before
