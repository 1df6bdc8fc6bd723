"""What those are told who are refused, and what the head's log says of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

UNTOLD = "it does not belong to this deployment; the head's log says why"
"""Said instead of the reason where anybody may ask: the reason would tell a stranger what to say the next time."""

LOG_EVERY_S = 1.0
"""One refusal is logged in this time: a flood must not fill the disk."""


class Refusals:
    """Logs refusals and chooses their words.

    Args:
        told: those who ask know the secret, or nobody else can reach us: they are told the reason.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, *, told: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._told = told
        self._clock = clock
        self._logged = -math.inf
        self._unlogged = 0

    def words(self, who: str, reason: str) -> str:
        """Log a refusal, and return what the one who is refused is told.

        Args:
            who: what was refused, e.g. "a replica of 10.0.0.2".
        """
        now = self._clock()
        if now < self._logged + LOG_EVERY_S:
            self._unlogged += 1
        else:
            more = f" (and {self._unlogged} other refusals)" if self._unlogged else ""
            self._log.warning("refused %.200s: %.1000s%s", who, reason, more)
            self._logged, self._unlogged = now, 0
        return reason if self._told else UNTOLD
