"""Evaluates the PromQL that the dashboard uses, over two scrapes. Everything else of the language is an error."""

from __future__ import annotations

import json
import operator
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "vllm-omni-ext.json"
VARIABLES = {"$model": ".*", "$__rate_interval": "1m"}
"""What Grafana puts in for the dashboard's variables."""

ADDED = {"instance", "job"}
"""Labels that Prometheus adds when it scrapes."""

TOKEN = re.compile(
    r'\s*(?:(?P<number>\d+\.?\d*)|(?P<name>[a-zA-Z_:][\w:]*)|(?P<text>"[^"]*")|(?P<op>=~|!~|!=|[-+*/(){}\[\],=]))'
)
ARITHMETIC = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else float("nan")}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Series = Mapping[tuple[str, Labels], float]


class Wrong(AssertionError):
    """The expression cannot be evaluated, or asks for what is not there."""


@dataclass(frozen=True)
class Query:
    """One query of the dashboard, with the title of its row and its panel."""

    row: str
    panel: str
    expression: str
    legend: str


def queries() -> Iterator[Query]:
    """Every query of the dashboard."""
    row = ""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", ()):
            yield Query(row, panel["title"], target["expr"], target["legendFormat"])


def names(expression: str) -> set[str]:
    """The names of the series that an expression reads."""
    return set(re.findall(r"[a-z_]+:[a-z_]+", expression))


def series_of(text: str) -> dict[tuple[str, Labels], float]:
    """Every value of a scrape, by name and labels."""
    families = text_string_to_metric_families(text)
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def check(text: str, rows: Container[str], absent: Container[str] = ()) -> None:
    """Evaluate all queries of some rows over a scrape, except those that read metrics named in `absent`.

    Raises:
        Wrong: see `shown`.
    """
    series = series_of(text)
    chosen = [
        each for each in queries() if each.row in rows and not any(name in absent for name in names(each.expression))
    ]
    assert chosen
    for each in chosen:
        shown(each, {}, series)


def shown(query: Query, before: Series, after: Series, seconds: float = 60.0) -> Vector:
    """What a panel shows after two scrapes.

    Raises:
        Wrong: the expression is not PromQL, names a series or label that does not exist, or shows nothing.
    """
    expression = query.expression
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    found = Evaluation(expression, before, after, seconds).result()
    if not isinstance(found, dict) or not found:
        raise Wrong(f"{query.panel}: nothing is shown by {query.expression}")
    wanted = set(re.findall(r"{{(\w+)}}", query.legend)) - ADDED
    for labels in found:
        if missing := wanted - dict(labels).keys():
            raise Wrong(f"{query.panel}: the legend names {missing}, which is not in {dict(labels)}")
    return found


