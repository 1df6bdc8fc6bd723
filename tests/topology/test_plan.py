"""From configuration to plan: the precedence of engine arguments, and refusals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVEventsConfig

from vllm_omni_ext.config.connectors import DEFAULTS
from vllm_omni_ext.config.schema import Cluster, OmniConfig, StageConfig, Timeouts
from vllm_omni_ext.errors import ConfigError, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.memory import ModelFacts, StageFacts
from vllm_omni_ext.plugins.spec import EdgeSpec, PipelineSpec
from vllm_omni_ext.topology.agreement import config_hash
from vllm_omni_ext.topology.engine_args import COMPILATION, SHARED_FIELDS, with_custom_ops
from vllm_omni_ext.topology.explain import as_json, explain
from vllm_omni_ext.topology.machine import Machine, parse_machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import STAGE_WORKER, make_plan


def plan_for(
    pipeline: PipelineSpec,
    machine: Machine,
    stages: dict[str, StageConfig] | None = None,
    text_args: dict[str, Any] | None = None,
    facts: ModelFacts | None = None,
    **config: Any,
) -> Plan:
    return make_plan(
        model="m",
        family="speakers",
        pipeline=pipeline,
        config=OmniConfig(stages=stages or {}, **config),
        text_args=text_args or {},
        machine=machine,
        facts=facts,
    )


def test_the_order_of_stages_replicas_and_edges(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu, {"talker": StageConfig(replicas=2)})
    assert (plan.model, plan.family, plan.pipeline, plan.api_servers) == ("m", "speakers", "speech", 1)
    assert [str(replica.id) for replica in plan.replicas()] == ["thinker/0", "talker/0", "talker/1", "code2wav/0"]
    assert plan.frontend().name == "thinker"
    assert [edge.target for edge in plan.edges if edge.source == "thinker"] == ["talker", "talker"]
    assert [edge.source for edge in plan.edges_to("code2wav")] == ["talker"]
    assert plan.edges_to("thinker") == () and not [edge for edge in plan.edges if edge.source == "code2wav"]
    assert plan.replica(ReplicaId("talker", 1)).id == ReplicaId("talker", 1)


@pytest.mark.parametrize("away", [("talker",), ("thinker", "talker", "code2wav")])
def test_stages_may_be_on_other_hosts(
    pipeline: PipelineSpec, cpu: Machine, four_gpus: Machine, away: tuple[str, ...]
) -> None:
    for machine in (cpu, four_gpus):
        plan = plan_for(pipeline, machine, {name: StageConfig(replicas=0) for name in away})
        assert [stage.name for stage in plan.stages if not stage.replicas] == list(away)
        assert plan.frontend().name == "thinker"


def test_unknown_members(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu)
    for ask in (plan.stage, plan.edges_to):
        with pytest.raises(UnknownMember, match=r"^no stage 'dit'; the plan has thinker, talker, code2wav$"):
            ask("dit")
    with pytest.raises(UnknownMember, match=r"^no replica 'talker/1'; the plan has talker/0$"):
        plan.replica(ReplicaId("talker", 1))


def test_stock_flags_are_for_the_frontend(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    plan = plan_for(pipeline, four_gpus, text_args={"model": "m", "max_model_len": 100, "seed": 3, "dtype": "half"})
    assert plan.stage("thinker").engine_args == {
        "worker_cls": "pkg.W",
        "max_model_len": 100,
        "seed": 3,
        "dtype": "half",
    }
    assert plan.stage("talker").engine_args == {
        "worker_cls": STAGE_WORKER,
        "max_num_seqs": 7,
        "seed": 3,
        "dtype": "half",
        "enable_prefix_caching": False,
    }


def test_shared_fields_reach_every_stage(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    given = dict.fromkeys(SHARED_FIELDS, "value")
    plan = plan_for(pipeline, four_gpus, text_args=given)
    assert all(given.items() <= stage.engine_args.items() for stage in plan.stages)


def test_overrides_precede_flags_the_file_the_pipeline_and_the_platform(pipeline: PipelineSpec, cpu: Machine) -> None:
    def seqs(stage: str, config: StageConfig, flags: dict[str, Any]) -> Any:
        return plan_for(pipeline, cpu, {stage: config}, flags).stage(stage).engine_args["max_num_seqs"]

    file, over = {"max_num_seqs": 2}, {"max_num_seqs": 4}
    assert seqs("thinker", StageConfig(), {}) == 16
    assert seqs("talker", StageConfig(), {}) == 7
    assert seqs("talker", StageConfig(engine=file), {"max_num_seqs": 3}) == 2
    assert seqs("thinker", StageConfig(engine=file), {}) == 2
    assert seqs("thinker", StageConfig(engine=file), {"max_num_seqs": 3}) == 3
    assert seqs("thinker", StageConfig(engine=file, engine_overrides=over), {"max_num_seqs": 3}) == 4


def test_a_shared_flag_has_precedence_over_the_file_and_not_over_an_override(
    pipeline: PipelineSpec, cpu: Machine
) -> None:
    stages = {
        "talker": StageConfig(engine={"dtype": "float16"}),
        "code2wav": StageConfig(engine_overrides={"dtype": "float16"}),
    }
    plan = plan_for(pipeline, cpu, stages, {"dtype": "bfloat16"})
    assert [stage.engine_args["dtype"] for stage in plan.stages] == ["bfloat16", "bfloat16", "float16"]


def test_default_parameters_and_kv_cache_bytes(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    talker = StageConfig(params={"temperature": 0.0}, kv_cache_bytes=5)
    stage = plan_for(pipeline, four_gpus, {"talker": talker}).stage("talker")
    assert stage.params == {"temperature": 0.0, "max_tokens": 4096}
    assert stage.engine_args["kv_cache_memory_bytes"] == 5


def test_cuda_devices_and_shares(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    stages = {"thinker": StageConfig(devices="0,1"), "talker": StageConfig(replicas=2)}
    plan = plan_for(pipeline, four_gpus, stages, {"tensor_parallel_size": 2})
    assert [replica.devices for replica in plan.replicas()] == [(0, 1), (2,), (3,), (2,)]
    assert "gpu_memory_utilization" not in plan.stage("thinker").engine_args
    assert plan.stage("talker").engine_args["gpu_memory_utilization"] == 0.6
    assert plan.stage("code2wav").engine_args["gpu_memory_utilization"] == 0.3
    assert [stage.env for stage in plan.stages] == [{}, {}, {}]


def test_devices_are_placed_for_the_overridden_tensor_parallel_size(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    engine = {"engine": {"tensor_parallel_size": 4}, "engine_overrides": {"tensor_parallel_size": 2}}
    plan = plan_for(pipeline, four_gpus, {"talker": StageConfig(replicas=2, devices="0,1", **engine)})
    assert [replica.devices for replica in plan.stage("talker").replicas] == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match=r"^stages\.talker\.devices: 2 replicas x tensor_parallel_size 2 = 4 devices"):
        plan_for(pipeline, four_gpus, {"talker": StageConfig(replicas=2, devices="0", **engine)})


def test_the_users_utilization_stays(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    stages = {name: StageConfig(devices="0") for name in ("thinker", "talker", "code2wav")}
    plan = plan_for(pipeline, four_gpus, stages, {"gpu_memory_utilization": 0.3})
    values = [stage.engine_args["gpu_memory_utilization"] for stage in plan.stages]
    assert values == [0.3, 0.4, 0.2]


def test_one_step_stage_holds_its_longest_sequence(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    facts = {"thinker": StageFacts(max_model_len=10), "code2wav": StageFacts(max_model_len=65536)}
    args = plan_for(pipeline, four_gpus, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (65536, 65536)
    stages = {"code2wav": StageConfig(engine={"max_model_len": 100})}
    args = plan_for(pipeline, four_gpus, stages, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (100, 100)
    stages = {"code2wav": StageConfig(engine={"max_num_batched_tokens": 200_000})}
    args = plan_for(pipeline, four_gpus, stages, facts=facts).stage("code2wav").engine_args
    assert (args["max_model_len"], args["max_num_batched_tokens"]) == (65536, 200_000)
    assert "max_model_len" not in plan_for(pipeline, four_gpus, facts=facts).stage("thinker").engine_args
    assert "max_model_len" not in plan_for(pipeline, four_gpus).stage("code2wav").engine_args


REFUSALS: list[tuple[dict[str, StageConfig], dict[str, Any], str]] = [
    ({"dit": StageConfig()}, {}, "stages.dit: pipeline 'speech' has no such stage; use one of thinker, talker, code2w"),
    (
        {"code2wav": StageConfig(engine_overrides={"runner": "generate"})},
        {},
        "stages.code2wav.engine.runner: the pipeline sets it to 'pooling' for 'code2wav'; remove it",
    ),
    ({}, {"worker_cls": "mine"}, "worker_cls: the pipeline sets it to 'pkg.W' for 'thinker'; remove it"),
    ({}, {"data_parallel_size": 2}, "data_parallel_size: write stages.thinker.replicas instead"),
    (
        {"talker": StageConfig(engine={"data_parallel_size": 2})},
        {},
        "stages.talker.engine.data_parallel_size: write stages.talker.replicas instead",
    ),
    (
        {"talker": StageConfig(engine={"device_ids": [1]})},
        {},
        "stages.talker.engine.device_ids: write stages.talker.de",
    ),
    ({"talker": StageConfig(engine={"model": "x"})}, {}, "stages.talker.engine.model: the model is given once, on the"),
    ({"talker": StageConfig(engine={"nnodes": 2})}, {}, "stages.talker.engine.nnodes: a replica runs on one host"),
    (
        {"talker": StageConfig(engine={"prefill_context_parallel_size": 2})},
        {},
        "stages.talker.engine.prefill_context_parallel_size: write tensor_parallel_size instead",
    ),
    (
        {"talker": StageConfig(engine={"aggregate_engine_logging": True})},
        {},
        "stages.talker.engine.aggregate_engine_logging: each replica has a line of its own in the log; remove it",
    ),
    ({"talker": StageConfig(replicas=1025)}, {}, "stages.talker.replicas: must be <= 1024, got 1025"),
    (
        {"thinker": StageConfig(replicas=2)},
        {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)},
        "stages.thinker.engine.kv_events_config: 2 replicas of this host would publish at tcp://*:5557, and only one",
    ),
    (
        {"talker": StageConfig(engine={"kv_events_config": {"enable_kv_cache_events": True}})},
        {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)},
        "stages.talker.engine.kv_events_config: 2 replicas of this host would publish at tcp://*:5557, and only one",
    ),
    (
        {"talker": StageConfig(engine={"tensor_parallel_size": 0})},
        {},
        "stages.talker.engine.tensor_parallel_size: must be an integer >= 1, got 0",
    ),
    (
        {"talker": StageConfig(kv_cache_bytes=1, engine={"kv_cache_memory_bytes": 2})},
        {},
        "stages.talker.engine.kv_cache_memory_bytes: stages.talker.kv_cache_bytes says the same; keep one of the two",
    ),
]


@pytest.mark.parametrize(("stages", "text_args", "message"), REFUSALS)
def test_forbidden_engine_arguments_are_refused(
    pipeline: PipelineSpec, four_gpus: Machine, stages: Any, text_args: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(pipeline, four_gpus, stages, text_args)
    assert str(caught.value).startswith(message)


def test_one_replica_at_each_address_may_publish_kv_cache_events(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5558"}
    stages = {"talker": StageConfig(engine={"kv_events_config": events}), "code2wav": StageConfig(replicas=2)}
    flags = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)}
    assert plan_for(pipeline, four_gpus, stages, flags)
    silent = {"thinker": StageConfig(replicas=2)}
    for config in (KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True, publisher="null")):
        assert plan_for(pipeline, four_gpus, silent, {"kv_events_config": config})


def test_null_leaves_an_engine_argument_to_the_plan(pipeline: PipelineSpec, cpu: Machine) -> None:
    null = {"max_num_seqs": None, "kv_cache_memory_bytes": None}
    stages = {"talker": StageConfig(engine={"max_num_seqs": 3}, engine_overrides=null)}
    args = plan_for(pipeline, cpu, stages).stage("talker").engine_args
    assert (args["max_num_seqs"], args["kv_cache_memory_bytes"]) == (7, 128 << 20)


def test_with_batches_every_stage_schedules_by_priority(pipeline: PipelineSpec, cpu: Machine) -> None:
    def policies(**config: Any) -> list[Any]:
        return [stage.engine_args.get("scheduling_policy") for stage in plan_for(pipeline, cpu, **config).stages]

    assert policies() == [None] * 3 and policies(batch_dir="made") == ["priority"] * 3
    assert policies(text_args={"scheduling_policy": "priority"}) == ["priority"] * 3
    path = "stages.talker.engine.scheduling_policy"
    with pytest.raises(ConfigError, match=f"{path}: must be priority with batch_dir, got 'fcfs'"):
        policies(batch_dir="made", stages={"talker": StageConfig(engine={"scheduling_policy": "fcfs"})})


def test_a_value_equal_to_that_of_the_pipeline_is_accepted(pipeline: PipelineSpec, four_gpus: Machine) -> None:
    text_args = {"data_parallel_size": 1, "worker_cls": "pkg.W", "nnodes": 1}
    assert plan_for(pipeline, four_gpus, text_args=text_args).stage("thinker").engine_args["worker_cls"] == "pkg.W"


def test_a_config_for_another_pipeline_is_refused(pipeline: PipelineSpec, cpu: Machine) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline: the stage config is for 'other', but the model is 'speech'$"):
        make_plan(model="m", pipeline=pipeline, config=OmniConfig(pipeline="other"), text_args={}, machine=cpu)


@pytest.mark.parametrize(
    ("config", "chunks"),
    [
        ({}, {"words": (1, 5), "adaptive": True}),
        ({"chunks": {"words": (3,), "adaptive": False}}, {"words": (3,), "adaptive": False}),
        ({"async_chunk": False}, {"words": "all", "adaptive": True}),
        ({"async_chunk": False, "chunks": {"words": (3,)}}, {"words": "all", "adaptive": True}),
    ],
    ids=str,
)
def test_chunk_sizes_of_the_edges(
    pipeline: PipelineSpec, cpu: Machine, config: dict[str, Any], chunks: dict[str, Any]
) -> None:
    plan = make_plan(model="m", pipeline=pipeline, config=OmniConfig(**config), text_args={}, machine=cpu)
    assert plan.chunks == chunks


def test_chunks_of_an_unknown_edge_are_refused(pipeline: PipelineSpec, cpu: Machine) -> None:
    with pytest.raises(ConfigError, match=r"^chunks.word: unknown key; did you mean 'words'\?$"):
        plan_for(pipeline, cpu, chunks={"word": (3,)})


def test_a_stage_of_parts_gets_the_idle_timeout_of_streams(pipeline: PipelineSpec, cpu: Machine) -> None:
    config = OmniConfig(
        timeouts=Timeouts(chunk_timeout_s=20.0),
        stages={"code2wav": StageConfig(engine={"additional_config": {"x": 1}})},
    )
    plan = make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=cpu)
    assert plan.stage("code2wav").engine_args["additional_config"] == {"stream_idle_timeout_s": 80.0, "x": 1}
    assert "additional_config" not in plan.stage("thinker").engine_args


def test_more_required_replicas_than_can_be_up_are_refused(pipeline: PipelineSpec, cpu: Machine) -> None:
    message = (
        "min_replicas: 3 can never be up, because 2 are started here and none can join; set cluster.master_address"
    )
    two = {"talker": StageConfig(replicas=2, min_replicas=3)}
    with pytest.raises(ConfigError, match=rf"^stages\.talker\.{message}"):
        plan_for(pipeline, cpu, two)
    assert (
        plan_for(pipeline, cpu, two, cluster=Cluster(master_address="10.0.0.1")).config.stage("talker").min_replicas
        == 3
    )
    assert plan_for(pipeline, cpu, {"talker": StageConfig(replicas=3, min_replicas=3)})


HEAD = {"cluster": Cluster(master_address="10.0.0.1", master_port=9100)}


@pytest.fixture
def named(pipeline: PipelineSpec) -> PipelineSpec:
    edges = (pipeline.edges[0], EdgeSpec("thinker", "talker", "tensors", name="hidden_states"), pipeline.edges[2])
    return replace(pipeline, edges=edges)


@pytest.mark.parametrize(("config", "name"), [({}, "shared_memory"), (HEAD, "tcp")])
def test_both_ends_of_an_edge_get_its_connector(named: PipelineSpec, cpu: Machine, config: Any, name: str) -> None:
    plan = plan_for(named, cpu, **config)
    edge = {"hidden_states": {"name": name, **DEFAULTS}}
    assert plan.connectors == edge
    assert plan.stage("thinker").engine_args["additional_config"] == {"outgoing": edge}
    assert plan.stage("talker").engine_args["additional_config"] == {"incoming": edge}
    assert set(plan.stage("code2wav").engine_args["additional_config"]) == {"stream_idle_timeout_s"}
    assert f"  thinker -> talker  tensors, hidden_states over {name}\n" in explain(plan)
    assert as_json(plan)["connectors"] == edge


def test_additional_config_of_the_user_stays(named: PipelineSpec, cpu: Machine) -> None:
    stages = {"talker": StageConfig(engine={"additional_config": {"x": 1}})}
    found = plan_for(named, cpu, stages=stages).stage("talker").engine_args["additional_config"]
    assert set(found) == {"x", "incoming"}


def test_an_edge_without_a_name_has_no_connector(pipeline: PipelineSpec, cpu: Machine) -> None:
    plan = plan_for(pipeline, cpu)
    assert plan.connectors == {} and "additional_config" not in plan.stage("thinker").engine_args


@pytest.mark.parametrize(
    ("connectors", "message"),
    [
        ({"hidden_state": {}}, "connectors.hidden_state: unknown key; did you mean 'hidden_states'?"),
        ({"words": {}}, "connectors.words: unknown key; use one of hidden_states"),
        ({"hidden_states": {"name": "tpc"}}, "connectors.hidden_states.name: no connector 'tpc'; did you mean 'tcp'?"),
    ],
    ids=str,
)
def test_wrong_connectors_are_refused(named: PipelineSpec, cpu: Machine, connectors: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_for(named, cpu, connectors=connectors)
    assert str(caught.value) == message


def test_hosts_agree_on_the_connector_but_not_on_its_address(named: PipelineSpec, cpu: Machine) -> None:
    def hash_of(**fields: Any) -> str:
        return config_hash(plan_for(named, cpu, **HEAD, connectors={"hidden_states": fields}), "talker")

    assert hash_of(host="10.0.0.1", port=7000, device="eth0") == hash_of(host="10.0.0.2") == hash_of()
    assert hash_of(name="mooncake") != hash_of()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"custom_ops": ["+rope"]}),
        ({}, {"custom_ops": ["+rope"]}),
        (3, {"mode": 3, "custom_ops": ["+rope"]}),
        ({"mode": 3, "custom_ops": ["none", "+norm"]}, {"mode": 3, "custom_ops": ["none", "+norm", "+rope"]}),
        ({"custom_ops": ["all", "-rope"]}, {"custom_ops": ["all", "-rope"]}),
        ({"custom_ops": ["+rope"]}, {"custom_ops": ["+rope"]}),
    ],
    ids=str,
)
def test_custom_ops_of_a_stage_are_added_to_those_of_the_user(given: Any, expected: dict[str, Any]) -> None:
    args = {"seed": 1} if given is None else {"seed": 1, COMPILATION: given}
    assert with_custom_ops(args, ("rope",)) == {"seed": 1, COMPILATION: expected}


def test_a_compilation_config_object_is_copied() -> None:
    """As `--compilation-config` of vLLM's command line makes it."""
    given = SimpleNamespace(mode=3, custom_ops=["none"])
    made = with_custom_ops({COMPILATION: given}, ("rope",))[COMPILATION]
    assert (made.mode, made.custom_ops) == (3, ["none", "+rope"]) and given.custom_ops == ["none"]
    assert with_custom_ops({"seed": 1}, ()) == {"seed": 1}


