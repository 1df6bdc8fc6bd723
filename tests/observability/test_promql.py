"""The evaluation of the dashboard's queries finds what is wrong with them."""

from __future__ import annotations

import math

import pytest

from tests.support.promql import Query, Vector, Wrong, series_of, shown

EARLIER = """\
a:requests_total{model_name="m",stage="x",replica="x/0"} 4
a:requests_total{model_name="m",stage="x",replica="x/1"} 0
a:requests_total{model_name="m",stage="y",replica="y/0"} 1
"""
LATER = """\
a:requests_total{model_name="m",stage="x",replica="x/0"} 10
a:requests_total{model_name="m",stage="x",replica="x/1"} 6
a:requests_total{model_name="m",stage="y",replica="y/0"} 1
a:up{model_name="m",stage="x"} 2
a:up{model_name="m",stage="y"} 1
a:part_seconds_bucket{model_name="m",stage="x",le="0.5"} 2
a:part_seconds_bucket{model_name="m",stage="x",le="1.0"} 6
a:part_seconds_bucket{model_name="m",stage="x",le="+Inf"} 6
a:none_seconds_bucket{model_name="m",le="+Inf"} 0
"""


def evaluated(expression: str, legend: str = "") -> Vector:
    return shown(Query("", "", expression, legend), series_of(EARLIER), series_of(LATER))


def by_stage(expression: str) -> dict[str, float]:
    return {dict(labels)["stage"]: value for labels, value in evaluated(expression, "{{stage}}").items()}


def test_sums_rates_and_arithmetic() -> None:
    assert by_stage('sum by (stage) (rate(a:requests_total{model_name=~"$model"}[$__rate_interval]))') == {
        "x": pytest.approx(0.2),
        "y": 0,
    }
    assert evaluated('sum(a:up{stage!="y"})') == {frozenset(): 2}
    assert by_stage("sum by (stage) (a:requests_total) / sum by (stage) (a:up) * 2 - 1") == {"x": 15, "y": 1}
    assert by_stage("100 - (a:up + 1) * 2") == {"x": 94, "y": 96}


def test_quantiles() -> None:
    median = "histogram_quantile(0.5, sum by (le, stage) (a:part_seconds_bucket))"
    assert by_stage(median) == {"x": pytest.approx(0.625)}
    assert all(math.isnan(each) for each in evaluated("histogram_quantile(0.5, a:none_seconds_bucket)").values())


@pytest.mark.parametrize(
    ("expression", "legend", "said"),
    [
        ("a:missing", "", "no series"),
        ('a:up{model="m"}', "", "has no label model"),
        ('a:up{stage="z"}', "", "no series"),
        ("sum by (replica) (a:up)", "", "by {'replica'}"),
        ("a:up", "{{replica}}", "the legend names"),
        ("rate(a:up[1m])", "", "no total"),
        ("histogram_quantile(0.5, a:up)", "", "no label le"),
        ("a:up * on (stage) a:requests_total", "", "on"),
        ("sum by (stage) (a:up", "", "expected"),
        ("a:up)", "", "not understood"),
        ("a:up & a:up", "", "no PromQL"),
        ("a:up + a:requests_total", "", "nothing is shown"),
    ],
)
def test_what_is_wrong_is_found(expression: str, legend: str, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        evaluated(expression, legend)


def test_a_total_that_went_back_is_found() -> None:
    with pytest.raises(Wrong, match="went back"):
        shown(Query("", "", "rate(a:requests_total[1m])", ""), series_of(LATER), series_of(EARLIER))
