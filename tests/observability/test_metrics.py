"""docs/operations.md, the dashboard and the registry say the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_omni_ext.metrics import MODEL, PREFIX, REPLICA_INFO, Metric, Metrics, make_all
from vllm_omni_ext.modalities.registry import METRICS as ALL

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "dashboards" / "vllm-omni-ext.json").read_text(encoding="utf-8"))


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.unit} | {metric.text} |"


def families() -> dict[str, Family]:
    registry = CollectorRegistry()
    make_all(registry, ALL)
    return {family.name: family for family in registry.collect()}


def test_the_table_is_the_registry() -> None:
    documented = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{PREFIX}")]
    assert documented == [row(metric) for metric in ALL]
    made = families()
    assert {metric.full_name.removesuffix("_total") for metric in ALL} == set(made)
    for metric in ALL:
        family = made[metric.full_name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert ("_seconds" in metric.name) == (metric.unit == "seconds")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert MODEL not in metric.labels


def test_metrics_of_two_models_share_the_default_registry() -> None:
    for model in ("one", "two"):
        assert Metrics(model).of(ALL[0], "text") is Metrics(model).of(ALL[0], "text")


def expressions() -> Iterator[tuple[str, str]]:
    """(panel title, query) of the whole dashboard."""

    def walk(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for panel in panels:
            yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
            yield from walk(panel.get("panels", []))

    yield from walk(DASHBOARD["panels"])


def test_the_dashboard_queries_what_exists() -> None:
    exported = {metric.full_name for metric in ALL}
    suffixes = {f"{metric.full_name}_{part}" for metric in ALL if metric.kind == "histogram" for part in PARTS}
    for title, query in expressions():
        for name in re.findall(r"[a-z_]+:[a-z_]+", query):
            assert name in exported | suffixes or name.startswith("vllm:"), (title, name)


PARTS = ("bucket", "sum", "count")


def test_the_dashboard_shows_every_metric() -> None:
    """But for the numbers of replicas, which have labels instead."""
    queries = " ".join(query for _, query in expressions())
    assert [metric for metric in ALL if metric.full_name not in queries] == [REPLICA_INFO]


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] and DASHBOARD["title"]
    assert [entry["name"] for entry in DASHBOARD["__inputs"]] == ["DS_PROMETHEUS"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        assert set(panel["gridPos"]) == {"x", "y", "w", "h"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
            assert panel["targets"] and panel["description"]


SERVER = """
import sys
from vllm_omni_ext import metrics as m
from vllm_omni_ext.modalities.audio import AUDIO_SECONDS
metrics = m.Metrics("tiny")
metrics.of(m.REPLICA_IN_FLIGHT, "talker", "talker/0").set(int(sys.argv[1]))
metrics.of(m.REPLICA_RUNNING, "talker", "talker/0").set(int(sys.argv[1]))
metrics.of(AUDIO_SECONDS).inc(2)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.engine
def test_several_api_servers(tmp_path: Path) -> None:
    """In flight is a sum over servers, a replica's own load what was said last, a counter a sum."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    words, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    servers = [
        subprocess.Popen([*words, number], env=environment, stdin=pipe, stdout=pipe, cwd=ROOT) for number in ("3", "4")
    ]
    try:
        for server in servers:
            assert server.stdout is not None and server.stdout.readline()
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))
        labels = {"model_name": "tiny", "stage": "talker", "replica": "talker/0"}
        assert registry.get_sample_value(PREFIX + "replica_requests_in_flight", labels) == 7
        assert registry.get_sample_value(PREFIX + "replica_requests_running", labels) in (3, 4)
        assert registry.get_sample_value(PREFIX + "audio_seconds_total", {"model_name": "tiny"}) == 4
    finally:
        for server in servers:
            server.communicate()
