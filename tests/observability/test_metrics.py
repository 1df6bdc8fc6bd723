"""The registry, docs/operations.md, the dashboard and the alert rules have the same metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, CollectorRegistry
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.metrics import MODEL, PREFIX, REPLICA_INFO, Metric, Metrics
from vllm_omni_ext.modalities.registry import METRICS
from vllm_omni_ext.observability.engine_stats import EngineNumbers, ReplicaLabels, ReplicaStats

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "dashboards" / "vllm-omni-ext.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
RULES = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
TARGETS = [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel.get("targets", ())]
NAME = re.compile(r"[a-z_]+:[a-z_]+")
ADDED = {"instance", "job"}
"""Labels that Prometheus adds when it scrapes."""


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.unit} | {metric.text} |"


def test_the_table_is_the_registry() -> None:
    documented = [line for line in DOCUMENT.splitlines() if line.startswith(f"| `{PREFIX}")]
    assert documented == [row(metric) for metric in METRICS]
    registry = CollectorRegistry()
    for metric in METRICS:
        metric.make(registry)
    made = {family.name: family for family in registry.collect()}
    assert {metric.full_name.removesuffix("_total") for metric in METRICS} == set(made)
    for metric in METRICS:
        family = made[metric.full_name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)


def test_metrics_of_two_models_share_the_default_registry() -> None:
    for model in ("one", "two"):
        assert Metrics(model).of(METRICS[0], "text") is Metrics(model).of(METRICS[0], "text")


def mistakes(expression: str, legend: str, known: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield series and labels of a query that do not exist.

    Args:
        known: labels of each series.
    """
    shown = set(re.findall(r"{{(\w+)}}", legend))
    matched = set(re.findall(r"[{,]\s*(\w+)\s*[=!][=~]?", expression))
    grouped = [set(labels.split(", ")) for labels in re.findall(r"by \(([^)]*)\)", expression)]
    aggregated = re.search(r"\b(sum|max|min)\b", expression) is not None
    yield from shown - set().union(*grouped) if aggregated else ()
    if "histogram_quantile(" in expression and not any("le" in labels for labels in grouped):
        yield "le"
    for name in NAME.findall(expression):
        yield from {name} - known.keys()
        if f"rate({name}" in expression and not name.endswith(("_total", "_bucket", "_sum", "_count")):
            yield f"rate of {name}"
        yield from (shown | matched).union(*grouped) - ADDED - known.get(name, set())


@pytest.fixture(scope="module")
def known(tiny: Path) -> Iterator[dict[str, set[str]]]:
    """Labels of each series of this package and of vLLM."""
    found = {}
    for metric in METRICS:
        labels = {MODEL, *metric.labels}
        parts = {"_bucket": {"le"}, "_sum": set(), "_count": set()} if metric.kind == "histogram" else {"": set()}
        found |= {metric.full_name + part: labels | more for part, more in parts.items()}
    config = AsyncEngineArgs(model=str(tiny), dtype="float32", max_model_len=512).create_engine_config()
    talker = ReplicaId("talker", 0)
    numbers = EngineNumbers("talker", ["talker"], [talker])
    ReplicaStats(config, {talker: config}, numbers, planned=[talker], client_count=1)
    Metrics("m").of(REPLICA_INFO, "0", "talker", "talker/0").set(1)
    families = ReplicaLabels(REGISTRY).collect()
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    found |= {sample.name: set(sample.labels) for sample in samples}
    yield found
    unregister_vllm_metrics()


def test_every_series_and_label_of_the_dashboard_exists(known: dict[str, set[str]]) -> None:
    assert {name.partition(":")[0] for query, _ in TARGETS for name in NAME.findall(query)} == {"vllm", "vllm_omni_ext"}
    for query, legend in TARGETS:
        assert set(mistakes(query, legend, known)) == set(), query


@pytest.mark.parametrize(
    ("query", "legend", "mistake"),
    [
        ("vllm:num_preemption_total", "", "vllm:num_preemption_total"),
        ("vllm_omni_ext:replica_running", "", "vllm_omni_ext:replica_running"),
        ('vllm_omni_ext:replica_up{model=~"$model"}', "", "model"),
        ('vllm:kv_cache_usage_perc{model_name=~"$model", stages="x"}', "", "stages"),
        ("sum by (stage, kind) (vllm_omni_ext:replica_up)", "", "kind"),
        ("vllm_omni_ext:replica_up", "{{kind}}", "kind"),
        ("sum by (stage) (vllm_omni_ext:replica_up)", "{{replica}}", "replica"),
        ("rate(vllm_omni_ext:replica_up[1m])", "", "rate of vllm_omni_ext:replica_up"),
        ("histogram_quantile(0.5, sum(vllm_omni_ext:kv_wait_seconds_bucket))", "", "le"),
    ],
)
def test_a_wrong_name_in_a_query_is_found(query: str, legend: str, mistake: str, known: dict[str, set[str]]) -> None:
    assert set(mistakes(query, legend, known)) == {mistake}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_series_and_label_of_an_alert_exists(rule: dict[str, Any], known: dict[str, set[str]]) -> None:
    shown = rule["annotations"]["summary"].replace("{{ $labels.", "{{").replace(" }}", "}}")
    assert NAME.search(rule["expr"]) and set(mistakes(rule["expr"], shown, known)) == set()
    row = f"| `{rule['alert']}` | {rule['labels']['severity']} |"
    assert sum(line.startswith(row) for line in DOCUMENT.splitlines()) == 1


@pytest.fixture
def promtool(tmp_path: Path) -> str:
    """Prometheus's tool, from Debian's package if it is not installed."""
    if (there := shutil.which("promtool")) is not None:
        return there
    if shutil.which("apt-get") is None:
        pytest.skip("promtool is not installed, and this is no Debian that has its package")
    subprocess.run(["apt-get", "download", "prometheus"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (package,) = tmp_path.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True, timeout=300)
    return str(tmp_path / "usr" / "bin" / "promtool")


@pytest.mark.engine
@pytest.mark.extended
def test_each_alert_fires_after_its_time_and_none_on_a_healthy_server(promtool: str, tmp_path: Path) -> None:
    for file in (ROOT / "dashboards" / "alerts.yaml", ROOT / "tests" / "data" / "alerts_test.yaml"):
        shutil.copy(file, tmp_path)
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run([promtool, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (tmp_path / "alerts_test.yaml").read_text(encoding="utf-8")
    assert all(len(re.findall(rf"alertname: {rule['alert']}\b", tested)) >= 2 for rule in RULES)


def test_the_dashboard_shows_every_metric() -> None:
    """Except the numbers of replicas, which have labels instead."""
    queries = {name for query, _ in TARGETS for name in NAME.findall(query)}
    assert [each for each in METRICS if not any(name.startswith(each.full_name) for name in queries)] == [REPLICA_INFO]


def test_grafana_can_import_the_dashboard() -> None:
    assert DASHBOARD["id"] is None and DASHBOARD["uid"] and DASHBOARD["title"]
    assert [entry["name"] for entry in DASHBOARD["__inputs"]] == ["DS_PROMETHEUS"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
            assert panel["targets"] and panel["description"]
