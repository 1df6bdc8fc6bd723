"""Turns of a speaker, from the probabilities of speech in the frames of a sound. Pure: no clock, no model.

All times are in milliseconds from the beginning of a connection's input sound, so that results do not depend on the
speed at which it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

RELEASE = 0.15
"""Speech goes on while its probability is at least the threshold less this."""

LEAST_RELEASE = 0.01
LEAST_SPEECH_MS = 64.0
"""Shorter sounds, e.g. clicks, are no speech."""

PAUSE_MS = 200.0
"""Silence after which semantic detection computes whether the turn is complete."""

COMPLETE = 0.5
"""Probability from which a turn is complete."""

LONGEST_PAUSE_MS: Mapping[str, float] = {"low": 8000.0, "medium": 4000.0, "auto": 4000.0, "high": 2000.0}
"""Silence that ends an incomplete turn, by eagerness."""


@dataclass(frozen=True, kw_only=True)
class ServerVad:
    """A turn ends after `silence_duration_ms` of silence.

    Attributes:
        threshold: probability from which a frame is speech, 0 to 1.
        prefix_padding_ms: sound before the first frame with speech that belongs to the turn.
        silence_duration_ms: silence that ends a turn; it belongs to the turn.
        idle_timeout_ms: silence after the sound of an answer until `IdleTimeout`; None: never.

    Raises:
        ValueError: a value outside its range; the message starts with its name.
    """

    threshold: float = 0.5
    prefix_padding_ms: float = 300.0
    silence_duration_ms: float = 500.0
    idle_timeout_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold: must be from 0 to 1, got {self.threshold}")
        for name in ("prefix_padding_ms", "silence_duration_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must be 0 or more, got {getattr(self, name)}")
        if self.idle_timeout_ms is not None and not self.idle_timeout_ms > 0:
            raise ValueError(f"idle_timeout_ms: must be more than 0, got {self.idle_timeout_ms}")


@dataclass(frozen=True, kw_only=True)
class SemanticVad:
    """A turn ends after a short pause if it is complete, otherwise after the longest pause of its eagerness.

    Raises:
        ValueError: an unknown `eagerness`.
    """

    eagerness: str = "auto"

    threshold: ClassVar[float] = ServerVad.threshold
    prefix_padding_ms: ClassVar[float] = ServerVad.prefix_padding_ms
    idle_timeout_ms: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        if self.eagerness not in LONGEST_PAUSE_MS:
            raise ValueError(f"eagerness: must be one of {', '.join(LONGEST_PAUSE_MS)}, got {self.eagerness!r}")

    @property
    def silence_duration_ms(self) -> float:
        """Silence that ends any turn."""
        return LONGEST_PAUSE_MS[self.eagerness]


@dataclass(frozen=True)
class SpeechStarted:
    """A turn has begun; `audio_start_ms` is its first sound, with the padding before the speech."""

    audio_start_ms: float


@dataclass(frozen=True)
class SpeechStopped:
    """The turn has ended; `audio_end_ms` is the end of its sound, with the silence after the speech."""

    audio_end_ms: float


@dataclass(frozen=True)
class IdleTimeout:
    """No speech between the end of an answer's playback and the timeout."""

    audio_start_ms: float
    audio_end_ms: float


Event = SpeechStarted | SpeechStopped | IdleTimeout

Completeness = Callable[[float, float], float]
"""Probability, 0 to 1, that the sound between two times, in ms, is a complete turn. It is called by `write`."""


