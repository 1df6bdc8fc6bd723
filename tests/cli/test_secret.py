"""The secret that follows from a command line, its messages and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.cli.settings import from_cli
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch.secret import default_file, with_secret
from vllm_omni_ext.topology.plan import Plan

HERE, ELSEWHERE = ["-oma", "127.0.0.1", "-omp", "9100"], ["-oma", "192.0.2.1", "-omp", "9100"]
HEADLESS = ["--headless", "--stage", "talker"]
NONE = "--no-omni-cluster-auth"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder for state, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def decided(*words: str) -> tuple[Plan, list[str]]:
    """The plan and the printed lines."""
    told: list[str] = []
    plan, args = from_cli(parse_serve([*words, "--omni"]))
    return with_secret(plan, headless=args.headless, tell=told.append), told


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decided(*words)
    return str(caught.value)


@pytest.mark.slow
def test_a_head_makes_a_secret_prints_how_to_copy_it_and_uses_it_again(model: str) -> None:
    file = default_file()
    assert decided(model)[0].config.cluster.cluster_secret_file is None and not file.exists(), "all is on this machine"
    plan, told = decided(model, *ELSEWHERE)
    assert plan.config.cluster.cluster_secret_file == str(file) and file.is_file()
    how = f"scp {file} HOST:cluster.secret, and there --omni-cluster-secret-file cluster.secret"
    assert told == [f"cluster secret: {file} (made now); this user's replicas on this host find it; other hosts: {how}"]
    before = file.read_bytes()
    again, told = decided(model, *ELSEWHERE)
    assert again.config.cluster.cluster_secret_file == str(file) and file.read_bytes() == before
    assert told == [f"cluster secret: {file}; this user's replicas on this host find it; other hosts: {how}"]


@pytest.mark.slow
@pytest.mark.parametrize("head_first", [True, False])
def test_replicas_of_the_same_host_find_the_secret_in_any_start_order(model: str, head_first: bool) -> None:
    head, replicas = [model, *HERE], [model, *HEADLESS, *HERE]
    first, second = (head, replicas) if head_first else (replicas, head)
    before = decided(*first)[0].config.cluster.cluster_secret_file
    content = default_file().read_bytes()
    assert decided(*second)[0].config.cluster.cluster_secret_file == before == str(default_file())
    assert default_file().read_bytes() == content
    assert decided(*replicas)[1] == []
    elsewhere = decided(model, *HEADLESS, *ELSEWHERE)[0].config.cluster.cluster_secret_file
    assert elsewhere == before, "also with the head on another host"
    default_file().chmod(0o644)
    for words in (head, replicas):
        assert error_of(*words).startswith("cluster secret: others may read")


def test_replicas_of_another_host_are_refused_without_the_secret(model: str) -> None:
    said = error_of(model, *HEADLESS, *ELSEWHERE)
    assert said.startswith("cluster secret: the head at 192.0.2.1 is on another host, and its secret is not here.")
    for advice in (f"scp {default_file()}", "--omni-cluster-secret-file cluster.secret", NONE):
        assert advice in said
    assert not default_file().exists()


@pytest.mark.slow
@pytest.mark.parametrize("role", [[], HEADLESS])
def test_a_given_file_is_used_and_its_mode_is_checked(model: str, tmp_path: Path, role: list[str]) -> None:
    file = tmp_path / "named"
    file.write_text("a secret of thirty bytes, or so")
    file.chmod(0o600)
    plan, told = decided(model, *role, *ELSEWHERE, "--omni-cluster-secret-file", str(file))
    assert (plan.config.cluster.cluster_secret_file, told) == (str(file), [])
    assert not default_file().exists()
    file.chmod(0o644)
    told = decided(model, *role, *ELSEWHERE, "--omni-cluster-secret-file", str(file))[1]
    assert told == [f"warning: the cluster secret can be read by other users: chmod 600 {file}"]


@pytest.mark.slow
def test_wrong_settings_of_the_secret_are_refused_before_any_start(model: str, tmp_path: Path) -> None:
    named = ["--omni-cluster-secret-file", str(tmp_path / "named")]
    assert error_of(model, *HERE, *named).startswith("coordinator secret: cannot read")
    unknown = error_of(model, *HERE, "--omni-cluster-secret-file", "~nobody-here/secret")
    assert unknown.startswith("coordinator secret: cannot read")
    (tmp_path / "named").write_text("short")
    assert error_of(model, *HERE, *named) == "coordinator secret: must have at least 16 bytes, got 5"
    assert error_of(model, *HERE, NONE, *named).startswith(
        "cluster.cluster_auth: there is a cluster_secret_file too; keep"
    )
    alone = error_of(model, *HERE[:2])
    assert alone == "cluster.master_address: without a port nobody can join; write --omni-master-port PORT too"


def test_a_cluster_without_a_secret_is_possible_with_a_warning(model: str, tmp_path: Path) -> None:
    plan, told = decided(model, *ELSEWHERE, NONE)
    assert plan.config.cluster.cluster_secret_file is None and not plan.config.cluster.cluster_auth
    assert told == [
        f"warning: no cluster secret ({NONE}): any process that reaches 192.0.2.1 can join, see requests and outputs, "
        "and send false ones"
    ]
    assert decided(model, *HEADLESS, *ELSEWHERE, NONE)[1] == []
    assert not default_file().exists()
    file = tmp_path / "config.yaml"
    file.write_text("cluster: {master_address: 192.0.2.1, master_port: 9100, cluster_auth: false}")
    assert decided(model, "--stage-config", str(file))[1] == told
