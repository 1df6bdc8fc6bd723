"""From a command line to a plan, with the parser of vLLM."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_ext.cli import plan as plan_command
from vllm_omni_ext.cli import serve as serve_command
from vllm_omni_ext.cli import settings
from vllm_omni_ext.cli.args import EXPLICIT, FLAGS, REFUSED, parse_serve
from vllm_omni_ext.cli.model import load_hf_config
from vllm_omni_ext.cli.settings import ENGINE_FIELDS, from_cli, from_kwargs
from vllm_omni_ext.config.schema import setting_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.registry import families
from vllm_omni_ext.plugins.spec import param_names
from vllm_omni_ext.topology import explain
from vllm_omni_ext.topology.engine_args import _RESERVED, SHARED_FIELDS
from vllm_omni_ext.topology.plan import Plan


def plan_of(*words: str) -> Plan:
    return from_cli(parse_serve([*words]))[0]


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(*words)
    return str(caught.value)


def test_given_flags_are_distinguished_from_defaults(model: str) -> None:
    args = parse_serve(["serve", model, "--omni", "--seed", "0", "--port", "8000", "--no-async-chunk"])
    assert getattr(args, EXPLICIT) == {"model_tag", "omni", "seed", "port", "async_chunk"}
    assert (args.model, args.seed, args.port, args.async_chunk, args.host) == (model, 0, 8000, False, None)
    assert args.gpu_memory_utilization > 0  # not given, still has vLLM's default
    args = parse_serve([model, "--max-num-seqs=3"])  # without the word `serve`
    assert (args.subparser, args.model, args.max_num_seqs, args.omni) == ("serve", model, 3, True)


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("--omni-logdir=x", "; did you mean --omni-log-dir?"),
        ("--omni_lb_policies", "; did you mean --omni-lb-policy?"),
        ("--max-model-length", "; did you mean --max-model-len?"),
        ("--nothing-like-it", ": --nothing-like-it"),
    ],
)
def test_a_misspelt_flag_gets_advice(model: str, word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_serve([model, "--omni", word])
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(advice)


def test_stock_flags_apply_to_the_frontend(model: str) -> None:
    plan = plan_of(model, "--omni", "--max-num-seqs", "3", "--seed", "0", "--max-model-len", "1k")
    thinker, talker = plan.stage("thinker").engine_args, plan.stage("talker").engine_args
    assert (thinker["max_num_seqs"], thinker["seed"], thinker["max_model_len"]) == (3, 0, 1000)
    assert (talker["max_num_seqs"], talker["seed"]) == (16, 0)
    assert "max_model_len" not in talker
    assert "model" not in thinker
    assert plan.stage("code2wav").engine_args["max_model_len"] == 4096 * 4, "from the checkpoint"
    plan_of(model, "--data-parallel-size", "1", "--runner", "auto", "--nnodes", "1")  # harmless values


def test_the_stage_config_has_three_flags(model: str) -> None:
    for flag in ("--stage-config", "--stage-configs-path", "--deploy-config"):
        plan = plan_of(model, "--omni", flag, "qwen3_omni_replicas")
        assert [str(r.id) for r in plan.replicas()] == ["thinker/0", "talker/0", "talker/1", "code2wav/0", "code2wav/1"]


def test_overrides_precede_flags_and_flags_precede_the_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("async_chunk: false\nstages: {thinker: {engine: {max_num_seqs: 2, max_num_batched_tokens: 64}}}\n")
    overrides = '{"thinker": {"max_num_batched_tokens": 128}, "talker": {"replicas": 2}}'
    words = [model, "--stage-config", str(file), "--max-num-seqs", "5", "--max-num-batched-tokens", "32"]
    plan = plan_of(*words, "--stage-overrides", overrides, "--async-chunk")
    thinker = plan.stage("thinker").engine_args
    assert (thinker["max_num_seqs"], thinker["max_num_batched_tokens"]) == (5, 128)
    assert plan.config.async_chunk is True
    assert plan_of(*words).config.async_chunk is False
    assert len(plan.stage("talker").replicas) == 2


def test_a_server_has_a_limit_for_requests(model: str) -> None:
    assert plan_of(model).config.timeouts.request_limit_s == 3600
    assert plan_of(model, "--stage-overrides", "{}", "--omni-request-timeout", "7").config.timeouts.request_limit_s == 7
    assert from_kwargs(model).config.timeouts.request_limit_s is None, "requests of a program may wait for their turn"
    assert from_kwargs(model, request_timeout_s=7.0).config.timeouts.request_limit_s == 7


def test_the_config_file_of_vllm_may_have_the_flags_of_the_package(model: str, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    content = {"model": model, "max-num-seqs": 3, "stage-overrides": {"talker": {"replicas": 2}}, "omni": True}
    file.write_text(json.dumps(content))
    plan = plan_of("serve", "--config", str(file), "--omni")
    assert (plan.model, plan.stage("thinker").engine_args["max_num_seqs"]) == (model, 3)
    assert len(plan.stage("talker").replicas) == 2
    assert len(plan_of(model, "--stage-overrides.talker.replicas", "2").stage("talker").replicas) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data-parallel-size", "2"],
            "--data-parallel-size 2: with --omni stages are replicated, not data-parallel; write --stage-overrides "
            '\'{"thinker": {"replicas": 2}}\'',
        ),
        (
            ["--master-addr", "h"],
            "--master-addr h: with --omni the head's address is another flag; write --omni-master",
        ),
        (["--runner", "pooling"], "--runner pooling: with --omni the stages choose their own runner; remove it"),
        (["--api-server-count", "0"], "api_servers: must be an integer >= 1, or auto, got 0"),
        (["--device-ids", "0,1"], "--device-ids "),
        (["--nnodes", "2"], "--nnodes 2: with --omni a replica runs on one host; remove it"),
        (
            ["--prefill-context-parallel-size", "2"],
            "--prefill-context-parallel-size 2: with --omni write tensor_parallel_size instead",
        ),
        (["--aggregate-engine-logging"], "--aggregate-engine-logging: with --omni each replica has a line of its own "),
        (["--port", "70000"], "port: must be an integer from 0 to 65535, got 70000"),
        (["--omni-log-dir", "~nobody-here/logs"], "log_dir: there is no home folder for '~nobody-here/logs'; name "),
        (["--stage-config", "~nobody-here/x.yaml"], "~nobody-here/x.yaml: no such stage config file"),
        (["--hf-overrides", '{"thinker_config": 3}'], "model: the config of "),
        (
            ["--hf-overrides", '{"thinker_config": {"text_config": {"num_hidden_layers": "x"}}}'],
            "model: the config of ",
        ),
        (["--worker-cls", "x"], "worker_cls: the pipeline sets it to "),
        (["--stage-overrides", "{"], "--stage-overrides: is not valid JSON"),
        (
            ["--stage-overrides", '{"talker": {"params": {"temprature": 2}}}'],
            "--stage-overrides: stages.talker.params.temprature: unknown key; did you mean 'temperature'?",
        ),
        (
            ["--stage-overrides", '{"talker": {"params": {"prompt_logprobs": 1}}}'],
            "stages.talker.params.prompt_logprobs: is not returned for this stage; remove it",
        ),
        *(
            (
                ["--stage-overrides", json.dumps({"talker": {"params": {key: value}}})],
                f"stages.talker.params.{key}: has no effect in this stage; remove it",
            )
            for key, value in {
                "n": 2,
                "stop": ["a"],
                "bad_words": ["a"],
                "structured_outputs": None,
                "output_kind": 1,
                "detokenize": False,
                "stream_interval": 2,
            }.items()
        ),
        (
            ["--stage-overrides", '{"code2wav": {"params": {"temperature": 0.5}}}'],
            "stages.code2wav.params.temperature: has no effect in this stage; remove it",
        ),
        *(
            (
                ["--stage-overrides", json.dumps({"thinker": {"params": {key: value}}})],
                f"stages.thinker.params.{key}: {why}; remove it",
            )
            for key, value, why in (
                ("output_kind", 1, "has no effect in this stage"),
                ("structured_outputs", {"regex": "a+"}, "is set by each request"),
                ("logprobs", 5, "is set by each request of a server"),
                ("skip_reading_prefix_cache", True, "has no effect in a server"),
                ("detokenize", False, "has no effect in a server"),
                ("extra_args", {"a": 1}, "has no effect in a server"),
                ("flat_logprobs", True, "has no effect in a server"),
            )
        ),
        (["--chat-template", "/missing"], "--chat-template: The supplied chat template (/missing) looks like a file"),
        (["--chat-template", "/"], "--chat-template: The supplied chat template (/) looks like a file"),
        (
            ["--enable-auto-tool-choice", "--tool-call-parser", "herms"],
            "--tool-call-parser herms: vLLM has no such parser; did you mean 'hermes'?",
        ),
        (["--tool-call-parser", "zzzzz"], "--tool-call-parser zzzzz: vLLM has no such parser; use one of "),
        (["--reasoning-parser", "qwen33"], "--reasoning-parser qwen33: vLLM has no such parser; did you mean 'qwen3'?"),
        (["--stage-config", "nothing"], "nothing: no such stage config; give the path of a .yaml file or one of "),
        (["--omni-startup-timeout", "0"], "timeouts.startup_timeout_s: must be a number of seconds > 0, got 0.0"),
    ],
)
def test_wrong_flags_are_refused_with_advice(model: str, words: list[str], message: str) -> None:
    assert error_of(model, "--omni", *words).startswith(message)


def test_parsers_and_templates_that_vllm_has_are_accepted(model: str, tmp_path: Path) -> None:
    plugin, template = tmp_path / "own_parser.py", tmp_path / "own.jinja"
    plugin.write_text(
        "from vllm.tool_parsers import ToolParserManager\nToolParserManager.register_lazy_module('own', 'a', 'A')\n"
    )
    template.write_text("{{ messages }}")
    words = ["--reasoning-parser", "qwen3", "--chat-template", str(template), "--tool-call-parser"]
    assert plan_of(model, *words, "hermes").model == model
    assert plan_of(model, "--chat-template", "{{ messages }}").model == model
    assert plan_of(model, *words, "own", "--tool-parser-plugin", str(plugin)).model == model


def test_the_http_server_has_the_engine_settings_of_the_frontend(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    parser = "structured_outputs_config: {reasoning_parser: qwen3, backend: xgrammar}"
    file.write_text(f"stages: {{thinker: {{engine: {{served_model_name: mine, {parser}}}}}}}")
    overrides = '{"thinker": {"enable_log_requests": true, "disable_log_stats": true}}'
    words = ["--stage-config", str(file), "--stage-overrides", overrides]
    args = from_cli(parse_serve([model, *words]))[1]
    assert (args.served_model_name, args.enable_log_requests, args.disable_log_stats) == (["mine"], True, True)
    assert (args.reasoning_parser, args.structured_outputs_config.reasoning_parser) == ("qwen3", "qwen3")
    assert args.structured_outputs_config.backend == "xgrammar"
    args = from_cli(parse_serve([model, *words, "--reasoning-parser", "deepseek_r1"]))[1]
    assert args.structured_outputs_config.reasoning_parser == "deepseek_r1"
    unknown = '{"thinker": {"reasoning_parser": "nope"}}'
    assert error_of(model, "--stage-overrides", unknown).startswith("--reasoning-parser nope: vLLM has no such parser;")
    assert parse_serve([model]).structured_outputs_config.reasoning_parser == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage-overrides", '{"talker": {"replicas": 2}}', "--stage-overrides", "{}"], "is written twice"),
        (["--stage-overrides", "{}", "--stage-overrides.code2wav.replicas", "2"], "is written twice"),
        (["--stage-config", "a.yaml", "--deploy-config", "b.yaml"], "is written twice"),
        (["--stage-config", ""], "must not be empty"),
    ],
)
def test_no_stage_config_is_dropped_for_another(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_serve([model, *words])
    assert message in capsys.readouterr().err


def test_dotted_overrides_are_merged(model: str) -> None:
    words = ["--stage-overrides.code2wav.replicas", "2", "--stage-overrides.talker.replicas", "3"]
    assert [len(stage.replicas) for stage in plan_of(model, *words).stages] == [1, 3, 2]


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_the_http_server_has_no_port_of_the_head(model: str, offset: int) -> None:
    head = ["-oma", "127.0.0.1", "-omp", "9100"]
    assert error_of(model, *head, "--port", str(9100 + offset)).startswith(
        f"port: {9100 + offset} is one of the head's"
    )
    assert plan_of(model, *head, "--port", "9103")


def test_overrides_of_nested_configs_are_those_of_vllm(model: str) -> None:
    nested = '{"thinker_config": {"text_config": {"max_position_embeddings": 4096}}}'
    config = load_hf_config(model, {"hf_overrides": json.loads(nested)})
    assert config.thinker_config.text_config.max_position_embeddings == 4096
    assert plan_of(model, "--hf-overrides", nested)


@pytest.mark.parametrize(("name", "value"), [("VLLM_DP_SIZE", "2"), ("VLLM_DP_RANK", "1")])
def test_variables_for_data_parallel_ranks_are_refused(
    model: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_stage = json.dumps({"talker": {"env": {name: value}}})
    assert error_of(model, "--stage-overrides", of_a_stage).startswith(f"stages.talker.env.{name}: replicas replace")
    monkeypatch.setenv(name, value)
    assert error_of(model).startswith(f"{name}: replicas replace")


def test_the_http_server_in_rust_is_refused_where_an_http_server_starts(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headless = ("--headless", "--stage", "talker", "-oma", "127.0.0.1", "-omp", "9")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    assert plan_of(model)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert error_of(model).startswith("VLLM_USE_RUST_FRONTEND: with --omni the HTTP server")
    assert plan_of(model, *headless)


def test_folders_may_begin_with_the_home_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_of(model, "--omni-log-dir", "~/logs").config.log_dir == str(tmp_path / "logs")


def test_models_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    assert error_of(str(tmp_path)).startswith(f"model: the config of '{tmp_path}' cannot be read: ")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert error_of(str(tmp_path)).startswith(
        "model: architecture 'LlamaForCausalLM' has no omni pipeline; supported: "
    )


def test_tables_have_fields_of_vllm_and_the_documentation_has_the_refused_flags() -> None:
    assert SHARED_FIELDS <= ENGINE_FIELDS
    assert _RESERVED.keys() <= ENGINE_FIELDS
    defaults = vars(parse_serve(["m"]))
    document = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = sorted("--" + name.replace("_", "-") for name in REFUSED)
    assert ", ".join(f"`{flag}`" for flag in flags) + "." in document
    for name, (harmless, _) in REFUSED.items():
        assert defaults[name] in harmless, name
    for pipeline in (pipeline for family in families() for pipeline in family.pipelines):
        for stage in pipeline.stages:
            assert {*stage.engine, *stage.engine_defaults} <= ENGINE_FIELDS
            assert stage.defaults.keys() <= set(param_names(stage.params))


def test_every_flag_of_a_key_is_documented_with_the_path_of_the_key() -> None:
    document = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in document.splitlines() if line.startswith("| `--")]
    rows = {flag.split("`")[1].split()[0]: key.strip("`") for flag, key in cells if re.fullmatch(r"`[\w.]+`", key)}
    assert rows == {flag: setting_path(key) for flag, key in FLAGS.items()}


@pytest.mark.parametrize(("word", "cores", "expected"), [("3", 2, 3), ("auto", 2, 1), ("auto", 7, 3), ("auto", 99, 8)])
def test_number_of_api_servers(
    word: str, cores: int, expected: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(settings.detect_machine(), cpu_count=cores)
    monkeypatch.setattr(settings, "detect_machine", lambda: machine)
    assert plan_of(model, "--api-server-count", word).api_servers == expected


@pytest.mark.parametrize("command", [plan_command.main, serve_command.main])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--headless"], "error: --headless: the stage it runs and its head must be named; write --stage "),
        (["--headless", "--omni-playground"], "error: --omni-playground: --headless starts no API server; remove it"),
        (["--enable-auto-tool-choice"], "error: --enable-auto-tool-choice requires --tool-call-parser"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    model: str, capsys: pytest.CaptureFixture[str], command: Any, words: list[str], message: str
) -> None:
    assert command([model, "--omni", *words]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(err) == 1
    assert err[0].startswith(message)


def test_a_plan_that_cannot_be_printed_is_one_line_and_status_2(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("stages.thinker.engine.x: cannot be compared")

    monkeypatch.setattr(explain, "config_hash", fail)
    assert plan_command.main([model, "--json"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "error: stages.thinker.engine.x: cannot" in printed.err) == ("", True)
