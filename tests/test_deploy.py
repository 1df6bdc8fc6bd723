"""The image and the manifests of `deploy/` fit the package. Nothing is built or deployed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from vllm_omni_ext import __version__, metrics
from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.serving.health import LIVE, READY, STARTED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PRE_STOP_S = 10
OBJECTS = {
    f"{each['kind']} {each['metadata']['name']}": each
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(file.read_text())
}
PODS = {name: each["spec"]["template"]["spec"] for name, each in OBJECTS.items() if "template" in each.get("spec", {})}
HEAD, TALKERS = PODS["StatefulSet omni-head"], PODS["Deployment omni-talkers"]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def flag(pod: dict[str, Any], name: str) -> str:
    (value,) = (arg.partition("=")[2] for arg in container(pod)["args"] if arg.startswith(f"{name}="))
    return str(value)


@pytest.mark.parametrize("name", OBJECTS)
def test_the_kubernetes_api_accepts_the_object(name: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", PODS)
def test_the_command_line_is_valid(name: str) -> None:
    args = [arg.replace("$(POD_IP)", "10.0.0.1") for arg in container(PODS[name])["args"]]
    parsed = parse_serve(args)
    assert parsed.omni and (parsed.headless is (name != "StatefulSet omni-head"))


def test_probes_use_the_routes_of_the_server() -> None:
    head = container(HEAD)
    for name, path in (("startup", STARTED), ("readiness", READY), ("liveness", LIVE)):
        probe = head[f"{name}Probe"]["httpGet"]
        assert (probe["path"], probe["port"]) == (path, "http")
    assert {"name": "http", "containerPort": 8000} in head["ports"]


def test_pods_have_time_to_drain() -> None:
    assert container(HEAD)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PRE_STOP_S)]
    assert HEAD["terminationGracePeriodSeconds"] > PRE_STOP_S + int(flag(HEAD, "--shutdown-timeout"))
    assert TALKERS["terminationGracePeriodSeconds"] > int(flag(HEAD, "--omni-drain-timeout"))


@pytest.mark.parametrize("name", PODS)
def test_the_secret_is_the_mounted_file(name: str) -> None:
    pod = PODS[name]
    (volume,) = (each for each in pod["volumes"] if "secret" in each)
    (mount,) = (each for each in container(pod)["volumeMounts"] if each["name"] == volume["name"])
    secret = OBJECTS[f"Secret {volume['secret']['secretName']}"]
    assert flag(pod, "--omni-cluster-secret-file") in [f"{mount['mountPath']}/{key}" for key in secret["stringData"]]
    assert volume["secret"]["defaultMode"] == 0o400 and mount["readOnly"]


def test_keys_come_from_secrets() -> None:
    found = {
        (name, each["name"]): each["valueFrom"]["secretKeyRef"]
        for name, pod in PODS.items()
        for each in container(pod)["env"]
        if "secretKeyRef" in each["valueFrom"]
    }
    key = found.pop(("StatefulSet omni-head", "VLLM_API_KEY"))
    assert key["key"] in OBJECTS[f"Secret {key['name']}"]["stringData"] and "optional" not in key
    assert found.keys() == {(name, "HF_TOKEN") for name in PODS}
    assert all(each["optional"] for each in found.values())


@pytest.mark.parametrize("name", PODS)
def test_all_pods_share_the_files_of_the_model(name: str) -> None:
    (volume,) = (each for each in PODS[name]["volumes"] if each["name"] == "models")
    claim = OBJECTS[f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert "ephemeral-storage" in container(PODS[name])["resources"]["requests"]


def test_the_network_policy_names_all_that_reach_http() -> None:
    http, inside = OBJECTS["NetworkPolicy omni"]["spec"]["ingress"]
    assert http["ports"] == [{"port": "http"}] and len(http["from"]) == 2
    assert all("matchLabels" in each.get("podSelector", each["namespaceSelector"]) for each in http["from"])
    assert inside["from"] == [{"podSelector": {"matchLabels": {"app": "omni"}}}]


def test_replicas_find_the_head() -> None:
    service = OBJECTS["Service omni-head"]["spec"]
    assert flag(TALKERS, "--omni-master-address") == "omni-head" and service["clusterIP"] == "None"
    assert flag(TALKERS, "--omni-master-port") == flag(HEAD, "--omni-master-port") == str(service["ports"][0]["port"])
    for name in ("Service omni", "Service omni-head"):
        labels = OBJECTS["StatefulSet omni-head"]["spec"]["template"]["metadata"]["labels"]
        assert OBJECTS[name]["spec"]["selector"].items() <= labels.items()
    shared = [arg for arg in container(HEAD)["args"] if arg.startswith(("Qwen", "--quantization"))]
    assert [arg for arg in container(TALKERS)["args"] if arg in shared] == shared, (
        "replicas of other settings are refused"
    )


def test_the_autoscaler_reads_a_metric_that_is_exported() -> None:
    scaler = OBJECTS["HorizontalPodAutoscaler omni-talkers"]["spec"]
    (rule,) = yaml.safe_load(OBJECTS["ConfigMap omni-adapter-rules"]["data"]["rules.yaml"])["externalRules"]
    metric = scaler["metrics"][0]["external"]["metric"]
    assert metric["name"] == rule["name"]["as"]
    exported = metrics.PREFIX + metrics.REPLICA_IN_FLIGHT.name
    assert rule["seriesQuery"] == exported and f"sum({exported}{{<<.LabelMatchers>>}})" == rule["metricsQuery"]
    assert metric["selector"]["matchLabels"].keys() <= set(metrics.REPLICA_IN_FLIGHT.labels)
    target = scaler["scaleTargetRef"]
    assert f"{target['kind']} {target['name']}" in OBJECTS


def test_the_image_has_the_supported_vllm() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"][0]
    base = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert base and Requirement(wanted).specifier.contains(base[1])
    image = f"vllm-omni-ext:{__version__}"
    assert {container(pod)["image"] for pod in PODS.values()} == {image}
    for text in (DEPLOY / "Dockerfile", ROOT / "docs" / "deployment.md"):
        assert f"-t {image} ." in text.read_text()
