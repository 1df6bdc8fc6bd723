"""The stages of each process of a deployment: the head, headless processes, or all in one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.cli import plan as plan_command
from vllm_omni_ext.cli import serve as serve_command
from vllm_omni_ext.cli.args import OmniServe, parse_serve
from vllm_omni_ext.cli.members import headless_of
from vllm_omni_ext.cli.settings import from_cli, from_kwargs
from vllm_omni_ext.config.schema import Cluster, Limits, Timeouts
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.topology.agreement import config_hash
from vllm_omni_ext.topology.plan import Headless, Plan

HEAD = ["-oma", "10.0.0.1", "-omp", "9100"]
HEAD_AT = ("10.0.0.1", 9100)


def planned(*words: str) -> tuple[Plan, argparse.Namespace]:
    return from_cli(parse_serve([*words, "--omni"]))


def headless(*words: str) -> Headless | None:
    plan, args = planned(*words)
    return headless_of(args, plan)


def replicas(plan: Plan) -> list[int]:
    return [len(stage.replicas) for stage in plan.stages]


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(*words)
    return str(caught.value)


def test_short_flags_do_not_shadow_those_of_vllm() -> None:
    """argparse refuses two equal flags, but not a short flag that is the start of another."""
    parser = argparse.ArgumentParser()
    known = OmniServe().subparser_init(parser.add_subparsers())._option_string_actions
    ours = {"-oma", "-omp", "-ora"}
    assert ours <= known.keys()
    others = [flag for flag in known if flag not in ours and not flag.startswith("--")]
    assert others
    assert [(a, b) for a in ours for b in others if a.startswith(b) or b.startswith(a)] == []


@pytest.mark.slow
def test_flags_set_their_keys(model: str) -> None:
    words = ["--omni-lb-policy", "random", "--omni-heartbeat-timeout", "1", "--omni-drain-timeout", "2"]
    words += ["--omni-replica-wait-timeout", "3", "--omni-restart-limit", "0", "--omni-cluster-secret-file", "secret"]
    words += ["--omni-master-address", "::1", "--omni-master-port", "1", "--omni-log-dir", "logs"]
    words += [
        "--omni-startup-timeout",
        "9",
        "--omni-max-body",
        "2",
        "--omni-realtime-sessions",
        "7",
        "--omni-realtime-length",
        "8",
        "--omni-realtime-idle",
        "9",
        "--omni-realtime-events",
        "10",
        "--omni-realtime-buffer",
        "11",
        "--omni-realtime-sound",
        "12",
        "--no-omni-cluster-auth",
        "--omni-request-timeout",
        "4",
    ]
    config = planned(model, *words)[0].config
    assert (config.lb_policy, config.restart_limit, config.log_dir) == ("random", 0, "logs")
    assert config.limits == Limits(
        max_body_mib=2,
        realtime_sessions=7,
        realtime_length_s=8.0,
        realtime_idle_s=9.0,
        realtime_events=10,
        realtime_buffer_mib=11,
        realtime_sound_mib=12,
    )
    assert config.timeouts == Timeouts(
        drain_timeout_s=2.0, replica_wait_timeout_s=3.0, startup_timeout_s=9.0, request_timeout_s=4.0
    )
    assert config.cluster == Cluster(
        heartbeat_timeout_s=1.0,
        cluster_secret_file="secret",
        cluster_auth=False,
        master_address="::1",
        master_port=1,
    )
    for short in (HEAD, ["-oma=10.0.0.1", "-omp=9100"], [*HEAD[2:], *HEAD[:2]]):
        config = planned(model, *short)[0].config
        assert (config.cluster.master_address, config.cluster.master_port) == HEAD_AT


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage"), [(0, "thinker"), (1, "talker"), (2, "code2wav")])
def test_a_headless_process_runs_its_stage_alone(model: str, number: int, stage: str, tmp_path: Path) -> None:
    expected = Headless(stage=stage, replicas=3, head=HEAD_AT, replica_address="10.0.0.2")
    file = tmp_path / "cluster.yaml"
    file.write_text("{cluster: {master_address: 10.0.0.1, master_port: 9100}, stages: {talker: {replicas: 0}}}")
    words = ["--headless", "--omni-dp-size-local", "3", "-ora", "10.0.0.2"]
    for which in (["--stage", stage], ["--stage-id", str(number)]):
        for more in ([], ["--stage-config", "qwen3_omni_replicas"], ["--api-server-count", "0"]):
            plan, args = planned(model, *words, *which, *HEAD, *more)
            assert headless_of(args, plan) == expected
            assert replicas(plan) == [3 * (index == number) for index in range(3)]
        assert headless(model, *words, *which, "--stage-config", str(file)) == expected
    plan, args = planned(model, "--omni-dp-size-local", "1", *HEAD)  # not headless
    assert replicas(plan) == [1, 1, 1] and headless_of(args, plan) is None


@pytest.mark.slow
def test_a_headless_process_has_the_settings_of_its_stage(model: str) -> None:
    words = ["--stage-overrides", '{"talker": {"max_num_seqs": 3, "seed": 7}}', "--max-num-seqs", "5"]
    plan = planned(model, "--headless", "--stage", "talker", *HEAD, *words)[0]
    for stage in plan.stages:
        assert stage.engine_args == planned(model, *HEAD, *words)[0].stage(stage.name).engine_args


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--compilation-config", '{"mode": 0}', "--limit-mm-per-prompt", '{"image": 2}', "--max-model-len", "64"],
        ["--structured-outputs-config", '{"backend": "auto"}', "--attention-config", "{}", "--dtype", "float32"],
        ["--stage-overrides", '{"talker": {"max_model_len": 99, "compilation_config": {"mode": 0}}}'],
    ],
)
def test_head_and_headless_agree(model: str, words: list[str]) -> None:
    """With any form of vLLM's flags and any number of replicas."""
    head = planned(model, *words, *HEAD, "--stage", "thinker")[0]
    for stage in ("thinker", "talker", "code2wav"):
        local = ["--omni-dp-size-local", "3", "--max-num-seqs", "2", "--gpu-memory-utilization", "0.3"]
        there = planned(model, *words, *HEAD, "--headless", "--stage", stage, *local)[0]
        assert config_hash(there, stage) == config_hash(head, stage)
    other = planned(model, *words, *HEAD, "--seed", "7")[0]
    assert config_hash(other, "talker") != config_hash(head, "talker")


