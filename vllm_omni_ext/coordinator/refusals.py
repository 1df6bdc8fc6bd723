"""Logs refusals of replicas and chooses the reason that a refused replica receives."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

WITHHELD = "it does not belong to this deployment; the head's log says why"
"""Sent instead of the reason where anyone can connect: the reason would help an attacker."""

LOG_EVERY_S = 1.0
"""At most one refusal is logged in this time: a flood must not fill the disk."""


class Refusals:
    """Logs refusals and chooses the reply.

    Args:
        with_reason: replies state the reason, since clients have the secret or are processes of this user.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, *, with_reason: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._with_reason = with_reason
        self._clock = clock
        self._logged = -math.inf
        self._unlogged = 0

    def words(self, subject: str, reason: str) -> str:
        """Log a refusal and return the text of the reply.

        Args:
            subject: the refused replica or message, e.g. "a replica of 10.0.0.2".
        """
        now = self._clock()
        if now < self._logged + LOG_EVERY_S:
            self._unlogged += 1
        else:
            more = f" (and {self._unlogged} other refusals)" if self._unlogged else ""
            self._log.warning("refused %.200s: %.1000s%s", subject, reason, more)
            self._logged, self._unlogged = now, 0
        return reason if self._with_reason else WITHHELD
