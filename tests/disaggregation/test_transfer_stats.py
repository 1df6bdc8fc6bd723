"""What a worker counts: per interval, as vLLM passes it on, and since the start."""

from __future__ import annotations

import pickle

from vllm_omni_ext.disaggregation.transfer_stats import WAITED, TransferStats


def test_an_interval_travels_and_adds_up() -> None:
    stats = TransferStats()
    stats.record_transfer(0.5, 100, 2)
    stats.record_received(0.25)
    first = pickle.loads(pickle.dumps(stats.clone_and_reset()))
    assert stats.is_empty()
    stats.record_received(0.5)
    stats.record_failed_recv()
    both = first.aggregate(stats.clone_and_reset())
    assert both.data[WAITED] == [0.25, 0.5]
    assert both.reduce()["Num failed recvs"] == 1
    assert both.reduce()["Num successful transfers"] == 1


def test_waiting_alone_is_something_to_tell() -> None:
    stats = TransferStats()
    assert stats.is_empty()
    stats.record_received(0.5)
    assert not stats.is_empty()


def test_sums_survive_an_interval() -> None:
    stats = TransferStats()
    for _ in range(2):
        stats.record_transfer(0.5, 100, 2)
        stats.record_failed_transfer()
        stats.record_kv_expired_req()
        stats.record_received(0.25)
        stats.clone_and_reset()
    assert stats.totals == {
        "transfers": 2,
        "bytes": 200,
        "seconds": 1.0,
        "failed_transfers": 2,
        "expired": 2,
        "received": 2,
        "waited_seconds": 0.5,
    }
