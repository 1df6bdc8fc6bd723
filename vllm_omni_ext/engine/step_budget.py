"""Limits the number of tokens in a step by the time that they take, so that an urgent request waits for a short step.

Pure: no clock.
"""

from __future__ import annotations

FORGET = 0.95
"""Factor by which each later step reduces the weight of a step: about the last 20 steps count."""

LEAST_SPREAD = 0.01
"""If the variance of the steps' token counts is below this share of their mean square, the counts are too similar to
estimate two values: the fixed time of a step is then taken as 0."""


class StepBudget:
    """Estimates the duration of a step as a fixed time plus a time for each token, and limits the tokens of a step.

    Args:
        limit_s: longest step in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add a finished step to the estimate."""
        seconds = min(seconds, 10 * self._limit_s)  # longer times come from a process that was stopped meanwhile
        self._weight = FORGET * self._weight + 1
        self._x = FORGET * self._x + tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + tokens * tokens
        self._xy = FORGET * self._xy + tokens * seconds

    def tokens(self, most: int) -> int:
        """Return the largest number of tokens, from 1 to `most`, whose step lasts at most `limit_s` by the estimate."""
        token_s, step_s = self.cost()
        left_s = self._limit_s - step_s
        if token_s <= 0 or left_s >= most * token_s:
            return most
        return 1 if left_s <= token_s else int(left_s / token_s)

    def cost(self) -> tuple[float, float]:
        """Return (seconds per token, seconds of a step without tokens), fitted to the steps by least squares."""
        if not self._x:
            return 0.0, 0.0
        x, y, xx = self._x / self._weight, self._y / self._weight, self._xx / self._weight
        spread = xx - x * x
        if spread <= LEAST_SPREAD * xx:
            return y / x, 0.0
        token_s = (self._xy / self._weight - x * y) / spread
        step_s = y - token_s * x
        return (token_s, step_s) if step_s >= 0 else (y / x, 0.0)
