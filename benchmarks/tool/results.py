"""The results of a run of the benchmarks: raw samples, from which all figures and pages are made."""

from __future__ import annotations

import re
import statistics
from typing import Any

import msgspec

SCHEMA = 1
DIGITS = 6
"""Stored digits of a number."""
NUMBERS = re.compile(rb"\[\s*(-?[\d.e+-]+(?:,\s*-?[\d.e+-]+)*)\s*\]")
"""Matches a list of numbers in JSON; `encode` writes such a list in one line."""


class BadReport(ValueError):
    """A file is not the report of a run."""


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One figure and its baseline, both from the same run.

    Args:
        what: name of the figure, without its unit.
        subject, baseline: names of the measured side and of the side with which it is compared.
        samples, baseline_samples: every measured value.
        more_is_better: True for rates, False for times and sizes.
        paired: sample i and baseline sample i were taken one after the other.
    """

    what: str
    unit: str
    subject: str
    baseline: str
    samples: list[float]
    baseline_samples: list[float]
    more_is_better: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        if not self.samples or not self.baseline_samples:
            raise ValueError(f"{self.what}: no samples of {self.baseline if self.samples else self.subject}")
        if self.paired and len(self.samples) != len(self.baseline_samples):
            raise ValueError(f"{self.what}: {len(self.samples)} samples cannot pair with {len(self.baseline_samples)}")

    @property
    def ratio(self) -> float | None:
        """The median of the subject divided by that of the baseline; None if the baseline is zero."""
        below = statistics.median(self.baseline_samples)
        return statistics.median(self.samples) / below if below else None

    @property
    def ratios(self) -> list[float]:
        """The ratio of every pair whose baseline is not zero; empty without pairs."""
        pairs = zip(self.samples, self.baseline_samples, strict=True) if self.paired else ()
        return [one / other for one, other in pairs if other]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a stage for a request; seconds since the request began."""

    stage: str
    start: float
    end: float


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one request."""

    title: str
    spans: list[Span]


class Result(msgspec.Struct, forbid_unknown_fields=True):
    """The result of one benchmark; `failed` is the reason why there are no figures."""

    name: str
    seconds: float = 0.0
    comparisons: list[Comparison] = []
    timelines: list[Timeline] = []
    failed: str | None = None


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time, versions and machine of a run.

    Args:
        load: the load average over one minute, before and after.
        busy: the share of all cores in use before each benchmark began; empty in older reports.
    """

    time: str
    package: str
    commit: str
    vllm: str
    torch: str
    python: str
    cpu: str
    cores: int
    memory_gib: float
    accelerator: str
    load: list[float]
    busy: list[float] = []


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """A whole run. `left_out` has benchmarks that do not fit the machine, with the reasons."""

    environment: Environment | None = None
    model: str | None = None
    quick: bool = False
    results: list[Result] = []
    left_out: dict[str, str] = {}
    schema: int = SCHEMA


def encode(report: Report) -> bytes:
    """Return JSON in a readable format: a list of numbers is one line."""
    data = msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(report))), indent=1)
    return NUMBERS.sub(lambda found: b"[" + b", ".join(re.split(rb",\s*", found[1])) + b"]", data) + b"\n"


def rounded(value: Any) -> Any:
    """Return JSON data with each float rounded to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {name: rounded(each) for name, each in value.items()} if isinstance(value, dict) else value


def decode(data: bytes) -> Report:
    """Return the report in the JSON of `encode`.

    Raises:
        BadReport: the data is not a report of this schema.
    """
    try:
        report = msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise BadReport(str(error)) from error
    if report.schema != SCHEMA:
        raise BadReport(f"schema {report.schema}; this version reads schema {SCHEMA}")
    return report
