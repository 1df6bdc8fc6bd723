"""Confidence intervals of scores, and the difference of two runs of the same items. Pure and deterministic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
DRAWN_AT_ONCE = 1_000_000
"""Limits the memory of a bootstrap; the result does not depend on this."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval at the confidence level of 95 %, from a bootstrap over items (Efron 1979)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A run compared with an earlier one of the same items.

    Attributes:
        items: number of these items.
        difference: mean of (this run's score - the earlier one's), item by item.
        better, worse: items that score higher, and lower, than before.
        p: probability of a split at least as uneven if both were equally good (exact sign test; for scores of 0 and 1
            that is McNemar's test).
    """

    items: int
    difference: Estimate
    better: int
    worse: int
    p: float

    @property
    def is_worse(self) -> bool:
        """Whether the whole interval of the difference is below zero."""
        return self.difference.high < 0


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores and its interval."""
    values = np.asarray(scores, float)
    low, high = np.quantile(_resampled_means(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def _resampled_means(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    random, size = np.random.default_rng(0), len(values)
    rows = max(1, DRAWN_AT_ONCE // size)
    parts = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([values[random.integers(size, size=(part, size))].mean(axis=1) for part in parts])


def compare(scores: Mapping[str, float], earlier: Mapping[str, float]) -> Comparison:
    """Return the comparison of two runs of the same items.

    Raises:
        KeyError: an item is missing in the earlier run.
    """
    differences = [scores[name] - earlier[name] for name in scores]
    better, worse = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    return Comparison(len(differences), estimate(differences), better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided probability of a split at least as uneven as this one, of fair coins."""
    count = better + worse
    tail = sum(math.comb(count, k) for k in range(min(better, worse) + 1)) / 2**count
    return min(1.0, 2 * tail)
