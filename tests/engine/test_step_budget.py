"""The number of tokens that fit into a step, for any costs."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_omni_ext.engine.step_budget import StepBudget

MOST = 4096
costs = st.floats(1e-6, 1e-3), st.floats(0.0, 0.01)


def learned(sizes: list[int], token_s: float, step_s: float, limit_s: float = 0.025) -> StepBudget:
    budget = StepBudget(limit_s)
    for tokens in sizes:
        budget.note(tokens, step_s + tokens * token_s)
    return budget


@given(*costs)
def test_the_cost_of_a_step_and_of_a_token_are_found(token_s: float, step_s: float) -> None:
    budget = learned([16, 400, 64, 800, 16, 32], token_s, step_s, limit_s=1.0)
    assert budget.cost() == (pytest.approx(token_s, rel=1e-3, abs=1e-7), pytest.approx(step_s, rel=1e-3, abs=1e-5))


@given(st.lists(st.integers(16, 800), min_size=6), *costs)
def test_a_full_step_is_no_longer_than_the_limit(sizes: list[int], token_s: float, step_s: float) -> None:
    budget = learned([*sizes, 16, 800], token_s, step_s, limit_s=1.0)
    full = budget.tokens(10**9)
    assert full == 1 or step_s + full * token_s <= 1.0 + 1e-3


def test_a_machine_that_becomes_slower_is_detected() -> None:
    budget = learned([16, 400] * 20, 1e-5, 0.001)
    assert budget.tokens(MOST) == pytest.approx(2400, rel=0.05)
    for tokens in (16, 400) * 40:
        budget.note(tokens, 0.001 + tokens * 1e-4)
    assert budget.tokens(MOST) == pytest.approx(240, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, MOST), st.floats(0.0, 1e4)), max_size=60))
@example([(81, 1e-308)])
def test_a_step_has_room_for_at_least_one_token(steps: list[tuple[int, float]]) -> None:
    budget = StepBudget(0.025)
    assert budget.tokens(MOST) == MOST, "nothing limits the first step"
    for tokens, seconds in steps:
        budget.note(tokens, seconds)
    assert 1 <= budget.tokens(MOST) <= MOST
