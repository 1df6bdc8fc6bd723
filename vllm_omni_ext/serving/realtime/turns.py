"""Detects the turns of a speaker from the probabilities of speech in frames of sound. Uses no clock and no model.

All times are positions in the input sound of a connection, in milliseconds. Thus results do not depend on the speed at
which the sound arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

RELEASE = 0.15
"""Difference between the threshold at which speech begins and the lower threshold under which speech ends."""

LEAST_RELEASE = 0.01
LEAST_SPEECH_MS = 64.0
"""Least duration of speech that begins a turn; shorter sounds are e.g. clicks."""

ROUNDING_MS = 1e-3
"""Upper limit of the rounding error in a difference of two positions, which need not be whole numbers."""

PAUSE_MS = 200.0
"""Milliseconds of silence after which semantic detection computes whether the turn is complete."""

COMPLETE = 0.5
"""Least probability at which a turn is regarded as complete."""

LONGEST_PAUSE_MS: Mapping[str, float] = {"low": 8000.0, "medium": 4000.0, "auto": 4000.0, "high": 2000.0}
"""Milliseconds of silence that end an incomplete turn, by eagerness."""


@dataclass(frozen=True, kw_only=True)
class ServerVad:
    """Settings of turn detection that ends a turn after a fixed duration of silence.

    Attributes:
        threshold: least probability, 0 to 1, at which a frame is speech.
        prefix_padding_ms: duration of the sound before the first speech that is included in the turn.
        silence_duration_ms: silence that ends a turn; it is included in the turn.
        idle_timeout_ms: silence after the sound of an answer until `IdleTimeout`; None: no `IdleTimeout`.

    Raises:
        ValueError: a value is outside its range; the message starts with its name.
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
    """Settings of turn detection that ends a complete turn after `PAUSE_MS`, and others after `LONGEST_PAUSE_MS`.

    Raises:
        ValueError: `eagerness` is not a key of `LONGEST_PAUSE_MS`.
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
        """Silence that ends an incomplete turn."""
        return LONGEST_PAUSE_MS[self.eagerness]


@dataclass(frozen=True)
class SpeechStarted:
    """A turn has started. `audio_start_ms` is the start of its sound, including the padding before the speech."""

    audio_start_ms: float


@dataclass(frozen=True)
class SpeechStopped:
    """The turn has ended. `audio_end_ms` is the end of its sound, including the silence after the speech."""

    audio_end_ms: float


@dataclass(frozen=True)
class IdleTimeout:
    """There was no speech for `idle_timeout_ms` after an answer was played; the two times are those of this silence."""

    audio_start_ms: float
    audio_end_ms: float


Event = SpeechStarted | SpeechStopped | IdleTimeout

Completeness = Callable[[float, float], float]
"""Returns the probability, 0 to 1, that the sound between two times in ms is a complete turn; for `TurnDetector`."""


class TurnDetector:
    """Converts frames of sound to events. `SpeechStarted` and `SpeechStopped` alternate, except after `drop`.

    Args:
        completeness: required for `SemanticVad`, unused for `ServerVad`.
        begin_ms: start of the first frame; no turn includes sound before it.

    Raises:
        ValueError: `SemanticVad` without `completeness`.
    """

    def __init__(
        self, settings: ServerVad | SemanticVad, completeness: Completeness | None = None, *, begin_ms: float = 0.0
    ) -> None:
        self._set(settings, completeness)
        self._now = self._free_from = begin_ms
        # `_free_from`: end of the sound that is included in earlier turns, or was dropped.
        self._candidate: float | None = None
        """Start of speech that has not lasted `LEAST_SPEECH_MS` yet."""
        self._started: float | None = None
        """Start of the turn's sound; None between turns."""
        self._silent_from: float | None = None
        """Start of the current silence within a turn; None during speech and between turns."""
        self._judged = False
        """Whether the completeness of the turn has been computed for the current silence."""
        self._idle_from: float | None = None

    def _set(self, settings: ServerVad | SemanticVad, completeness: Completeness | None) -> None:
        if isinstance(settings, SemanticVad) and completeness is None:
            raise ValueError("semantic detection needs the completeness of turns")
        self._settings = settings
        self._completeness = completeness if isinstance(settings, SemanticVad) else None
        self._release = max(settings.threshold - RELEASE, min(LEAST_RELEASE, settings.threshold))

    def use(
        self, settings: ServerVad | SemanticVad, completeness: Completeness | None = None, *, from_ms: float
    ) -> None:
        """Apply other settings to the frames that follow. A turn that has started goes on, and `idle_from` applies.

        Args:
            completeness: as for a new detector.
            from_ms: start of the sound that the caller still has; no later turn includes sound before it.

        Raises:
            ValueError: `SemanticVad` without `completeness`.
        """
        self._set(settings, completeness)
        self._free_from = max(self._free_from, from_ms)
        if settings.idle_timeout_ms is None:
            self._idle_from = None

    @property
    def speaking(self) -> bool:
        """Whether a turn has started and not ended."""
        return self._started is not None

    @property
    def needed_from_ms(self) -> float:
        """Start of the sound that this turn or a later turn can include; the caller can remove the sound before it."""
        if self._started is not None:
            return self._started
        begins = self._now if self._candidate is None else self._candidate
        needed = max(self._free_from, begins - self._settings.prefix_padding_ms)
        return needed if self._idle_from is None else min(needed, max(self._free_from, self._idle_from))

    def write(self, frames: Iterable[tuple[float, float]]) -> list[Event]:
        """Add frames, and return their events in order.

        Args:
            frames: (end in ms, probability of speech); a frame starts at the end of the preceding frame.

        Raises:
            ValueError: a frame does not end after the preceding frame.
        """
        return [event for end, probability in frames for event in self._frame(end, probability)]

    def idle_from(self, at_ms: float | None) -> None:
        """Set the time, possibly in the future, at which the client has played the last answer; None: it still plays.

        A single `IdleTimeout` follows `idle_timeout_ms` after this time, unless speech begins before.
        """
        self._idle_from = None if self.speaking or self._settings.idle_timeout_ms is None else at_ms

    def drop(self, before_ms: float) -> None:
        """Exclude the sound before `before_ms`, which the client committed or cleared; end a turn without an event."""
        self._free_from = max(self._free_from, before_ms)
        self._started = self._candidate = self._silent_from = None

    def go_on(self, from_ms: float) -> None:
        """Continue a turn that an earlier detector has found, whose sound starts at `from_ms`."""
        self._started = from_ms

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
        if end - self._candidate < LEAST_SPEECH_MS - ROUNDING_MS:
            return []
        self._started = max(self._free_from, self._candidate - self._settings.prefix_padding_ms)
        self._candidate = self._silent_from = self._idle_from = None
        return [SpeechStarted(self._started)]

    def _idle(self, begin: float, end: float) -> list[Event]:
        """Return `IdleTimeout` if its time is reached in this frame, which has no speech."""
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
        if end - self._silent_from < silence - ROUNDING_MS:
            return []
        self._free_from = self._silent_from + silence
        self._started = self._silent_from = None
        return [SpeechStopped(self._free_from)]

    def _silence(self, since: float, end: float) -> float:
        """Return the duration of silence, in ms, that ends the turn; computes the completeness if it is needed."""
        longest = self._settings.silence_duration_ms
        if self._completeness is None or self._judged or end - since < PAUSE_MS:
            return longest
        assert self._started is not None
        self._judged = True
        return PAUSE_MS if self._completeness(self._started, since + PAUSE_MS) >= COMPLETE else longest