class Evaluation:
    """Parses and evaluates one expression at once.

    Args:
        before: an earlier scrape.
        after: the scrape that is looked at.
        seconds: time between them.
    """

    def __init__(self, expression: str, before: Series, after: Series, seconds: float) -> None:
        self._tokens = _tokens(expression)
        self._before, self._after, self._seconds = before, after, seconds

    def result(self) -> Vector | float:
        """The value of the whole expression."""
        value: Vector | float = self._inside()
        if self._tokens:
            raise Wrong(f"not understood: {self._tokens}")
        return value

    def _next(self, *expected: str) -> str:
        if not self._tokens or (expected and self._tokens[0] not in expected):
            raise Wrong(f"expected {expected}, got {self._tokens[:1]}")
        return self._tokens.pop(0)

    def _at(self, token: str) -> bool:
        return bool(self._tokens) and self._tokens[0] == token

    def _binary(self, signs: Sequence[str], part: Callable[[], Any]) -> Any:
        value = part()
        while self._tokens and self._tokens[0] in signs:
            sign = self._next()
            value = _combined(ARITHMETIC[sign], value, part())
        return value

    def _inside(self) -> Any:
        return self._binary(("+", "-"), lambda: self._binary(("*", "/"), self._unary))

    def _unary(self) -> Any:
        token = self._next()
        match token:
            case "(":
                value = self._inside()
                self._next(")")
                return value
            case "sum" | "max" | "min":
                return self._aggregate({"sum": sum, "max": max, "min": min}[token])
            case "rate":
                return self._rate()
            case "histogram_quantile":
                return self._quantile()
            case "time":
                self._next("("), self._next(")")
                return time.time()
        return float(token) if token[0].isdigit() else self._select(token, self._after)

    def _aggregate(self, combine: Callable[[list[float]], float]) -> Vector:
        by = self._names() if self._at("by") else ()
        self._next("(")
        vector = self._inside()
        self._next(")")
        groups = defaultdict(list)
        for labels, value in vector.items():
            if missing := set(by) - dict(labels).keys():
                raise Wrong(f"by {missing}, which is not in {dict(labels)}")
            groups[frozenset(each for each in labels if each[0] in by)].append(value)
        return {labels: combine(values) for labels, values in groups.items()}

    def _names(self) -> tuple[str, ...]:
        self._next("by")
        self._next("(")
        found = [self._next()]
        while self._next(",", ")") == ",":
            found.append(self._next())
        return tuple(found)

    def _rate(self) -> Vector:
        self._next("(")
        name, matchers = self._next(), self._matchers()
        for token in ("[", "1", "m", "]", ")"):
            self._next(token)
        if not name.endswith(("_total", "_bucket", "_sum", "_count")):
            raise Wrong(f"rate of {name}, which is no total")
        now, earlier = _chosen(name, matchers, self._after), _chosen(name, matchers, self._before, strict=False)
        grown = {labels: value - earlier.get(labels, 0.0) for labels, value in now.items()}
        if min(grown.values()) < 0:
            raise Wrong(f"{name} went back")
        return {labels: value / self._seconds for labels, value in grown.items()}

    def _quantile(self) -> Vector:
        self._next("(")
        wanted = float(self._next())
        self._next(",")
        vector = self._inside()
        self._next(")")
        groups: dict[Labels, dict[float, float]] = defaultdict(dict)
        for labels, value in vector.items():
            bound = dict(labels).get("le")
            if bound is None:
                raise Wrong(f"a quantile of what has no label le: {dict(labels)}")
            groups[frozenset(each for each in labels if each[0] != "le")][float(bound)] = value
        return {labels: _quantile(wanted, buckets) for labels, buckets in groups.items()}

    def _select(self, name: str, series: Series) -> Vector:
        return _chosen(name, self._matchers(), series)

    def _matchers(self) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = []
        if not self._at("{"):
            return found
        while self._next("{", ",", "}") != "}":
            found.append((self._next(), self._next(*MATCHES), self._next().strip('"')))
        return found


def _tokens(expression: str) -> list[str]:
    found, at = [], 0
    while at < len(expression.rstrip()):
        token = TOKEN.match(expression, at)
        if token is None:
            raise Wrong(f"no PromQL: {expression[at:]}")
        found.append(token[token.lastgroup or 0])
        at = token.end()
    return found


def _chosen(name: str, matchers: list[tuple[str, str, str]], series: Series, *, strict: bool = True) -> Vector:
    named = {labels: value for (known, labels), value in series.items() if known == name}
    for label, _, _ in matchers:
        if any(label not in dict(labels) for labels in named):
            raise Wrong(f"{name} has no label {label}")
    chosen = {
        labels: value
        for labels, value in named.items()
        if all(MATCHES[sign](dict(labels)[label], wanted) for label, sign, wanted in matchers)
    }
    if strict and not chosen:
        raise Wrong(f"no series {name}{matchers}")
    return chosen


def _combined(combine: Callable[[float, float], float], left: Any, right: Any) -> Any:
    match left, right:
        case dict(), dict():
            return {labels: combine(left[labels], right[labels]) for labels in left.keys() & right.keys()}
        case dict(), _:
            return {labels: combine(value, right) for labels, value in left.items()}
        case _, dict():
            return {labels: combine(left, value) for labels, value in right.items()}
    return combine(left, right)


def _quantile(wanted: float, buckets: dict[float, float]) -> float:
    """The quantile of a histogram, linear inside its bucket as in Prometheus; NaN of nothing."""
    count = buckets.get(float("inf"))
    if count is None:
        raise Wrong("a histogram without the bucket +Inf")
    rank, low, below = wanted * count, 0.0, 0.0
    for bound, total in sorted(buckets.items()):
        if total >= rank and count:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / ((total - below) or 1.0)
        low, below = bound, total
    return float("nan")
