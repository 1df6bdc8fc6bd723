"""Limits of Realtime sessions: their number, size, duration, and rate of events."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_ext.config import schema

_DEFAULT = schema.Limits()
BURST_S = 10
"""Seconds of the sustained rate that a client may use at once: the burst has `BURST_S` * `events_per_s` events."""


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
        parts: content parts of a conversation's items.
        events_per_s: sustained rate of the client's events, per second.
        burst_events: events that the client can send at a time, above the sustained rate.
        responses: simultaneous responses outside of the default conversation.
        unsent_bytes: bytes of events that are queued for a client that does not read.
        values: opening brackets and commas in one event.
    """

    sessions: int = _DEFAULT.realtime_sessions
    session_s: float = _DEFAULT.realtime_length_s
    idle_s: float = _DEFAULT.realtime_idle_s
    buffer_bytes: int = _DEFAULT.realtime_buffer_mib << 20
    sound_bytes: int = _DEFAULT.realtime_sound_mib << 20
    text_bytes: int = 16 << 20
    items: int = 2000
    parts: int = 4000
    events_per_s: float = _DEFAULT.realtime_events
    burst_events: int = BURST_S * _DEFAULT.realtime_events
    responses: int = 4
    unsent_bytes: int = 16 << 20
    values: int = 200_000

    @classmethod
    def of(cls, configured: schema.Limits) -> Limits:
        """Return the limits of a configuration."""
        return cls(
            sessions=configured.realtime_sessions,
            session_s=configured.realtime_length_s,
            idle_s=configured.realtime_idle_s,
            buffer_bytes=configured.realtime_buffer_mib << 20,
            sound_bytes=configured.realtime_sound_mib << 20,
            events_per_s=configured.realtime_events,
            burst_events=BURST_S * configured.realtime_events,
        )


BYTES_AN_EVENT, VALUES_AN_EVENT = 64 << 10, 1000
"""Characters, and values (see `values`), for which an event counts as one more event; each takes about 1 ms."""


def weight(text: str) -> float:
    """Return the number of events as which one event counts for `Rate`.

    It is 1, plus 1 for every `BYTES_AN_EVENT` characters, plus 1 for every `VALUES_AN_EVENT` values.

    Args:
        text: JSON text of the event.
    """
    return 1 + len(text) / BYTES_AN_EVENT + values(text) / VALUES_AN_EVENT


def values(text: str) -> int:
    """Return the number of opening brackets and commas in the JSON text of an event, an estimate of its JSON values."""
    return text.count(",") + text.count("[") + text.count("{")


class Rate:
    """Limits the rate of events with a leaky bucket: `burst_events` is its size, `events_per_s` its outflow.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._level = 0.0
        self._at = now

    def count(self, now: float, weight: float = 1.0) -> bool:
        """Count one event at `now`, as `weight` events; return False if the event exceeds the limit."""
        self._level = max(0.0, self._level - (now - self._at) * self._limits.events_per_s) + weight
        self._at = now
        return self._level <= self._limits.burst_events
