"""Estimates when the buffer of a player in real time runs empty. Pure: no clock."""

from __future__ import annotations


class Playback:
    """The playing time that a listener has left, from the items sent to it and their times.

    A listener begins to play at the first piece, plays in real time, and waits whenever nothing is left.

    Args:
        rate: items per second of playing.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._dry_at: float | None = None
        self._delivered = 0
        self._due = 0.0

    def due(self, start: int, at: float) -> float:
        """Return when the part that begins with item `start` is needed, in seconds of the clock of `at`.

        The listener waits for the first part already, so it is due at once: after parts of listeners with no items
        left, and before all others. A later part is never due before an earlier one, since they must stay in order.
        """
        self._dry_at = at if self._dry_at is None else self._dry_at
        self._due = max(self._due, self._dry_at + (start - self._delivered) / self._rate)
        return self._due

    def again(self) -> float:
        """Return when a part is needed that begins the stream again, on another replica."""
        self._due = self._dry_at or 0.0
        return self._due

    def delivered(self, seconds: float, items: int, at: float) -> None:
        """Record that the listener received `seconds` more at time `at`, and has received `items` items in all."""
        self._dry_at = max(at, self._dry_at or at) + seconds
        self._delivered = items
