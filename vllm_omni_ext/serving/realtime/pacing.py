"""Computes the times at which sound is sent to a client that plays it in real time. The caller supplies the clock."""

from __future__ import annotations

from vllm_omni_ext.connectors.playback import Player

AHEAD_MS = 300.0
MS = 1000.0


class Pacer:
    """Computes when the pieces of one answer's sound are sent: at most `ahead_ms` of it is unplayed.

    The client starts to play when the first piece arrives. If it has played all sound, it resumes when the next piece
    arrives. `now` is the time of a monotonic clock in seconds.

    Args:
        ahead_ms: most unplayed sound of the client, with the piece that is sent, in ms; a longer piece is sent when the
            client has played all sound.

    Raises:
        ValueError: `ahead_ms` is negative.
    """

    def __init__(self, ahead_ms: float = AHEAD_MS) -> None:
        if ahead_ms < 0:
            raise ValueError(f"ahead_ms must not be negative, got {ahead_ms}")
        self._ahead_s = ahead_ms / MS
        self._player = Player()
        self._sent_ms = 0.0
        self._cancelled_ms: float | None = None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled_ms is not None

    def due(self, ms: float, now: float) -> float:
        """Return the seconds until a piece of `ms` milliseconds can be sent. Raises ValueError: `cancel` was called."""
        self._refuse_cancelled()
        return max(0.0, self._player.unplayed(now) - max(0.0, self._ahead_s - ms / MS))

    def sent(self, ms: float, now: float) -> None:
        """Record that a piece of `ms` milliseconds was sent. Raises ValueError: `ms` < 0, or `cancel` was called."""
        self._refuse_cancelled()
        if ms < 0:
            raise ValueError(f"ms must not be negative, got {ms}")
        self._player.receive(ms / MS, now)
        self._sent_ms += ms

    def played_ms(self, now: float) -> float:
        """Return the milliseconds of sound that the client has played; after `cancel`, those played until `cancel`.

        After all sound was played, it is exactly the sum of the pieces.
        """
        if self._cancelled_ms is not None:
            return self._cancelled_ms
        return max(0.0, self._sent_ms - self._player.unplayed(now) * MS)

    def remaining_ms(self, now: float) -> float:
        """Return the milliseconds of sent sound that the client has not played yet; 0 after `cancel`."""
        return 0.0 if self._cancelled_ms is not None else self._player.unplayed(now) * MS

    def cancel(self, now: float) -> float:
        """Record that the client stops to play at `now`, and return `played_ms`. A second call changes nothing."""
        self._cancelled_ms = self.played_ms(now)
        return self._cancelled_ms

    def _refuse_cancelled(self) -> None:
        if self._cancelled_ms is not None:
            raise ValueError("the answer has been cancelled")
