"""Times at which sound is sent to a listener that plays it in real time. Pure: no clock."""

from __future__ import annotations

from vllm_omni_ext.connectors.playback import Player

AHEAD_MS = 300.0
MS = 1000.0


class Pacer:
    """Keeps the sound of one answer at most `ahead_ms` and one piece ahead of its listener.

    The listener begins to play at the first piece; a piece that arrives when nothing is left begins to play at once.
    `now` is in seconds of a clock that does not go back.

    Args:
        ahead_ms: sound that the listener has to play when the next piece may be sent.

    Raises:
        ValueError: `ahead_ms` is negative.
    """

    def __init__(self, ahead_ms: float = AHEAD_MS) -> None:
        if ahead_ms < 0:
            raise ValueError(f"ahead_ms must not be negative, got {ahead_ms}")
        self._ahead_s = ahead_ms / MS
        self._player = Player()
        self._cancelled_ms: float | None = None

    def due(self, now: float) -> float:
        """Return the seconds until the next piece may be sent; ValueError after `cancel`."""
        self._refuse_cancelled()
        return max(0.0, self._player.unplayed(now) - self._ahead_s)

    def sent(self, ms: float, now: float) -> None:
        """Record that a piece of `ms` was sent; ValueError if `ms` is negative, or after `cancel`."""
        self._refuse_cancelled()
        if ms < 0:
            raise ValueError(f"ms must not be negative, got {ms}")
        self._player.receive(ms / MS, now)

    def played_ms(self, now: float) -> float:
        """Return the played part of the sent sound; after `cancel` the part that had been played then."""
        if self._cancelled_ms is not None:
            return self._cancelled_ms
        return max(0.0, self._player.sound - self._player.unplayed(now)) * MS

    def remaining_ms(self, now: float) -> float:
        """Return the milliseconds of sent sound that are not played yet; 0 after `cancel`."""
        return 0.0 if self._cancelled_ms is not None else self._player.unplayed(now) * MS

    def cancel(self, now: float) -> float:
        """Stop the playing; return `played_ms`. A second call changes nothing."""
        self._cancelled_ms = self.played_ms(now)
        return self._cancelled_ms

    def _refuse_cancelled(self) -> None:
        if self._cancelled_ms is not None:
            raise ValueError("the answer has been cancelled")
