"""A transfer is settled when its request does not wait and no worker can write any more."""

from __future__ import annotations

import pytest

from vllm_omni_ext.disaggregation.pending_transfers import PendingTransfers

A, B = ("a", "1"), ("b", "2")


@pytest.fixture
def pulls() -> PendingTransfers:
    made = PendingTransfers()
    made.begin(A, 10.0)
    return made


def test_a_successful_transfer_is_settled_by_the_answer(pulls: PendingTransfers) -> None:
    pulls.queried([A], 1)
    assert pulls.waits(A)
    assert pulls.arrived(A, 12.5) == 2.5
    assert not pulls.waits(A)
    assert pulls.answer([A]) == ([A], [])
    assert not pulls


def test_a_failed_transfer_is_not_settled_before_every_worker_has_answered(pulls: PendingTransfers) -> None:
    pulls.queried([A], 2)
    pulls.failed(A)
    assert pulls.settle([A]) == ([], [])
    assert pulls.answer([A]) == ([], [])
    assert pulls
    assert pulls.answer([A]) == ([], [A])
    assert not pulls


def test_an_answer_does_not_settle_a_transfer_whose_request_waits(pulls: PendingTransfers) -> None:
    pulls.queried([A], 1)
    assert pulls.answer([A]) == ([], [])
    assert pulls.waits(A)


def test_transfer_that_was_never_requested_is_settled_at_once(pulls: PendingTransfers) -> None:
    pulls.failed(A)
    assert pulls.settle([A]) == ([], [A])


def test_answer_settles_no_other_transfer(pulls: PendingTransfers) -> None:
    pulls.begin(B, 11.0)
    pulls.queried([A, B, ("unknown", "3")], 1)
    pulls.arrived(B, 12.0)
    assert pulls.answer([B, ("unknown", "3")]) == ([B], [])
    assert pulls.waits(A)
    assert not pulls.waits(B)