HERE = Machine(platform="cuda", device_count=1, cpu_count=3, memory_bytes=5, device_bytes=(7,))


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cuda:80GiBx2", (80 << 30,) * 2),
        ("cuda:81559MiB", (81559 << 20,)),
        ("cuda:22.5GiBx1", (45 << 29,)),
        ("cpu", ()),
    ],
)
def test_a_machine_is_read_from_text(text: str, devices: tuple[int, ...]) -> None:
    found = parse_machine(text, HERE)
    assert (found.device_bytes, found.device_count) == (devices, len(devices))
    assert found.platform == ("cuda" if devices else "cpu")
    assert (found.cpu_count, found.memory_bytes) == (3, 5)


WIDE = [f"cuda:{'9' * 400}GiB", f"cuda:80GiBx{'9' * 12}"]


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:80", "cuda:80GB", "cuda:80GiBx0", "cuda:0GiB", "cuda:80GiB x2", "h100", *WIDE]
)
def test_wrong_machines_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_machine(text, HERE)
    assert str(refused.value).startswith(f"--machine {text}: write cuda:SIZExCOUNT, e.g. cuda:80GiBx2 ")


def test_threads_of_a_cpu_machine_are_refused_with_devices(
    pipeline: PipelineSpec, cpu: Machine, four_gpus: Machine
) -> None:
    stages = {"talker": StageConfig(cpu_threads=2)}
    with pytest.raises(ConfigError, match=r"^stages\.talker\.cpu_threads: replicas of this machine compute on CUDA "):
        plan_for(pipeline, four_gpus, stages)
    assert plan_for(pipeline, cpu, stages).stage("talker").env["OMP_NUM_THREADS"] == "2"
    plan_for(pipeline, four_gpus, {"talker": StageConfig(cpu_threads=2, replicas=0)})
