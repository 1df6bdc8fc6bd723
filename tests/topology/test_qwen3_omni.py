"""The real pipeline, from its packaged stage configs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3OmniMoeConfig

from vllm_omni_ext.config.load import load_config
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import OmniConfig, PrefillDecode, StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen3_omni.facts import facts
from vllm_omni_ext.model_plugins.qwen3_omni.family import FAMILY, QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import SMALL, model_config
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import small_vocabulary
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan, resolved_params

MACHINES = (
    Machine(platform="cpu", device_count=0, cpu_count=8, memory_bytes=1 << 36),
    Machine(platform="cuda", device_count=4, cpu_count=8, memory_bytes=1 << 36),
)
NAMES = Names(stages=tuple(stage.name for stage in QWEN3_OMNI.stages))


@pytest.mark.parametrize("name", ["qwen3_omni", "qwen3_omni_replicas"])
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_packaged_configs_fit_any_machine(name: str, devices: int) -> None:
    machine = Machine(platform="cuda", device_count=devices, cpu_count=8, memory_bytes=1 << 36)
    plan = make_plan(
        model="m",
        pipeline=QWEN3_OMNI,
        config=load_config(name, NAMES, FAMILY.stage_configs),
        text_args={},
        machine=machine,
    )
    used = [device for replica in plan.replicas() for device in replica.devices]
    assert len(set(used)) == min(devices, len(used))
    assert list(plan.connectors) == ["hidden_states"] and QWEN3_OMNI.chunks().keys() == {"text", "frames"}


@pytest.mark.parametrize(("written", "talkers"), [("2,1", [(2,), (1,)]), ("1", [(1,), (2,)]), ("1,1", [(1,), (1,)])])
def test_commented_devices_of_the_packaged_file_can_be_used(
    tmp_path: Path, written: str, talkers: list[tuple[int, ...]]
) -> None:
    """Each commented line of the file works without its `#`."""
    text = resources.files(FAMILY.stage_configs).joinpath("qwen3_omni_replicas.yaml").read_text("utf-8")
    line = f'# devices: "{written}"'
    assert text.count(line) == 1
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(line, line.removeprefix("# ")), encoding="utf-8")
    machine = Machine(platform="cuda", device_count=3, cpu_count=8, memory_bytes=1 << 36)
    plan = make_plan(model="m", pipeline=QWEN3_OMNI, config=load_config(file, NAMES), text_args={}, machine=machine)
    assert [replica.devices for replica in plan.stage("talker").replicas] == talkers
    assert [len(stage.replicas) for stage in plan.stages] == [1, 2, 2]


def planned(machine: Machine, config: OmniConfig | None = None, **text_args: Any) -> Plan:
    return make_plan(
        model="m", pipeline=QWEN3_OMNI, config=config or OmniConfig(), text_args=text_args, machine=machine
    )


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.platform)
@pytest.mark.parametrize("asked", [None, "bfloat16", "auto"])
def test_the_vocoder_is_float32_unless_its_own_dtype_is_set(machine: Machine, asked: str | None) -> None:
    plan = planned(machine, **({} if asked is None else {"dtype": asked}))
    assert plan.stage("code2wav").engine_args["dtype"] == "float32"
    if asked is not None:
        assert [plan.stage(name).engine_args["dtype"] for name in ("thinker", "talker")] == [asked, asked]
    for layer in ("engine", "engine_overrides"):
        config = OmniConfig(stages={"code2wav": StageConfig(**{layer: {"dtype": "bfloat16"}})})
        assert planned(machine, config).stage("code2wav").engine_args["dtype"] == "bfloat16"


@pytest.mark.parametrize(("stage", "where"), [("thinker", ""), ("talker", "stages.talker.engine.")])
def test_layers_of_a_stage_are_not_spread_over_ranks(stage: str, where: str) -> None:
    """The hidden states that the talker reads leave from one rank, with any layers."""
    two = {"pipeline_parallel_size": 2}
    config = OmniConfig(stages={stage: StageConfig(engine=two)} if where else {})
    with pytest.raises(ConfigError) as caught:
        planned(MACHINES[1], config, **({} if where else two))
    assert str(caught.value) == (
        f"{where}pipeline_parallel_size: the pipeline sets it to 1 for '{stage}'; write tensor_parallel_size instead"
    )


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.platform)
def test_rotary_embeddings_are_never_compiled_into_other_kernels(machine: Machine) -> None:
    """For the thinker, whole or split; operators that the user names stay."""
    split = OmniConfig(stages={"thinker": StageConfig(prefill_decode=PrefillDecode())})
    for config, sides in ((OmniConfig(), ["thinker"]), (split, ["thinker.prefill", "thinker.decode"])):
        plan = planned(machine, config, compilation_config={"custom_ops": ["+rms_norm"]})
        for side in sides:
            said = plan.stage(side).engine_args["compilation_config"]
            assert said == {"custom_ops": ["+rms_norm", "+rotary_embedding"]}


def test_facts_are_read_from_the_config() -> None:
    params = resolved_params(QWEN3_OMNI, load_config("qwen3_omni", NAMES, FAMILY.stage_configs))
    config = Qwen3OmniMoeConfig(**model_config(SMALL, small_vocabulary()))
    found = facts(config, params, {})
    groups = config.talker_config.num_code_groups
    assert found["code2wav"].max_model_len == 4096 * groups
    for stage, text in (("thinker", config.thinker_config.text_config), ("talker", config.talker_config.text_config)):
        assert found[stage].max_model_len == text.max_position_embeddings
        caches = found[stage].kv_layers, found[stage].kv_heads, found[stage].kv_head_dim
        assert caches == (text.num_hidden_layers, text.num_key_value_heads, text.head_dim)
    config.enable_audio_output = False
    with pytest.raises(ConfigError, match=r"^model: this checkpoint has no sound output .* leave --omni out$"):
        facts(config, params, {})