def test_the_head_may_run_one_stage_alone(model: str) -> None:
    plan, args = planned(model, "--stage-id", "0", "--omni-dp-size-local", "2", *HEAD)
    assert replicas(plan) == [2, 0, 0] and headless_of(args, plan) is None
    plan, args = planned(model, "--stage", "talker", *HEAD)
    assert (replicas(plan), plan.frontend().name, headless_of(args, plan)) == ([0, 1, 0], "thinker", None)
    plan, _ = planned(model, "--stage", "thinker", *HEAD, "--stage-config", "qwen3_omni_replicas")
    assert replicas(plan) == [1, 0, 0]


def test_a_replica_number_is_ignored_with_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(model, "--headless", "--stage", "talker", *HEAD, "--replica-id", "4")[0]
    assert [str(replica.id) for replica in plan.replicas()] == ["talker/0"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "replica-id" in line]
    assert lines == ["warning: --replica-id 4 is ignored: the head gives replicas their numbers"]


ONE_HOST = "the name or address of one host, without a port"
STAGES = "--stage thinker|talker|code2wav"
MISSING = "--headless: the stage it runs and its head must be named; write "
AWAY = "replicas: 0 here, so all of them join from elsewhere; write --omni-master-port PORT too, and --omni-master-addr"
SPLIT = '{"thinker": {"prefill_decode": {"decode": {"replicas": 0}}}}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--headless", f"{MISSING}{STAGES} --omni-master-address HOST --omni-master-port PORT too"),
        ("--headless -oma h", f"{MISSING}{STAGES} --omni-master-port PORT too"),
        ("--headless --omni-dp-size-local 2 -oma h -omp 1", f"{MISSING}{STAGES} too"),
        ("--headless --stage talker -omp 1", f"{MISSING}--omni-master-address HOST too"),
        ("--headless --stage-id 0 -oma h", f"{MISSING}--omni-master-port PORT too"),
        ("-oma h -omp 1 --stage taker", "--stage taker: no such stage; use one of thinker, talker, code2wav"),
        ("--stage-id 3", "--stage-id 3: no such stage; use one of 0 (thinker), 1 (talker), 2 (code2wav)"),
        ("--headless --stage-id -1", "--stage-id -1: no such stage; use one of 0 (thinker), 1"),
        ("--stage thinker --stage-id 0", "--stage-id: --stage names the stage too; keep one of the two"),
        (f"--stage-overrides {SPLIT.replace(' ', '')}", f"stages.thinker.prefill_decode.decode.{AWAY}"),
        ("--stage talker", f"stages.thinker.{AWAY}"),
        ("--stage thinker", f"stages.talker.{AWAY}"),
        ("--omni-dp-size-local 2", "--omni-dp-size-local 2: of one stage; write --stage NAME too"),
        ("--stage thinker --omni-dp-size-local 0", "--omni-dp-size-local: must be an integer >= 1, got 0"),
        ("-ora 10.0.0.2", "--omni-replica-address 10.0.0.2: only with --headless; the replicas of this process are re"),
        (
            "--headless --stage talker -oma h -omp 1 --omni-drain-timeout 9",
            "--omni-drain-timeout: the head's value appl",
        ),
        (
            "--headless --stage talker -oma h -omp 1 --omni-heartbeat-timeout 9",
            "--omni-heartbeat-timeout: the head's v",
        ),
        *(
            (f"-oma {host} -omp 9100", f"cluster.master_address: must be {ONE_HOST}, or null, got '{host}'")
            for host in ("10.0.0.1:9100", "http://h", "h/x", "[::1]:9100", "10.0.0.256")
        ),
        *(
            (
                f"--headless --stage talker -oma h -omp 1 -ora {host}",
                f"--omni-replica-address {host}: must be {ONE_HOST}",
            )
            for host in ("10.0.0.2:1", "tcp://h", "0.0.0.0", "10.0.0.0/8", ",")
        ),
        ("--headless --stage talker -oma h -omp 1 --api-server-count 2", "--api-server-count 2: --headless starts no"),
        (
            "--omni-port-range 9000-8000",
            "cluster.port_range: must be a range of ports such as '20000-20099', or null, got '9000-8",
        ),
        (
            "-omp 9100 --omni-port-range 9000-9100",
            "cluster.port_range: 9000-9100 has ports of the head's own, 9100 to 9102 (--om",
        ),
        (
            "-omp 9100 --omni-port-range 9102-9200",
            "cluster.port_range: 9102-9200 has ports of the head's own, 9100 to 9102 (--om",
        ),
        (
            "-omp 65534",
            "cluster.master_port: must be <= 65533, because the head also listens on the 2 ports after it, got",
        ),
        ("-omp 70000", "cluster.master_port: must be an integer from 1 to 65535, or null, got 70000"),
    ],
)
def test_contradicting_or_missing_flags_are_refused(model: str, words: str, message: str) -> None:
    assert error_of(model, *words.split()).startswith(message)


