"""Recording of CUDA graphs, without a device."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vllm_omni_ext.engine.graphs import CudaGraphs


def test_after_a_failed_capture_the_next_one_has_a_new_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may still record into the old pool, and every capture in it would fail."""
    handles, pools, ended = itertools.count(), [], []

    class Graph:
        def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
            pools.append(pool)

        def capture_end(self) -> None:
            ended.append(1)

        replay = Mock()

    stream = SimpleNamespace(wait_stream=Mock())
    replaced: dict[str, Any] = {
        "graph_pool_handle": lambda: next(handles),
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "CUDAGraph": Graph,
        "stream": lambda given: contextlib.nullcontext(),
        "synchronize": Mock(),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs, calls = CudaGraphs(torch.device("cpu")), itertools.count()

    def fails_when_captured() -> None:
        if next(calls) >= 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert graphs.record(lambda: None) is Graph.replay
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(fails_when_captured)
    graphs.record(lambda: None)
    graphs.record(lambda: None)
    assert pools == [0, 0, 1, 1] and len(ended) == 4