class TurnDetector:
    """Finds turns: frames in, events out. `SpeechStarted` and `SpeechStopped` alternate, except after `drop`.

    Args:
        settings: of the connection.
        completeness: needed for `SemanticVad`.
        begin_ms: beginning of the first frame; sound before it belongs to no turn.

    Raises:
        ValueError: `SemanticVad` without `completeness`.
    """

    def __init__(
        self, settings: ServerVad | SemanticVad, completeness: Completeness | None = None, *, begin_ms: float = 0.0
    ) -> None:
        if isinstance(settings, SemanticVad) and completeness is None:
            raise ValueError("semantic detection needs the completeness of turns")
        self._settings = settings
        self._completeness = completeness if isinstance(settings, SemanticVad) else None
        self._release = max(settings.threshold - RELEASE, min(LEAST_RELEASE, settings.threshold))
        self._now = self._free_from = begin_ms
        # `_free_from`: end of the sound that belongs to earlier turns or was dropped.
        self._candidate: float | None = None
        """Start of speech that is shorter than `LEAST_SPEECH_MS` so far."""
        self._started: float | None = None
        """Start of the turn's sound; None between turns."""
        self._silent_from: float | None = None
        """End of the turn's speech so far, while there is none."""
        self._judged = False
        """The completeness before this silence has been computed."""
        self._idle_from: float | None = None

    @property
    def speaking(self) -> bool:
        """True between `SpeechStarted` and `SpeechStopped`."""
        return self._started is not None

    @property
    def needed_from_ms(self) -> float:
        """Start of the sound that this or a later turn may contain; sound before it may be forgotten."""
        if self._started is not None:
            return self._started
        begins = self._now if self._candidate is None else self._candidate
        needed = max(self._free_from, begins - self._settings.prefix_padding_ms)
        return needed if self._idle_from is None else min(needed, max(self._free_from, self._idle_from))

    def write(self, frames: Iterable[tuple[float, float]]) -> list[Event]:
        """Add frames, each with its end in ms and its probability of speech; return the events in order.

        A frame begins at the end of the one before it.

        Raises:
            ValueError: a frame does not end after the one before it.
        """
        return [event for end, probability in frames for event in self._frame(end, probability)]

    def idle_from(self, at_ms: float | None) -> None:
        """Set the time at which all sound of the last answer has been played; None while there is an answer to play.

        `IdleTimeout` follows `idle_timeout_ms` later, once, unless speech begins before. The time may lie ahead.
        """
        self._idle_from = None if self.speaking or self._settings.idle_timeout_ms is None else at_ms

    def drop(self, before_ms: float) -> None:
        """Forget the sound before a time, because the client committed or cleared it: a turn ends without event."""
        self._free_from = max(self._free_from, before_ms)
        self._started = self._candidate = self._silent_from = None

    def _frame(self, end: float, probability: float) -> list[Event]:
        begin, self._now = self._now, end
        if not end > begin:
            raise ValueError(f"a frame ends at {end} ms, the one before it at {begin} ms")
        if end <= self._free_from:
            return []
        begin = max(begin, self._free_from)
        speech = probability >= self._settings.threshold
        released = probability < self._release
        if self._started is not None:
            return self._in_turn(begin, end, speech, released)
        return self._between_turns(begin, end, speech, released)

    def _between_turns(self, begin: float, end: float, speech: bool, released: bool) -> list[Event]:
        if self._candidate is None and speech:
            self._candidate = begin
        if self._candidate is None or released:
            self._candidate = None
            return self._idle(begin, end)
        if end - self._candidate < LEAST_SPEECH_MS:
            return []
        self._started = max(self._free_from, self._candidate - self._settings.prefix_padding_ms)
        self._candidate = self._silent_from = self._idle_from = None
        return [SpeechStarted(self._started)]

    def _idle(self, begin: float, end: float) -> list[Event]:
        """Return the timeout if it is due in a frame without speech."""
        if self._idle_from is None or self._settings.idle_timeout_ms is None:
            return []
        due = self._idle_from + self._settings.idle_timeout_ms
        if end < due:
            return []
        start = max(self._free_from, self._idle_from)
        self._free_from = max(due, begin)
        self._idle_from = None
        return [IdleTimeout(start, self._free_from)]

    def _in_turn(self, begin: float, end: float, speech: bool, released: bool) -> list[Event]:
        if speech:
            self._silent_from = None
            return []
        if self._silent_from is None:
            if not released:
                return []
            self._silent_from, self._judged = begin, False
        silence = self._silence(self._silent_from, end)
        if end - self._silent_from < silence:
            return []
        self._free_from = self._silent_from + silence
        self._started = self._silent_from = None
        return [SpeechStopped(self._free_from)]

    def _silence(self, since: float, end: float) -> float:
        """Return the silence that ends the turn."""
        longest = self._settings.silence_duration_ms
        if self._completeness is None or self._judged or end - since < PAUSE_MS:
            return longest
        assert self._started is not None
        self._judged = True
        return PAUSE_MS if self._completeness(self._started, since + PAUSE_MS) >= COMPLETE else longest
