"""`benchmarks/handoff_cost.py`: how a message's part of the cost is found; the engines are not asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import pytest

Import: TypeAlias = Callable[[str], ModuleType]


def test_one_message_costs_the_difference(benchmark: Import) -> None:
    handoff: ModuleType = benchmark("handoff_cost")

    def turn(messages: int, bytes_: int, add: float, cpu: float, **calls: int) -> Any:
        counts = {handoff.API: Counter(calls), "talker/0": Counter(read=5)}
        return handoff.Turn(messages, bytes_, [add], {handoff.API: cpu, "talker/0": 0.5}, counts)

    single = [turn(101, 5000, 20e-6, 0.30, sendmsg=201, openat=3), turn(101, 5000, 30e-6, 0.40, sendmsg=201, openat=3)]
    whole = [turn(1, 1000, 1.0, 0.10, sendmsg=1, openat=3)] * 2
    cost = handoff.cost("text", single, whole)
    assert (cost.messages, cost.bytes, cost.naming) == (100, 40.0, 0.0)
    assert cost.add_us == pytest.approx(25)
    assert cost.cpu_us == pytest.approx({handoff.API: 2500, "talker/0": 0})
    assert cost.calls == pytest.approx({handoff.API: 2.0, "talker/0": 0})
    assert cost.often == {"sendmsg": 2.0}
    assert "naming something in a file system: 0.000" in "\n".join(handoff.table([cost]))


def test_only_one_hand_over_is_cut(benchmark: Import) -> None:
    handoff: ModuleType = benchmark("handoff_cost")
    assert handoff.chunks("frames", one_by_one=True) == {"text": "all", "frames": [1], "adaptive": False}
    assert handoff.chunks("frames", one_by_one=False) == {"text": "all", "frames": "all"}
