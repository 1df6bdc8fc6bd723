"""What API servers show each other, between processes."""

from __future__ import annotations

import multiprocessing

import pytest
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_ext.runtime.client.board import NOT_ACCEPTING, SharedCounters

FORK = multiprocessing.get_context("fork")


def admission(board: SharedCounters, server: int) -> SharedAdmissionStats:
    return SharedAdmissionStats({"mp_admission_counters": board.admitted}, client_count=3, client_index=server)


def test_new_api_server_has_no_connections_until_it_is_ready() -> None:
    assert list(SharedCounters(3).loads) == [NOT_ACCEPTING] * 3


def test_vllm_takes_a_new_one_for_the_most_loaded() -> None:
    from vllm.entrypoints.launchers import launcher

    assert launcher._NOT_ACCEPTING == NOT_ACCEPTING


@pytest.mark.engine
def test_requests_of_all_are_counted_until_their_server_dies() -> None:
    board = SharedCounters(3)

    def count(server: int, requests: int) -> None:
        board.loads[server] = requests
        admission(board, server).set_num_requests(requests)

    for server in range(3):
        process = FORK.Process(target=count, args=(server, server + 2))
        process.start()
        process.join()
    assert list(board.loads) == [2, 3, 4]
    assert admission(board, 0).get_num_requests() == 9
    board.clear(1)
    assert list(board.loads) == [2, NOT_ACCEPTING, 4]
    assert admission(board, 0).get_num_requests() == 6
