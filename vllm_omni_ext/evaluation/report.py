"""Results of a suite: statistics, the decision whether a server passes, and output as table, JSON and JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
from scipy import stats

from vllm_omni_ext.evaluation.suite import Suite

RESAMPLES = 10_000
DRAWN_AT_ONCE = 1_000_000
"""Number of values per batch of a bootstrap. It limits the memory, and does not change the result."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % confidence interval (`low` to `high`), from a bootstrap over items."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of a run with an earlier run of the same items.

    Attributes:
        items: number of items.
        difference: mean over items of (score in this run - score in the earlier run).
        better, worse: numbers of items with a higher, and a lower, score than in the earlier run.
        p: p-value of the exact sign test (for scores of 0 and 1: McNemar's test).
    """

    items: int
    difference: Estimate
    better: int
    worse: int
    p: float

    @property
    def is_worse(self) -> bool:
        """Whether the 95 % interval of the difference is entirely below 0."""
        return self.difference.high < 0


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores and its 95 % interval. The bootstrap has a fixed seed."""
    mean, count = float(np.mean(scores)), len(scores)
    if count == 1:
        return Estimate(mean, mean, mean)
    batch, rng = max(1, DRAWN_AT_ONCE // count), np.random.default_rng(0)
    drawn = stats.bootstrap((scores,), np.mean, n_resamples=RESAMPLES, batch=batch, method="percentile", rng=rng)
    return Estimate(mean, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high))


def compare(scores: Mapping[str, float], earlier: Mapping[str, float]) -> Comparison:
    """Compare the scores of two runs, each by item. Raises KeyError: an item is missing in the earlier run."""
    differences = [scores[name] - earlier[name] for name in scores]
    better, worse = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    return Comparison(len(differences), estimate(differences), better, worse, float(p))


class Scored(msgspec.Struct, frozen=True):
    """Score of one item.

    Attributes:
        text: text of the answer.
        heard: the recogniser's text of the answer's sound; None: it was not recognised.
        sound: SHA-256 of the answer's sound; None: the answer has no sound.
        error: the reason if there is no answer.
    """

    id: str
    score: float
    text: str = ""
    heard: str | None = None
    sound: str | None = None
    error: str | None = None


class Run(msgspec.Struct, frozen=True):
    """The scores of one server's answers to a suite; the JSON file of an evaluation has a run for each server.

    Attributes:
        suite: name of the suite.
        digest: hash of the suite (`Suite.digest`).
    """

    suite: str
    digest: str
    server: str
    model: str
    items: list[Scored]

    def scores(self) -> dict[str, float]:
        """Return the scores by the item's id."""
        return {item.id: item.score for item in self.items}


@dataclass(frozen=True)
class Verdict:
    """Whether a server passes the suite.

    Attributes:
        score: mean score of all items.
        comparison: comparison with an earlier run; None: there is no earlier run.
        problems: the reasons why the server does not pass; empty: the server passes.
    """

    run: Run
    score: Estimate
    comparison: Comparison | None
    problems: list[str] = field(default_factory=list)


def judge(suite: Suite, run: Run, first: Run, baseline: Run | None, alike: bool) -> Verdict:
    """Return whether a server's run of the suite passes, with the reasons.

    Args:
        first: the run of the first server; only used with `alike`.
        baseline: an earlier run of the suite, compared with `run`; None: there is none.
        alike: the server passes only if each of its answers equals the first server's.
    """
    score, problems = estimate(list(run.scores().values())), []
    if score.mean < suite.threshold:
        problems.append(f"the score {score.mean:.3f} is below the threshold {suite.threshold:g}")
    comparison = compare(run.scores(), baseline.scores()) if baseline else None
    if comparison is not None and comparison.is_worse:
        problems.append(f"worse than the baseline by {-comparison.difference.mean:.3f}")
    if errors := [item.id for item in run.items if item.error]:
        problems.append(f"no answer to {len(errors)}: {', '.join(errors[:5])}")
    if alike and (others := differing(run, first)):
        problems.append(f"other answers than {first.server} to {len(others)}: {', '.join(others[:5])}")
    return Verdict(run, score, comparison, problems)


def differing(run: Run, first: Run) -> list[str]:
    """Return the ids of the items for which the answers of two runs differ in text or sound."""
    known = {item.id: (item.text, item.sound) for item in first.items}
    return [item.id for item in run.items if known.get(item.id) != (item.text, item.sound)]


def junit(verdicts: list[Verdict]) -> bytes:
    """Return JUnit XML with a test suite for each server. Each item is a test, and `the suite` is an additional test.

    The test of an item fails if the item has no answer or the score 0. `the suite` fails if the verdict has problems.
    """
    root = ElementTree.Element("testsuites")
    for verdict in verdicts:
        failed = [item for item in verdict.run.items if item.error or not item.score]
        counts = {"tests": str(len(verdict.run.items) + 1), "failures": str(len(failed) + bool(verdict.problems))}
        name = verdict.run.suite
        suite = ElementTree.SubElement(root, "testsuite", {"name": _for_xml(f"{name} {verdict.run.server}"), **counts})
        failures = {item.id: item.error or f"scored 0: {item.heard or item.text}" for item in failed}
        cases = [(item.id, failures.get(item.id, "")) for item in verdict.run.items]
        for case, message in [*cases, ("the suite", "; ".join(verdict.problems))]:
            test = ElementTree.SubElement(suite, "testcase", classname=_for_xml(name), name=_for_xml(case))
            if message:
                ElementTree.SubElement(test, "failure", message=_for_xml(message))
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _for_xml(text: str) -> str:
    """Replace the characters that XML 1.0 does not allow by U+FFFD."""
    return re.sub("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]", "\ufffd", text)


def table(verdicts: list[Verdict]) -> Any:
    """Return a `rich` table with one row for each server."""
    from rich.table import Table
    from rich.text import Text

    shown = Table("server", "model", "items", "score (95 %)", "compared with the baseline (95 %)", "verdict")
    for verdict in verdicts:
        comparison = "-"
        if (other := verdict.comparison) is not None:
            split = f"{other.better} better, {other.worse} worse, p={other.p:.3f}"
            comparison = f"{_interval(other.difference, '+')} ({split})"
        run, outcome = verdict.run, "; ".join(verdict.problems) or "ok"
        cells = (run.server, run.model, str(len(run.items)), _interval(verdict.score), comparison, outcome)
        shown.add_row(*map(Text, cells))  # rich does not parse brackets in `Text` as markup
    return shown


def _interval(found: Estimate, sign: str = "") -> str:
    return f"{found.mean:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def as_json(verdicts: list[Verdict], environment: dict[str, str]) -> bytes:
    """Return the JSON file with the score of every item, which a later run reads as baseline."""
    servers = [
        {
            **msgspec.to_builtins(verdict.run),
            "score": asdict(verdict.score),
            "comparison": None if verdict.comparison is None else asdict(verdict.comparison),
            "problems": verdict.problems,
        }
        for verdict in verdicts
    ]
    return msgspec.json.format(msgspec.json.encode({"environment": environment, "servers": servers}), indent=1)


class _File(msgspec.Struct):
    servers: list[Run]


def from_json(data: bytes, suite: Suite) -> Run:
    """Return the first server's run of a JSON file.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the file is not one that `as_json` wrote.
        ValueError: the file is of another suite or of other items or options, or it lacks items.
    """
    servers = msgspec.json.decode(data, type=_File).servers
    if not servers:
        raise ValueError("has no server")
    run = servers[0]
    if run.suite != suite.name:
        raise ValueError(f"is of the suite '{run.suite}', not '{suite.name}'")
    if run.digest != suite.digest():
        raise ValueError("is of the suite as it was before its items or options changed; make a new one with --json")
    if missing := {item.id for item in suite.items} - run.scores().keys():
        raise ValueError(f"lacks the items {', '.join(sorted(missing)[:5])}")
    return run
