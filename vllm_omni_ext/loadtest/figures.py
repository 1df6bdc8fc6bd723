"""Computes the statistics (figures) of a load test from the times of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_omni_ext.loadtest.answers import Answer

NOTICED_S = 0.02
"""Seconds above which a silence is counted as a gap."""

LATE_CLIENT_S = 0.1
"""Limit, in seconds, of the 99th percentile of the delay between the scheduled and the real start of requests.

Above it, the client itself was overloaded, and its figures are not reliable."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Mean, minimum, maximum and percentiles of values, with linear interpolation between the two nearest values."""

    count: int
    mean: float
    least: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of values; None if `values` is empty."""
    array = np.asarray(list(values), np.float64)
    if not len(array):
        return None
    least, p50, p90, p95, p99, most = np.percentile(array, (0, 50, 90, 95, 99, 100)).tolist()
    mean = float(array.mean())
    return Distribution(count=len(array), mean=mean, least=least, p50=p50, p90=p90, p95=p95, p99=p99, most=most)


MEASURES: Mapping[str, Callable[[Answer], float | None]] = {
    "first_text_s": lambda answer: answer.first_text_s,
    "first_sound_s": lambda answer: answer.first_sound_s,
    "whole_s": lambda answer: answer.whole_s,
    "real_time_factor": lambda answer: answer.real_time_factor,
    "sound_s": lambda answer: answer.sound_s,
    "silence_s": lambda answer: sum(answer.silences),
    "longest_gap_s": lambda answer: max(answer.silences, default=0.0),
    "session_ready_s": lambda answer: answer.ready_s,
    "client_lag_s": lambda answer: answer.began_at - answer.due_at,
}
"""Functions that return a measure of a complete answer, by the measure's name in the JSON file.

They return None if the answer does not have the measure."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Statistics of a load test.

    Attributes:
        requests, answered: number of all requests, and of requests with a complete answer.
        failures: number of failures by kind.
        duration_s: seconds from the scheduled start of the first request to the end of the last answer.
        answers_per_s, sound_s_per_s: complete answers, and seconds of their sound, divided by `duration_s`.
        most_at_once: largest number of simultaneous requests.
        answers_with_gaps: number of answers with a silence longer than `NOTICED_S`.
        gaps: number of silences longer than `NOTICED_S`.
        measures: distributions over complete answers, by the names of `MEASURES`; measures without values are omitted.
    """

    requests: int
    answered: int
    failures: Mapping[str, int]
    duration_s: float
    answers_per_s: float
    sound_s_per_s: float
    most_at_once: int
    answers_with_gaps: int
    gaps: int
    measures: Mapping[str, Distribution]

    @property
    def client_was_late(self) -> bool:
        """Whether the client started its requests later than `LATE_CLIENT_S`, so that the figures are not reliable."""
        lag = self.measures.get("client_lag_s")
        return lag is not None and lag.p99 > LATE_CLIENT_S


def figures(answers: Sequence[Answer]) -> Figures:
    """Return the statistics of a load test. Raises ValueError: `answers` is empty."""
    if not answers:
        raise ValueError("a run without requests has no figures")
    whole = [answer for answer in answers if answer.failure is None]
    duration = max(answer.ended_at for answer in answers) - min(answer.due_at for answer in answers)
    gaps = [sum(silence > NOTICED_S for silence in answer.silences) for answer in whole]
    found = {
        name: distribution(value for answer in whole if (value := measure(answer)) is not None)
        for name, measure in MEASURES.items()
    }
    return Figures(
        requests=len(answers),
        answered=len(whole),
        failures=dict(Counter(answer.failure for answer in answers if answer.failure is not None).most_common()),
        duration_s=duration,
        answers_per_s=len(whole) / duration if duration else 0.0,
        sound_s_per_s=sum(answer.sound_s for answer in whole) / duration if duration else 0.0,
        most_at_once=most_at_once(answers),
        answers_with_gaps=sum(map(bool, gaps)),
        gaps=sum(gaps),
        measures={name: each for name, each in found.items() if each is not None},
    )


def most_at_once(answers: Iterable[Answer]) -> int:
    """Return the largest number of simultaneous requests. A request counts from its scheduled start to its end."""
    changes = sorted((at, step) for answer in answers for at, step in ((answer.due_at, 1), (answer.ended_at, -1)))
    return int(max(np.cumsum([step for _, step in changes]), default=0))
