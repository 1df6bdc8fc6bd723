"""Closing a replica's connection never waits for what a dead replica has not received."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import zmq

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica import StockReplica

PATIENCE_S = 30.0


def test_the_context_ends_beside_the_event_loop() -> None:
    context = zmq.Context()
    unsent = context.socket(zmq.PUSH)
    unsent.connect("tcp://127.0.0.1:9")
    unsent.send(b"to nobody")
    client: Any = SimpleNamespace(resources=SimpleNamespace(ctx=context), shutdown=lambda timeout: None)
    before, began = threading.enumerate(), time.monotonic()
    StockReplica(ReplicaId("talker", 0), client).close()
    assert time.monotonic() - began < 1
    ending, *others = [each for each in threading.enumerate() if each.name == "end-zmq" and each not in before]
    assert others == []
    assert ending.daemon and ending.is_alive(), "it waits for the message, as garbage collection would"
    unsent.close(linger=0)
    ending.join(PATIENCE_S)
    assert context.closed, "garbage collection finds it ended"
