"""Models of a listener that plays sound while it arrives: when its buffer is empty, and its pauses. Pure: no clock."""

from __future__ import annotations


class Playback:
    """Computes when the parts of a stream (`plugins.flow.Submit`) are due, so that a listener's playback has no pause.

    The listener begins to play at the first piece of sound, plays in real time, and waits when its buffer is empty.

    Args:
        rate: items that are played per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._dry_at: float | None = None
        self._delivered = 0
        self._due = 0.0

    def due(self, start: int, at: float) -> float:
        """Return the due time of the part that begins with item `start`, in seconds of the clock of `at` (now).

        The first part is due at once (`at`), because the listener already waits for it. A later part is due when the
        listener's buffer will be empty, and never before an earlier part, since parts must stay in order.
        """
        self._dry_at = at if self._dry_at is None else self._dry_at
        self._due = max(self._due, self._dry_at + (start - self._delivered) / self._rate)
        return self._due

    def again(self) -> float:
        """Return the due time of the part with which another replica restarts the stream.

        That is the time at which the listener's buffer will be empty; 0.0 if `due` was never called.
        """
        self._due = self._dry_at or 0.0
        return self._due

    def delivered(self, seconds: float, items: int, at: float) -> None:
        """Record that the listener received `seconds` of sound at time `at`.

        Args:
            items: number of items that the listener has received in all.
        """
        self._dry_at = max(at, self._dry_at or at) + seconds
        self._delivered = items


class Player:
    """Simulates a listener that begins to play at the first piece, plays in real time, and waits for missing sound.

    Times are in seconds of one clock that does not go back.

    Attributes:
        first_at: time of the first piece; None before the first piece.
        sound: seconds of sound received.
        silences: duration in seconds of each pause between pieces, in which no received sound was left to play.
    """

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.sound = 0.0
        self.silences: list[float] = []
        self._ends_at = 0.0

    def receive(self, seconds: float, at: float) -> None:
        """Receive the next piece, `seconds` long, at time `at`; a piece of 0 seconds is ignored."""
        if not seconds:
            return
        if self.first_at is None:
            self.first_at = self._ends_at = at
        if at > self._ends_at:
            self.silences.append(at - self._ends_at)
        self._ends_at = max(at, self._ends_at) + seconds
        self.sound += seconds

    def unplayed(self, at: float) -> float:
        """Return the seconds of received sound that are not played yet at time `at`."""
        return max(0.0, self._ends_at - at) if self.first_at is not None else 0.0