def test_a_python_program_refuses_settings_for_replicas_that_join(model: str) -> None:
    for away in ("thinker", "talker"):
        with pytest.raises(ConfigError, match=rf"^stages\.{away}\.replicas: must be >= 1: no replica can join"):
            from_kwargs(model, stage_overrides={away: {"replicas": 0}})
    for name, value in (("master_port", 9100), ("master_address", "10.0.0.1")):
        with pytest.raises(ConfigError, match=rf"^cluster.{name}: no replica can join LLM\(omni=True\)"):
            from_kwargs(model, **{name: value})


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "*"])
@pytest.mark.parametrize("words", [[], ["--headless", "--stage", "talker"]], ids=["head", "headless"])
def test_an_address_that_no_replica_can_connect_to_is_refused(model: str, words: list[str], address: str) -> None:
    message = error_of(model, *words, "-oma", address, "-omp", "9100")
    assert message.startswith("cluster.master_address: ") and "--omni-master-address HOST" in message


@pytest.mark.parametrize("host", ["10.0.0.2", "::1", "[fe80::1%eth0]", "head-0.omni.svc", "node_7"])
def test_names_and_addresses_of_hosts_are_accepted(model: str, host: str) -> None:
    words = ["--headless", "--stage", "talker", "-omp", "9100"]
    plan = planned(model, *words, "-oma", host, "-ora", host)[0]
    assert plan.config.cluster.master_address == host


def test_a_head_with_a_port_alone_listens_on_the_loopback(model: str) -> None:
    config = planned(model, "-omp", "9100")[0].config
    assert (config.cluster.master_address, config.cluster.master_port) == ("127.0.0.1", 9100)


def test_plan_shows_a_headless_process(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--omni", "--headless", "--stage", "talker", *HEAD]
    assert plan_command.main(words) == 0
    assert "processes\n  headless, joins 10.0.0.1 port 9100\n  |- talker\n" in capsys.readouterr().out
    assert plan_command.main([*words, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["headless"]["stage"], read["pipeline"]) == ("talker", "qwen3_omni")


def test_serve_runs_replicas_alone(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def run_headless(plan: Plan, found: Headless, args: argparse.Namespace) -> int:
        seen.append((replicas(plan), found, args.model))
        return 3

    monkeypatch.setitem(
        sys.modules, "vllm_omni_ext.runtime.supervise.headless", SimpleNamespace(run_headless=run_headless)
    )
    monkeypatch.setattr(serve_command.os, "_exit", sys.exit)
    words = [model, "--omni", "--headless", "--stage", "code2wav", *HEAD]
    with pytest.raises(SystemExit) as end:
        serve_command.main([*words, "--no-omni-cluster-auth"])
    assert end.value.code == 3
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert serve_command.main(words) == 2, "the head is on another host, its secret is not here"
    assert seen == [([0, 0, 1], Headless(stage="code2wav", replicas=1, head=HEAD_AT, replica_address=None), model)]
