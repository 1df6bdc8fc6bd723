"""The Python API's keywords, and the engine arguments of a replica."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, field_validator
from vllm.config import CompilationConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext

from vllm_omni_ext.cli.args import parse_serve
from vllm_omni_ext.cli.engine_fields import ENGINE_FIELDS, check_engine_value
from vllm_omni_ext.cli.settings import from_cli, from_kwargs
from vllm_omni_ext.errors import ConfigError, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.http import Qwen3OmniHttp
from vllm_omni_ext.runtime.launch.engine_args import engine_config, stage_engine_args
from vllm_omni_ext.topology.plan import ReplicaPlan


def test_keywords_are_settings_of_all_stages_or_of_the_frontend(model: str) -> None:
    plan = from_kwargs(
        model,
        stage_config="qwen3_omni_replicas",
        stage_overrides='{"talker": {"replicas": 3}}',
        async_chunk=False,
        startup_timeout_s=30,
        max_num_seqs=2,
        seed=1,
    )
    assert len(plan.stage("talker").replicas) == 3
    assert len(plan.stage("code2wav").replicas) == 2
    assert (plan.config.async_chunk, plan.config.timeouts.startup_timeout_s) == (False, 30.0)
    assert plan.stage("thinker").engine_args["max_num_seqs"] == 2
    assert [stage.engine_args["seed"] for stage in plan.stages] == [1, 1, 1]


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_num_seq", "max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ("stage_overide", "stage_overide: unknown key; did you mean 'stage_overrides'?"),
        ("zzzzzz", "zzzzzz: unknown key"),
        (
            "data_parallel_size",
            "data_parallel_size: write stages.thinker.replicas instead (docs/operations.md, Data parallelism)",
        ),
        ("api_servers", "api_servers: LLM(omni=True) is a program without API servers; leave it out, got 2"),
        (
            "realtime_sessions",
            "limits.realtime_sessions: LLM(omni=True) is a program without realtime sessions; leave it out",
        ),
    ],
)
def test_wrong_keywords_are_refused_with_advice(model: str, keyword: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(model, **{keyword: 2})
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [100, 99])
def test_limits_of_sessions_are_refused_where_there_are_none(
    model: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse_serve([model, "--omni", "--omni-realtime-sessions", str(value)])
    assert from_cli(args)[0].config.limits.realtime_sessions == value
    monkeypatch.setattr(Qwen3OmniHttp, "apis", ())
    with pytest.raises(ConfigError, match=r"limits\.realtime_sessions: .* has no /v1/realtime; leave it out"):
        from_cli(args)


def test_limits_of_sessions_fit_together(model: str) -> None:
    with pytest.raises(ConfigError, match=r"realtime_sound_mib: must be at least realtime_buffer_mib, 16, got 1"):
        from_cli(parse_serve([model, "--omni", "--omni-realtime-sound", "1"]))


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("playground", True, "playground: LLM(omni=True) is a program without API servers; leave it out"),
        ("default_modalities", "text,video", "default_modalities: 'qwen3_omni' has no 'video'; use text, audio"),
        ("log_dir", "/etc/hostname", "log_dir: '/etc/hostname' is not a folder; name another one"),
        ("batch_dir", "/etc/hostname", "batch_dir: '/etc/hostname' is not a folder; name another one"),
        ("batch_dir", "made", "batch_dir: LLM(omni=True) has no HTTP routes; leave it out, got made"),
        ("max_body_mib", 8, "max_body_mib: LLM(omni=True) has no HTTP routes; leave it out, got 8"),
        ("api_key_routes", "all", "api_key_routes: LLM(omni=True) has no HTTP routes; leave it out, got 'all'"),
        ("log_dir", "/etc/hostname/logs", "log_dir: '/etc/hostname' is not a folder; name another one"),
        *(
            (
                name.rpartition(".")[2],
                value,
                f"{name}: no replica can join or leave LLM(omni=True); leave it out, got {value!r}",
            )
            for name, value in (
                ("cluster.cluster_auth", False),
                ("cluster.cluster_secret_file", "secret"),
                ("cluster.heartbeat_timeout_s", 30.0),
                ("timeouts.drain_timeout_s", 5),
            )
        ),
        ("min_replicas", 2, "min_replicas: unknown key"),
        (
            "stage_overrides",
            {"talker": {"replicas": 2, "min_replicas": 2}},
            "stages.talker.min_replicas: LLM(omni=True) has no health probes; leave it out, got 2",
        ),
        ("runner", "pooling", "runner: the stages choose their own runner; remove it"),
        ("convert", "embed", "convert: the stages choose their own; remove it"),
    ],
)
def test_wrong_values_are_refused_before_any_start(model: str, keyword: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(model, **{keyword: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "offline", "message"),
    [
        ("/nosuch/model", False, "model: there is no folder '/nosuch/model'"),
        ("some/model", True, "HF_HUB_OFFLINE is set, and the model is not in the local cache; download it first, or"),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_one_line(
    name: str, offline: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_ext.cli.model.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        from_kwargs(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("stage", "runner"), [("thinker", "pooling"), ("talker", "draft"), ("code2wav", "generate")])
def test_a_stage_chooses_its_runner(model: str, stage: str, runner: str) -> None:
    for key, value in (("runner", runner), ("convert", "embed")):
        with pytest.raises(ConfigError, match=rf"^stages\.{stage}\.engine\.{key}: the (stages choose|pipeline sets)"):
            from_kwargs(model, stage_overrides={stage: {key: value}})
    plan = from_kwargs(model, stage_overrides={"code2wav": {"runner": "pooling"}, "talker": {"runner": "generate"}})
    assert plan.stage("code2wav") == from_kwargs(model).stage("code2wav")


def test_logging_of_statistics_is_off_unless_the_stage_config_or_the_program_wants_it(
    model: str, tmp_path: Path
) -> None:
    def off(**keywords: Any) -> list[Any]:
        return [stage.engine_args["disable_log_stats"] for stage in from_kwargs(model, **keywords).stages]

    file = tmp_path / "logs.yaml"
    file.write_text("stages: {talker: {engine: {disable_log_stats: false}}}")
    assert off() == [True, True, True]
    assert off(stage_config=str(file)) == [True, False, True]
    assert off(stage_config=str(file), disable_log_stats=True) == [True, True, True]
    assert off(disable_log_stats=False) == [False, False, False]


def test_a_stage_config_with_a_divided_stage_can_be_used_without(model: str) -> None:
    overrides: dict[str, Any] = {"thinker": {"prefill_decode": None}}
    plan = from_kwargs(model, stage_config="qwen3_omni_pd", stage_overrides=overrides)
    assert [stage.name for stage in plan.stages] == ["thinker", "talker", "code2wav"]


@pytest.mark.parametrize(
    ("thinker", "variables", "message"),
    [
        (
            {"cpu_threads": 2, "env": {"OMP_NUM_THREADS": "3"}},
            {},
            "stages.thinker.env.OMP_NUM_THREADS: stages.thinker.cpu_threads says the same; keep one of the two",
        ),
        (
            {"kv_cache_bytes": 1 << 20},
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
            "VLLM_CPU_KVCACHE_SPACE: stages.thinker.kv_cache_bytes says the same; keep one of the two",
        ),
        (
            {"kv_cache_memory_bytes": 1 << 20, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
            {},
            "stages.thinker.env.VLLM_CPU_KVCACHE_SPACE: stages.thinker.engine.kv_cache_memory_bytes says the same; "
            "keep one of the two",
        ),
        ({"cpu_threads": 2}, {"OMP_NUM_THREADS": "3", "VLLM_CPU_KVCACHE_SPACE": "1"}, ""),
    ],
)
def test_a_variable_replaces_no_key(
    model: str, thinker: dict[str, Any], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{message}$") if message else nullcontext():
        from_kwargs(model, stage_overrides={"thinker": thinker})


def test_the_plan_has_the_threads_of_the_environment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {stage.env["OMP_NUM_THREADS"] for stage in from_kwargs(model).stages} == {"3"}


def test_an_override_of_the_kv_cache_has_precedence_over_the_flag_and_the_keyword(model: str) -> None:
    overrides = {"thinker": {"kv_cache_bytes": 64 << 20}}
    words = ["--kv-cache-memory-bytes", str(32 << 20), "--stage-overrides", json.dumps(overrides)]
    server, _ = from_cli(parse_serve([model, *words]))
    program = from_kwargs(model, kv_cache_memory_bytes=32 << 20, stage_overrides=overrides)
    for plan in (server, program):
        assert plan.stage("thinker").engine_args["kv_cache_memory_bytes"] == 64 << 20


def test_a_generation_config_has_precedence_over_parameters_of_the_stage_config(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("stages: {thinker: {params: {temperature: 0.7, top_p: 0.8, max_tokens: 9}}}")
    generation = {"temperature": 0.1, "top_k": 3, "top_p": None, "max_new_tokens": 5}
    expected = {"temperature": 0.1, "top_p": 0.8, "max_tokens": 5}
    words = ["--stage-config", str(file), "--override-generation-config", json.dumps(generation)]
    server, _ = from_cli(parse_serve([model, *words]))
    program = from_kwargs(model, stage_config=str(file), override_generation_config=generation)
    assert server.frontend().sampling == program.frontend().sampling == expected
    words += ["--stage-overrides", '{"thinker": {"params": {"temperature": 0.2}}}']
    server, _ = from_cli(parse_serve([model, *words]))
    assert server.frontend().sampling == expected | {"temperature": 0.2}


def test_parameters_of_the_text_that_only_a_program_can_use(model: str) -> None:
    given: dict[str, Any] = {"logprobs": 5, "detokenize": False, "extra_args": {"a": 1}, "temperature": 0.5}
    given |= {"structured_outputs": StructuredOutputsParams(regex="a+")}
    assert from_kwargs(model, stage_overrides={"thinker": {"params": given}}).frontend().params == given
    for key, value in (("output_kind", 1), ("structured_outputs", {"regex": "a+"})):
        with pytest.raises(ConfigError, match=rf"^stages\.thinker\.params\.{key}: .*; remove it$"):
            from_kwargs(model, stage_overrides={"thinker": {"params": {key: value}}})


def test_engine_args_belong_to_a_replica_of_the_plan(model: str) -> None:
    plan = from_kwargs(model, max_num_seqs=2)
    args = stage_engine_args(plan, ReplicaId("thinker", 0))
    assert (args.model, args.max_num_seqs, args.device_ids) == (model, 2, None)
    assert (args._api_process_count, args._api_process_rank) == (2, -1)
    assert stage_engine_args(plan, ReplicaId("thinker", 0), api_process=1)._api_process_rank == 1
    for unknown in (ReplicaId("dit", 0), ReplicaId("thinker", 1)):
        with pytest.raises(UnknownMember):
            stage_engine_args(plan, unknown)


def test_devices_and_named_functions(model: str) -> None:
    plan = from_kwargs(model)
    thinker = plan.stage("thinker")
    thinker = replace(
        thinker,
        engine_args={**thinker.engine_args, "hf_overrides": "os.path:join"},
        replicas=(ReplicaPlan(id=ReplicaId("thinker", 0), devices=(2, 3)),),
    )
    args = stage_engine_args(replace(plan, stages=(thinker, *plan.stages[1:])), ReplicaId("thinker", 0))
    assert args.device_ids == [2, 3]
    assert args.hf_overrides.__name__ == "join"


def test_mappings_become_vllms_config_objects(model: str) -> None:
    engine = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
    plan = from_kwargs(model, stage_overrides={"thinker": {"engine": engine}})
    args = stage_engine_args(plan, ReplicaId("thinker", 0))
    assert isinstance(args.kv_transfer_config, KVTransferConfig)
    bad = from_kwargs(model, stage_overrides={"thinker": {"kv_transfer_config": {"kv_rol": "kv_both"}}})
    with pytest.raises(ConfigError, match=r"^stages\.thinker\.engine\.kv_transfer_config: .*kv_rol"):
        stage_engine_args(bad, ReplicaId("thinker", 0))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_num_seqs", "64", "must be a valid integer, got '64'"),
        ("max_num_seqs", True, "must be a valid integer, got True"),
        ("gpu_memory_utilization", "0.5", "must be a valid number, got '0.5'"),
        ("gpu_memory_utilization", float("nan"), "must be a finite number, got nan"),
        ("max_model_len", "x", "must be a valid integer, got 'x'"),
        ("limit_mm_per_prompt", 2, "must be a valid dictionary, got 2"),
        ("compilation_config", "3", "must be a valid dictionary or a valid integer, got '3'"),
        ("mm_processor_cache_type", "none", "must be 'shm' or 'lru', got 'none'"),
    ],
)
def test_engine_arguments_of_a_wrong_type_are_refused(model: str, key: str, value: Any, message: str) -> None:
    path = "stages.thinker"
    for name, given in (
        (path, {key: value}),
        (f"{path}.prefill_decode.decode", {"prefill_decode": {"decode": {key: value}}}),
    ):
        with pytest.raises(ConfigError, match=f"^--stage-overrides: {re.escape(f'{name}.engine.{key}: {message}')}$"):
            from_cli(parse_serve([model, "--stage-overrides", json.dumps({"thinker": given})]), machine="cuda:80GiBx4")
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}: {message}')}$"):
        from_kwargs(model, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", torch.float32),
        ("max_model_len", None),
        ("max_num_seqs", 64.0),
        ("gpu_memory_utilization", 1),
        ("enforce_eager", 1),
        ("compilation_config", 3),
        ("compilation_config", None),
        ("compilation_config", CompilationConfig()),
        ("attention_backend", "FLASH_ATTN"),
        ("limit_mm_per_prompt", {"video": {"count": 1}, "image": 2}),
        ("served_model_name", ["a", "b"]),
        ("offload_params", ["a"]),
        ("hf_overrides", {"a": 1}),
        ("hf_overrides", lambda config: config),
        ("logits_processors", ["pkg.mod:Name"]),
    ],
)
def test_engine_arguments_that_vllm_accepts_are_accepted(key: str, value: Any) -> None:
    check_engine_value(key, value)


def test_the_defaults_of_engine_arguments_have_their_type() -> None:
    defaults = AsyncEngineArgs()
    for name in ENGINE_FIELDS:
        check_engine_value(name, getattr(defaults, name))


@pytest.mark.parametrize("plain", [True, False])
def test_an_error_of_vllm_is_one_line_with_the_stage(plain: bool) -> None:
    class Checked(BaseModel):
        field: int

        @field_validator("field")
        @classmethod
        def _never(cls, value: int) -> int:
            raise ValueError("Not on this\nplatform.")

    def create_engine_config(usage: Any) -> Any:
        return Checked._never(1) if plain else Checked(field=1)

    args: Any = SimpleNamespace(create_engine_config=create_engine_config)
    with pytest.raises(ConfigError) as caught:
        engine_config("ar", args, UsageContext.LLM_CLASS)
    assert str(caught.value) == "stage 'ar': vLLM refuses its engine arguments: Not on this platform."


@pytest.mark.parametrize(("lora", "experts", "triton"), [(1, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_lora_of_experts_needs_triton(lora: int, experts: int, triton: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni_ext.runtime.launch.engine_args.HAS_TRITON", bool(triton))
    model = SimpleNamespace(multimodal_config=None, is_moe=bool(experts))
    parallel = SimpleNamespace(enable_expert_parallel=False)
    config = SimpleNamespace(model_config=model, parallel_config=parallel, lora_config=object() if lora else None)
    args: Any = SimpleNamespace(create_engine_config=lambda usage: config)
    if lora and experts and not triton:
        with pytest.raises(ConfigError, match=r"^stages\.thinker\.engine\.enable_lora: .*Triton"):
            engine_config("thinker", args, UsageContext.LLM_CLASS)
    else:
        assert engine_config("thinker", args, UsageContext.LLM_CLASS) is config


@pytest.mark.parametrize(("parallel", "experts", "cpu"), [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_experts_are_not_divided_between_ranks_on_a_cpu(
    parallel: int, experts: int, cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There vLLM's kernel ends the process at the first request."""
    platform = SimpleNamespace(is_cpu=lambda: bool(cpu))
    monkeypatch.setattr("vllm_omni_ext.runtime.launch.engine_args.current_platform", platform)
    model = SimpleNamespace(multimodal_config=None, is_moe=bool(experts))
    ranks = SimpleNamespace(enable_expert_parallel=bool(parallel))
    config = SimpleNamespace(model_config=model, parallel_config=ranks, lora_config=None)
    args: Any = SimpleNamespace(create_engine_config=lambda usage: config)
    if parallel and experts and cpu:
        with pytest.raises(ConfigError, match=r"^stages\.thinker\.engine\.enable_expert_parallel: "):
            engine_config("thinker", args, UsageContext.LLM_CLASS)
    else:
        assert engine_config("thinker", args, UsageContext.LLM_CLASS) is config
