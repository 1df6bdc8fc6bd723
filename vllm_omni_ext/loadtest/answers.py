"""Records the times at which the load client receives the parts of one answer. The caller supplies the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni_ext.connectors.playback import Player

Clock = Callable[[], float]
"""Returns the time of a monotonic clock in seconds."""

CONNECT, TIMEOUT, BROKEN, ERROR, MALFORMED, SOUNDLESS = (
    "no connection",
    "timeout",
    "broken connection",
    "error in the stream",
    "malformed answer",
    "no sound",
)
"""Kinds of failure. A failure with an HTTP status has the kind `status N`."""


class Failure(Exception):
    """A request has failed: its answer is missing, incomplete or malformed.

    Args:
        kind: kind of failure, by which failures are counted.
        detail: message of the server or the library.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Times of one answer, in seconds.

    Attributes:
        due_at, began_at, ended_at: scheduled start, real start and end, as times of the clock of `Timeline`.
        ready_s: from `due_at` until the session was configured; None: the API has no sessions.
        first_text_s, first_sound_s, whole_s: time to the first text, the first sound and the end, from `due_at`, or
            from the end of the input sound if there is one. None: the answer has no text or no sound.
        sound_s: duration of the sound.
        silences: durations of the pauses in which a real-time player has no sound to play.
        failure: kind of failure; None: the answer is complete.
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
        """`whole_s` divided by the duration of the sound; below 1, the sound arrives faster than it is played."""
        return self.whole_s / self.sound_s


class Timeline:
    """Records the times of one answer. The constructor records the start of the request.

    Args:
        clock: returns the time of a monotonic clock in seconds.
        due_at: scheduled start; None: now.
    """

    def __init__(self, clock: Clock, due_at: float | None = None) -> None:
        self._clock = clock
        self._began_at = clock()
        self._due_at = self._origin = self._began_at if due_at is None else due_at
        self._ready_s: float | None = None
        self._first_text_at: float | None = None
        self._done_at: float | None = None
        self._player = Player()

    def ready(self) -> None:
        """Record that the session is configured."""
        self._ready_s = self._clock() - self._due_at

    def spoken(self, at: float | None = None) -> None:
        """Set the origin of the other times to the end of the spoken input: `at`, or now if it is None."""
        self._origin = self._clock() if at is None else at

    def text(self) -> None:
        """Record the arrival of a piece of text."""
        if self._first_text_at is None:
            self._first_text_at = self._clock()

    def sound(self, seconds: float) -> None:
        """Record the arrival of a piece of sound with a duration of `seconds`."""
        self._player.receive(seconds, self._clock())

    def done(self) -> None:
        """Record that the answer is complete. What follows, as the end of the connection, does not count."""
        self._done_at = self._clock()

    def end(self, failure: Failure | None = None) -> Answer:
        """Return the times of the answer, which ends now, or has ended with `done`; then `failure` is not used.

        An answer without sound has the failure SOUNDLESS.
        """
        now = self._clock()
        if self._done_at is not None:
            now, failure = self._done_at, None
        if failure is None and self._player.first_at is None:
            failure = Failure(SOUNDLESS, "the answer ended without sound")
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
