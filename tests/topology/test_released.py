"""The released models on machines of all sizes: plans fit, and a refusal names a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_page import CARDS, CONFIGS, MIB, machine, released
from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.topology.disaggregation import expand
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.memory import GIB, DoesNotFit, Sheet
from vllm_omni_ext.topology.plan import Plan, StagePlan
from vllm_omni_ext.topology.planner import make_plan
from vllm_omni_ext.topology.remedies import MEDIA_FLAG

H100, H200 = CARDS["80 GB (H100)"], CARDS["141 GB (H200)"]


def plan_for(config: str, where: Machine, flags: dict[str, Any] | None = None, **stages: StageConfig) -> Plan:
    settings, known = released(config)
    if stages:
        settings = OmniConfig(stages={**settings.stages, **stages})
    return make_plan(
        model="m",
        pipeline=CONFIGS[config].pipeline,
        config=settings,
        text_args=flags or {},
        machine=where,
        facts=known,
    )


def check_sheet(sheet: Sheet, stages: dict[str, StagePlan], alone: bool) -> None:
    """vLLM claims the memory of the sheet, and all claims together fit."""
    assert sheet.free >= 0
    visible = sheet.visible
    claimed = 0
    for share in sheet.shares:
        args = stages[share.replica.split("/")[0]].engine_args
        utilization = args.get("gpu_memory_utilization")
        assert alone or utilization is not None
        claim = 0.92 * visible if utilization is None else utilization * visible
        assert claim >= share.need.fixed + share.kv_bytes - 1
        assert share.kv_bytes >= share.need.least_kv
        assert share.kv_tokens >= share.need.sequence_tokens or not share.need.kv_token
        claimed += int(claim) + share.need.context
        if share.need.encodes:  # vLLM would give the room for a long video to the KV cache
            assert share.need.least_kv <= args["kv_cache_memory_bytes"] <= share.kv_bytes
    assert claimed <= visible


def check(plan: Plan) -> None:
    stages = {stage.name: stage for stage in plan.stages}
    assert len(plan.sheets) == plan.machine.device_count
    for sheet in plan.sheets:
        check_sheet(sheet, stages, alone=len(sheet.shares) == 1)
    placed = {(str(replica.id), device) for replica in plan.replicas() for device in replica.devices}
    assert {(share.replica, sheet.device) for sheet in plan.sheets for share in sheet.shares} == placed


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", CARDS.values(), ids=list(CARDS))
@pytest.mark.parametrize("flags", [{}, {"quantization": "fp8"}], ids=["bf16", "fp8"])
def test_a_plan_fits_or_is_refused_with_a_remedy(config: str, count: int, size: int, flags: dict[str, Any]) -> None:
    if flags and config == "bagel_single":
        with pytest.raises(ConfigError, match=r"^quantization: the pipeline sets it to None for 'dit'"):
            plan_for(config, machine(size, count), flags)
        return
    try:
        check(plan_for(config, machine(size, count), flags))
    except DoesNotFit as err:
        assert str(err).startswith("memory: device ")
        assert "it fits with " in str(err) or (config.startswith("bagel") and "use larger ones" in str(err))
        short = [sheet for sheet in err.sheets if sheet.free < 0]
        assert short, "a device that is too small"
        assert all(f"{share.replica} " in str(err) for share in short[0].shares)


def test_one_h100_is_refused_with_a_flag_that_makes_it_fit() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan_for("qwen3_omni", machine(H100, 1))
    assert str(refused.value).endswith(
        "; it fits with --quantization fp8, or with 2 devices of this size and --omni-max-media-tokens 53248"
    )
    assert "thinker/0 78.9 (weights 59.1, KV cache of 65536 tokens 6.0, " in str(refused.value)
    ways = (({"quantization": "fp8"}, 1), ({MEDIA_FLAG: 53248}, 2), ({"max_model_len": 62464}, 2))
    for flags, count in ways:
        check(plan_for("qwen3_omni", machine(H100, count), flags))
    for flags in ({MEDIA_FLAG: 53248 + 1024}, {"max_model_len": 62464 + 1024}):
        with pytest.raises(DoesNotFit):
            plan_for("qwen3_omni", machine(H100, 2), flags)


@pytest.mark.parametrize(
    ("config", "size", "count", "helps"),
    [
        ("qwen3_omni", 81_559, 2, "it fits with --omni-max-media-tokens 53248, or with --max-model-len 62464, or "),
        ("qwen3_omni", 46_068, 4, "it fits with --tensor-parallel-size 4"),
        (
            "qwen3_omni",
            46_068,
            1,
            "it fits with 2 devices of this size and --tensor-parallel-size 2 --quantization fp8",
        ),
        ("qwen3_omni_pd", 81_559, 2, "it fits with --quantization fp8, or with "),
        ("qwen3_omni", 8_192, 1, "nothing is known to help with up to 8 devices of this size; use larger ones"),
    ],
)
def test_the_remedy_depends_on_the_machine(config: str, size: int, count: int, helps: str) -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan_for(config, machine(size * MIB, count))
    assert helps in str(refused.value)


def test_decode_shares_a_device_with_talker_and_code2wav_in_fp8_only() -> None:
    """The documented layout on two devices."""
    settings, _ = released("qwen3_omni_pd")
    split = settings.stages["thinker"].prefill_decode
    assert split is not None
    stages = {
        "thinker.prefill": StageConfig(devices="0", prefill_decode=split),
        "thinker.decode": StageConfig(devices="1", prefill_decode=split),
        "talker": StageConfig(devices="1"),
        "code2wav": StageConfig(devices="1"),
    }
    known = released("qwen3_omni_pd")[1]
    pipeline, expanded = expand(QWEN3_OMNI, settings)
    config = OmniConfig(stages={**expanded.stages, **stages})
    common: dict[str, Any] = {"model": "m", "pipeline": pipeline, "config": config, "facts": known}
    with pytest.raises(DoesNotFit, match=r"^memory: device 1 .*it fits with --quantization fp8"):
        make_plan(**common, text_args={}, machine=machine(H100, 2))
    check(make_plan(**common, text_args={"quantization": "fp8"}, machine=machine(H100, 2)))


def test_a_pipeline_that_is_split_already_has_the_same_remedies() -> None:
    """The command line splits the pipeline before it makes the plan."""
    settings, known = released("qwen3_omni_pd")
    messages = []
    for pipeline, config in ((QWEN3_OMNI, settings), expand(QWEN3_OMNI, settings)):
        with pytest.raises(DoesNotFit) as refused:
            make_plan(model="m", pipeline=pipeline, config=config, text_args={}, machine=machine(H100, 2), facts=known)
        messages.append(str(refused.value))
    assert messages[0] == messages[1] and "--max-model-len 24576" in messages[0]


def test_headless_replicas_are_planned_too() -> None:
    away = {name: StageConfig(replicas=0) for name in ("thinker", "code2wav")}
    check(plan_for("qwen3_omni", machine(24_564 * MIB, 1), talker=StageConfig(replicas=1), **away))
    with pytest.raises(DoesNotFit, match="talker/1"):
        plan_for("qwen3_omni", machine(12_288 * MIB, 1), talker=StageConfig(replicas=2, devices="0,0"), **away)


def test_shares_and_caches_of_the_user_are_kept() -> None:
    sizes = {"thinker": 0.82, "talker": 0.11, "code2wav": 0.03}
    caches = {"thinker": 2 * GIB, "talker": GIB}
    stages = {
        name: StageConfig(
            kv_cache_bytes=caches.get(name), engine={"gpu_memory_utilization": part, "max_model_len": 2048}
        )
        for name, part in sizes.items()
    }
    plan = plan_for("qwen3_omni", machine(H100, 1), **stages)
    assert {stage.name: stage.engine_args["gpu_memory_utilization"] for stage in plan.stages} == sizes
    assert {share.replica: share.kv_bytes for share in plan.sheets[0].shares} == {
        "thinker/0": 2 * GIB,
        "talker/0": GIB,
        "code2wav/0": 0,
    }


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            StageConfig(engine={"gpu_memory_utilization": 0.6}),
            "stages.thinker.engine.gpu_memory_utilization: 0.6 of device 0 is 47.3 GiB, but weights (59.1) and KV "
            "cache (6.0 for 65536 tokens) are 65.1 GiB; write 1",
        ),
        (
            StageConfig(kv_cache_bytes=2 * GIB),
            "stages.thinker.kv_cache_bytes: 2147483648 hold 21824 tokens of 98304 bytes, but a sequence may have "
            "65536; write at least 6444023808, or engine.max_model_len: 21824",
        ),
    ],
)
def test_shares_that_hold_no_sequence_are_refused(stage: StageConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_for("qwen3_omni", machine(H100, 2), thinker=stage)
    assert str(refused.value) == message
    assert not isinstance(refused.value, DoesNotFit)


def test_remedies_of_refused_shares_are_accepted() -> None:
    for stage in (
        StageConfig(engine={"gpu_memory_utilization": 1}),
        StageConfig(kv_cache_bytes=2 * GIB, engine={"max_model_len": 21824}),
    ):
        plan_for("qwen3_omni", machine(H100, 2), thinker=stage)
    plan_for("qwen3_omni", machine(H200, 2), thinker=StageConfig(kv_cache_bytes=6444023808))


def test_shares_of_the_user_beyond_a_device_are_refused() -> None:
    stages = {name: StageConfig(engine={"gpu_memory_utilization": 0.4}) for name in ("thinker", "talker", "code2wav")}
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: the replicas on device 0 have .* = 1\.2, "):
        plan_for("qwen3_omni", machine(200 * GIB, 1), **stages)


def test_devices_of_different_size_are_planned_or_refused() -> None:
    mixed = Machine(
        platform="cuda", device_count=2, cpu_count=8, memory_bytes=1 << 36, device_bytes=(141 * GIB, 24 * GIB)
    )
    plan = plan_for("qwen3_omni", mixed)
    assert [replica.devices for replica in plan.replicas()] == [(0,), (1,), (1,)]
    check(plan)
    talkers = StageConfig(replicas=2, devices="0,1")
    with pytest.raises(ConfigError, match=r"^stages\.talker\.devices: devices 0, 1 differ in memory"):
        plan_for("qwen3_omni", mixed, talker=talkers)


def test_the_defaults_of_sequences_on_cuda() -> None:
    stages = {stage.name: stage.engine_args for stage in plan_for("qwen3_omni", machine(H200, 2)).stages}
    assert {name: args["max_num_seqs"] for name, args in stages.items()} == {
        "thinker": 128,
        "talker": 64,
        "code2wav": 64,
    }
    flags = {"max_num_seqs": 7, "max_num_batched_tokens": 4096}
    thinker = plan_for("qwen3_omni", machine(H200, 2), flags).stage("thinker").engine_args
    assert {name: thinker[name] for name in flags} == flags


sizes = st.integers(20 * GIB, 200 * GIB)


@given(
    config=st.sampled_from(("qwen3_omni", "qwen3_omni_pd", "qwen3_omni_replicas")),
    size=sizes,
    count=st.integers(1, 8),
    quantization=st.sampled_from([None, "fp8"]),
    parallel=st.sampled_from([1, 2, 4]),
    length=st.integers(256, 65536),
    sequences=st.integers(1, 1024),
    talkers=st.integers(1, 3),
    cache=st.none() | st.integers(GIB, 40 * GIB),
)
def test_no_plan_hands_out_more_than_a_device_has(
    config: str,
    size: int,
    count: int,
    quantization: str | None,
    parallel: int,
    length: int,
    sequences: int,
    talkers: int,
    cache: int | None,
) -> None:
    flags = {
        "quantization": quantization,
        "tensor_parallel_size": parallel,
        "max_model_len": length,
        "max_num_seqs": sequences,
    }
    talker = StageConfig(replicas=talkers, kv_cache_bytes=cache)
    try:
        plan = plan_for(config, machine(size, count), flags, talker=talker)
    except ConfigError:
        return
    check(plan)
