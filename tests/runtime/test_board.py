"""Counters that API server processes share."""

from __future__ import annotations

from vllm.entrypoints.launchers import launcher
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_ext.runtime.client.board import NOT_ACCEPTING, SharedCounters


def test_requests_are_counted_over_all_live_api_servers() -> None:
    board = SharedCounters(3)
    assert list(board.loads) == [NOT_ACCEPTING] * 3 == [launcher._NOT_ACCEPTING] * 3
    servers = [
        SharedAdmissionStats({"mp_admission_counters": board.admitted}, client_count=3, client_index=index)
        for index in range(3)
    ]
    for index, server in enumerate(servers):
        board.loads[index] = index + 2
        server.set_num_requests(index + 2)
    assert list(board.loads) == [2, 3, 4] and servers[0].get_num_requests() == 9
    board.clear(1)
    assert list(board.loads) == [2, NOT_ACCEPTING, 4] and servers[0].get_num_requests() == 6
