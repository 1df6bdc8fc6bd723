"""Limits of realtime sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one API server's sessions.

    Attributes:
        sessions: open sessions of this API server.
        session_s: seconds that a session may last.
        idle_s: seconds without an event of the client.
        buffer_bytes: bytes of the input audio buffer.
        sound_bytes: bytes of sound in a conversation's items.
        text_bytes: characters of text, images and arguments in a conversation's items.
        items: items of a conversation.
        events_per_s: events of the client a second, averaged over `burst_events`.
        burst_events: events that may come at once.
        responses: responses outside of the default conversation that run at once.
        unsent_bytes: bytes of events that wait for a client that does not read.
        values: opening brackets and commas of one event.
    """

    sessions: int = 100
    session_s: float = 3600
    idle_s: float = 900
    buffer_bytes: int = 16 << 20
    sound_bytes: int = 64 << 20
    text_bytes: int = 16 << 20
    items: int = 2000
    events_per_s: float = 200
    burst_events: int = 2000
    responses: int = 4
    unsent_bytes: int = 16 << 20
    values: int = 200_000


LIMITS = Limits()


class Rate:
    """Counts events: a bucket of `Limits.burst_events` that `Limits.events_per_s` a second leave.

    Args:
        now: monotonic time, seconds.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._level = 0.0
        self._at = now

    def count(self, now: float) -> bool:
        """Count one event at `now`; return whether the limit is kept."""
        self._level = max(0.0, self._level - (now - self._at) * self._limits.events_per_s) + 1
        self._at = now
        return self._level <= self._limits.burst_events
