"""Texts of refusals, and the limit of their log lines."""

from __future__ import annotations

import logging

import pytest

from vllm_omni_ext.coordinator.refusals import LOG_EVERY_S, WITHHELD, Refusals

LOG = logging.getLogger("refusing")


@pytest.mark.parametrize(("with_reason", "answer"), [(True, "model is 'a' there and 'b' here"), (False, WITHHELD)])
def test_refusal_reason_goes_to_the_log_and_not_to_strangers(
    with_reason: bool, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(LOG, with_reason=with_reason)
    assert refusals.words("a replica", "model is 'a' there and 'b' here") == answer
    assert caplog.messages == ["refused a replica: model is 'a' there and 'b' here"]


def test_a_flood_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(LOG, with_reason=False, clock=lambda: now[0])
    for number in range(1000):
        refusals.words("x" * 5000, f"{number} " + "y" * 5000)
    assert len(caplog.messages) == 1 and len(caplog.messages[0]) < 1300
    now[0] += LOG_EVERY_S
    refusals.words("a replica", "again")
    assert caplog.messages[1] == "refused a replica: again (and 999 other refusals)"
