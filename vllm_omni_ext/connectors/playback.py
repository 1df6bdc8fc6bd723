"""Sound that is played while it arrives: times at which nothing is left, and silence. Pure: no clock."""

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


class Player:
    """A listener that begins to play at the first piece, plays in real time, and waits whenever nothing is left.

    Times are in seconds of one clock that does not go back.

    Attributes:
        first_at: time of the first piece; None before it.
        sound: seconds received.
        silences: seconds of each pause between pieces, in which nothing was left to play.
    """

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.sound = 0.0
        self.silences: list[float] = []
        self._ends_at = 0.0

    def receive(self, seconds: float, at: float) -> None:
        """Receive the next piece at time `at`; one of 0 seconds changes nothing."""
        if not seconds:
            return
        if self.first_at is None:
            self.first_at = self._ends_at = at
        if at > self._ends_at:
            self.silences.append(at - self._ends_at)
        self._ends_at = max(at, self._ends_at) + seconds
        self.sound += seconds

    def unplayed(self, at: float) -> float:
        """Return the seconds that are left to play at time `at`."""
        return max(0.0, self._ends_at - at) if self.first_at is not None else 0.0
