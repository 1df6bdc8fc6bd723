"""A thousand streams, some aborted, while producers and consumers are killed: nothing is left and nothing hangs."""

from __future__ import annotations

import os
import time

import pytest

from tests.connectors.streams import STREAMS, Storm
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.conformance import child, consume

LONGEST_S = 60.0


def shared() -> set[str]:
    """What is in /dev/shm; `psm_` is Python's own, and other programs'."""
    return {entry for entry in os.listdir("/dev/shm") if not entry.startswith("psm_")}


@pytest.mark.parametrize("name", ["shared_memory", "tcp"])
def test_a_thousand_streams(name: str) -> None:
    config = ConnectorConfig(name=name)
    with child(consume, config):  # the server that forks the tests' processes has files of its own
        before = shared()
    storm, began = Storm(config), time.monotonic()
    storm.run()
    assert time.monotonic() - began < LONGEST_S
    assert shared() == before
    how = dict(storm.seen)
    killed, taken_over = how.pop("killed"), how.pop("taken over")
    assert sum(how.values()) == STREAMS and min(how.values()) > 10, how
    assert killed > 10 and taken_over > 10
