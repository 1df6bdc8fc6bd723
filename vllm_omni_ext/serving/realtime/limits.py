"""Limits of Realtime sessions: their number, size, duration, and rate of events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the sessions of one API server; all values are upper limits.

    Attributes:
        sessions: open sessions of the API server.
        session_s: duration of a session, in seconds.
        idle_s: time without an event of the client, in seconds.
        buffer_bytes: bytes of the input audio buffer.
        sound_bytes: bytes of sound in a conversation's items.
        text_bytes: characters of text, images and arguments in a conversation's items.
        items: items of a conversation.
        events_per_s: sustained rate of the client's events, per second.
        burst_events: events that the client can send at a time, above the sustained rate.
        responses: simultaneous responses outside of the default conversation.
        unsent_bytes: bytes of events that are queued for a client that does not read.
        values: opening brackets and commas in one event.
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
    """Limits the rate of events with a leaky bucket: `burst_events` is its size, `events_per_s` its outflow.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._level = 0.0
        self._at = now

    def count(self, now: float) -> bool:
        """Count one event at `now`; return False if the event exceeds the limit."""
        self._level = max(0.0, self._level - (now - self._at) * self._limits.events_per_s) + 1
        self._at = now
        return self._level <= self._limits.burst_events
