"""Times of one answer at its client. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni_ext.connectors.playback import Player

Clock = Callable[[], float]
"""Returns seconds, and does not go back."""

CONNECT, TIMEOUT, BROKEN, ERROR, MALFORMED, SOUNDLESS = (
    "no connection",
    "timeout",
    "broken connection",
    "error in the stream",
    "malformed answer",
    "no sound",
)
"""Kinds of failure; those with an HTTP status are called `status N`."""


class Failure(Exception):
    """A request without a whole answer.

    Args:
        kind: counted by this name.
        detail: message of the server or the library.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Times of one answer, in seconds.

    Attributes:
        due_at, began_at, ended_at: times on the run's clock: scheduled and real beginning, end of the answer.
        ready_s: from `due_at` to a configured session; None without a session.
        first_text_s, first_sound_s, whole_s: from the origin to the first text, the first sound and the end; None:
            there was none. The origin is `due_at`, or the end of the spoken input.
        sound_s: seconds of sound.
        silences: pauses of a listener that plays the sound in real time while it arrives.
        failure: kind of failure; None for a whole answer.
        detail: message of the failure.
    """

    due_at: float
    began_at: float
    ended_at: float
    ready_s: float | None = None
    first_text_s: float | None = None
    first_sound_s: float | None = None
    whole_s: float
    sound_s: float = 0.0
    silences: tuple[float, ...] = ()
    failure: str | None = None
    detail: str = ""

    @property
    def real_time_factor(self) -> float:
        """Seconds of the answer for each second of sound."""
        return self.whole_s / self.sound_s


class Timeline:
    """Records the times of one answer. It begins when it is constructed.

    Args:
        clock: of the run.
        due_at: scheduled beginning; None: now.
    """

    def __init__(self, clock: Clock, due_at: float | None = None) -> None:
        self._clock = clock
        self._began_at = clock()
        self._due_at = self._origin = self._began_at if due_at is None else due_at
        self._ready_s: float | None = None
        self._first_text_at: float | None = None
        self._player = Player()

    def ready(self) -> None:
        """Record that the session is configured."""
        self._ready_s = self._clock() - self._due_at

    def spoken(self, at: float | None = None) -> None:
        """Record the end of the input, at a time of the clock or now: the other times count from here."""
        self._origin = self._clock() if at is None else at

    def text(self) -> None:
        """Record a piece of text."""
        if self._first_text_at is None:
            self._first_text_at = self._clock()

    def sound(self, seconds: float) -> None:
        """Record a piece of sound."""
        self._player.receive(seconds, self._clock())

    def end(self, failure: Failure | None = None) -> Answer:
        """Return the answer; without sound it is a failure."""
        if failure is None and self._player.first_at is None:
            failure = Failure(SOUNDLESS, "the answer ended without sound")
        now = self._clock()
        return Answer(
            due_at=self._due_at,
            began_at=self._began_at,
            ended_at=now,
            ready_s=self._ready_s,
            first_text_s=self._since(self._first_text_at),
            first_sound_s=self._since(self._player.first_at),
            whole_s=now - self._origin,
            sound_s=self._player.sound,
            silences=tuple(self._player.silences),
            failure=failure.kind if failure else None,
            detail=failure.detail if failure else "",
        )

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self._origin
