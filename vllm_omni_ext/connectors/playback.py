"""When somebody who plays a stream as it comes runs out of it. Pure: no clock."""

from __future__ import annotations


class Playback:
    """What a listener has left, from what was sent to it and when.

    A listener begins to play at the first piece, plays in real time, and waits whenever nothing is left.

    Args:
        rate: items per second of playing.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._dry_at: float | None = None
        self._heard = 0
        self._due = 0.0

    def due(self, start: int, at: float) -> float:
        """Return when the part that begins with item `start` is needed, in seconds of the clock of `at`.

        The listener waits for the first part already, so it is due at once: after parts whose listeners have run dry,
        and before all others. A later part is never due before an earlier one, since they must stay in order.
        """
        self._dry_at = at if self._dry_at is None else self._dry_at
        self._due = max(self._due, self._dry_at + (start - self._heard) / self._rate)
        return self._due

    def again(self) -> float:
        """Return when a part is needed that begins the stream anew, on another replica."""
        self._due = self._dry_at or 0.0
        return self._due

    def hear(self, seconds: float, items: int, at: float) -> None:
        """Note that the listener got so many more seconds at time `at`, and has `items` items in all by then."""
        self._dry_at = max(at, self._dry_at or at) + seconds
        self._heard = items
