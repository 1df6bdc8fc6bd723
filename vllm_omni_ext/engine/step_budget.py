"""Limits the work of a step, so that a request that becomes urgent meanwhile waits only briefly. Pure: no clock."""

from __future__ import annotations

FORGET = 0.95
"""Weight of a step after the next one: about the last twenty count."""

LEAST_SPREAD = 0.01
"""If the variance is below this share of the mean square, steps are too similar in size to estimate a token's cost."""


class StepBudget:
    """Estimates the cost of steps, as a time for the step and one for each token, and limits steps to a time.

    Args:
        limit_s: longest step. A single request that takes longer is still a step of its own.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Account for a step that has ended."""
        seconds = min(seconds, 10 * self._limit_s)  # longer times come from a process that was stopped meanwhile
        self._weight = FORGET * self._weight + 1
        self._x = FORGET * self._x + tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + tokens * tokens
        self._xy = FORGET * self._xy + tokens * seconds

    def tokens(self, most: int) -> int:
        """Return how many tokens fit into a step, from 1 to `most`."""
        token_s, step_s = self.cost()
        left_s = self._limit_s - step_s
        if token_s <= 0 or left_s >= most * token_s:
            return most
        return 1 if left_s <= token_s else int(left_s / token_s)

    def cost(self) -> tuple[float, float]:
        """Return the seconds of a token and those of a step without tokens: the line nearest to all steps."""
        if not self._x:
            return 0.0, 0.0
        x, y, xx = self._x / self._weight, self._y / self._weight, self._xx / self._weight
        spread = xx - x * x
        if spread <= LEAST_SPREAD * xx:
            return y / x, 0.0
        token_s = (self._xy / self._weight - x * y) / spread
        step_s = y - token_s * x
        return (token_s, step_s) if step_s >= 0 else (y / x, 0.0)
