"""Replicas on different hosts must agree on the settings of their stage and on the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.config.schema import OmniConfig, StageConfig
from vllm_omni_ext.errors import ConfigError, UnknownMember
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.spec import EdgeSpec
from vllm_omni_ext.topology.agreement import LOCAL_FIELDS, config_hash, model_identity, models_of
from vllm_omni_ext.topology.machine import Machine
from vllm_omni_ext.topology.plan import Plan, ReplicaPlan, StagePlan

ARGS: dict[str, Any] = {"dtype": "float32", "seed": 1, "hf_overrides": {"a": [1, {"b": 2.5}], "c": None}}


def plan_with(args: dict[str, Any], **changes: Any) -> Plan:
    stage = StagePlan(
        name="talker",
        engine_args=args,
        env={},
        replicas=(ReplicaPlan(id=ReplicaId("talker", 0), devices=(0,)),),
        params={},
    )
    plan = Plan(
        model="m",
        family="speech",
        pipeline="speech",
        frontend_stage="thinker",
        machine=Machine(platform="cpu", device_count=0, cpu_count=1, memory_bytes=1),
        stages=(stage, replace(stage, name="code2wav")),
        edges=(EdgeSpec("talker", "code2wav", "tokens"), EdgeSpec("thinker", "talker", "tensors")),
        api_servers=1,
        config=OmniConfig(),
    )
    return replace(plan, **changes)


def with_stage(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))


def hash_of(args: dict[str, Any]) -> str:
    return config_hash(plan_with(args), "talker")


def test_the_hash_is_the_one_of_earlier_versions() -> None:
    """A hash that changes without need keeps replicas of the same version from joining."""
    assert hash_of(ARGS) == "9ee97daea7b5a87b"


def test_local_fields_exist_and_may_differ() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {field.name for field in fields(AsyncEngineArgs)} >= LOCAL_FIELDS
    assert hash_of({**ARGS, **dict.fromkeys(LOCAL_FIELDS, "x")}) == hash_of(ARGS)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, model="elsewhere"),
        lambda plan: replace(plan, api_servers=4),
        lambda plan: replace(plan, machine=Machine(platform="cuda", device_count=8, cpu_count=2, memory_bytes=3)),
        lambda plan: replace(plan, config=OmniConfig(verbose=True, stages={"talker": StageConfig(replicas=3)})),
        lambda plan: replace(plan, edges=plan.edges[::-1]),
        lambda plan: with_stage(plan, params={"temperature": 0.1}),
        lambda plan: with_stage(plan, env={"OMP_NUM_THREADS": "3"}),
        lambda plan: with_stage(plan, replicas=()),
        lambda plan: replace(plan, stages=(plan.stages[0],)),
    ],
)
def test_settings_of_the_host_and_of_the_head_may_differ(change: Callable[[Plan], Plan]) -> None:
    plan = plan_with(ARGS)
    assert config_hash(change(plan), "talker") == config_hash(plan, "talker")


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, pipeline="other"),
        lambda plan: replace(plan, edges=plan.edges[:1]),
        lambda plan: replace(plan, edges=(EdgeSpec("talker", "code2wav", "tensors"), plan.edges[1])),
        lambda plan: with_stage(plan, engine_args={**ARGS, "seed": "1"}),
    ],
)
def test_pipeline_edges_and_engine_settings_must_agree(change: Callable[[Plan], Plan]) -> None:
    plan = plan_with(ARGS)
    assert config_hash(change(plan), "talker") != config_hash(plan, "talker") != config_hash(plan, "code2wav")
    with pytest.raises(UnknownMember):
        config_hash(plan, "dit")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
ENGINE = st.dictionaries(st.text(max_size=6).filter(lambda name: name not in LOCAL_FIELDS), VALUES, max_size=5)


def shuffled(value: Any, tuples: bool) -> Any:
    """The same value with every mapping the other way round, and lists as tuples if `tuples`."""
    if isinstance(value, dict):
        return {key: shuffled(item, tuples) for key, item in reversed(value.items())}
    if isinstance(value, list):
        items = [shuffled(item, tuples) for item in value]
        return tuple(items) if tuples else items
    return value


@given(args=ENGINE, tuples=st.booleans())
def test_order_and_kind_of_container_do_not_matter(args: dict[str, Any], tuples: bool) -> None:
    assert hash_of(args) == hash_of(shuffled(args, tuples))


@given(ENGINE, ENGINE)
def test_only_equal_settings_agree(one: dict[str, Any], other: dict[str, Any]) -> None:
    """JSON distinguishes values that Python takes for equal, such as 1 and True: those may differ."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (hash_of(one) == hash_of(other)) == same


@dataclass
class Settings:
    """As vLLM's config objects."""

    level: int
    modes: frozenset[str]


class Nameless:
    """Its repr has an address in it."""


def test_objects_are_compared_by_their_fields_or_names() -> None:
    one = Settings(1, frozenset({"a", "b", "c"}))
    assert hash_of({"x": one}) == hash_of({"x": Settings(1, frozenset({"c", "b", "a"}))})
    assert hash_of({"x": one}) != hash_of({"x": Settings(2, one.modes)})
    assert hash_of({"x": os.path.join}) == hash_of({"x": os.path.join}) != hash_of({"x": os.path.exists})
    assert hash_of({"x": 1 + 2j}) != hash_of({"x": 1 + 3j})
    with pytest.raises(ConfigError, match=r"^stages\.talker\.engine\.x: a Nameless cannot be compared between hosts"):
        hash_of({"x": Nameless()})


@pytest.mark.engine
def test_processes_make_the_same_hash() -> None:
    """The order of sets and the addresses of objects differ from process to process."""
    code = (
        "from tests.topology.test_agreement import ARGS, Settings, hash_of;"
        "words = frozenset(str(n) for n in range(50));"
        "print(hash_of({**ARGS, 'x': Settings(1, words), 'y': set(words), 'z': Settings}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 16


def write(folder: Path, *, seed: int = 0, config: dict[str, Any] | None = None, size: int = 300_000) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"architectures": ["A"], "text": {"layers": 2}}))
    (folder / "model.safetensors").write_bytes(bytes((at * 7 + seed) % 251 for at in range(size)))
    return str(folder)


def test_the_identity_of_a_model_does_not_depend_on_its_path(tmp_path: Path) -> None:
    here, there = write(tmp_path / "a"), write(tmp_path / "deep" / "b")
    assert model_identity(here) == model_identity(there) == model_identity(here, revision="ignored")
    (Path(there) / "README.md").write_text("words")
    noisy = {"text": {"layers": 2, "_name_or_path": "/x"}, "transformers_version": "5", "architectures": ["A"]}
    (Path(there) / "config.json").write_text(json.dumps(noisy, indent=4))
    assert model_identity(here) == model_identity(there)


def test_a_revision_and_another_config_of_a_stage_are_part_of_its_model(tmp_path: Path) -> None:
    hub = replace(plan_with(ARGS), model="someone/a-model")
    path = write(tmp_path / "model")
    local, other = replace(hub, model=path), write(tmp_path / "other", config={"architectures": ["B"]})
    changed = [({}, hub), ({"revision": "abc"}, hub), ({}, local), ({"hf_config_path": other}, local)]
    models = [models_of(replace(plan, stages=plan_with({**ARGS, **args}).stages))["talker"] for args, plan in changed]
    assert len(set(models)) == 4
    assert models[2] == models_of(replace(local, stages=plan_with({**ARGS, "hf_config_path": path}).stages))["talker"]


def test_models_with_other_weights_or_configs_have_other_identities(tmp_path: Path) -> None:
    known = {
        model_identity(write(tmp_path / "a")),
        model_identity(write(tmp_path / "same_sizes", seed=1)),
        model_identity(write(tmp_path / "longer", size=300_001)),
        model_identity(write(tmp_path / "config", config={"architectures": ["B"]})),
        model_identity(write(tmp_path / "empty", size=0)),
    }
    for number, name in enumerate(("pytorch_model.bin", "b.safetensors")):
        folder = Path(write(tmp_path / f"more{number}"))
        (folder / name).write_bytes(b"x")
        known.add(model_identity(str(folder)))
    renamed = Path(write(tmp_path / "renamed"))
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    known.add(model_identity(str(renamed)))
    assert len(known) == 8


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
def test_first_and_last_byte_count(tmp_path: Path, size: int) -> None:
    folder = Path(write(tmp_path / "a", size=size))
    before, file = model_identity(str(folder)), folder / "model.safetensors"
    for at in {0, size - 1} if size else set():
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)
        assert model_identity(str(folder)) != before
        content[at] ^= 1
        file.write_bytes(content)
    assert model_identity(str(folder)) == before


def test_large_files_are_not_read_whole(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "a"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    assert len(model_identity(str(folder))) == 16


def test_hub_ids_have_their_revision() -> None:
    assert model_identity("Qwen/Qwen3") == model_identity("Qwen/Qwen3", revision="main") == "Qwen/Qwen3@main"
    assert model_identity("Qwen/Qwen3", revision="abc") == "Qwen/Qwen3@abc"
    assert model_identity("Qwen/Qwen3", config_path="mine") == "Qwen/Qwen3@main config mine"


def test_a_config_in_a_directory_counts_by_its_content_and_one_of_the_hub_by_its_id(tmp_path: Path) -> None:
    folder, same = write(tmp_path / "a", config={"x": 1}), write(tmp_path / "b", config={"x": 1})
    before = model_identity("Qwen/Qwen3", config_path=folder)
    assert before == model_identity("Qwen/Qwen3", config_path=same) != model_identity("Qwen/Qwen3")
    assert model_identity(folder, config_path="org/one") != model_identity(folder, config_path="org/two")
    (Path(folder) / "config.json").write_text('{"x": 2}')
    assert model_identity("Qwen/Qwen3", config_path=folder) != before


def test_a_file_and_a_config_in_another_folder_are_read(tmp_path: Path) -> None:
    folder, other = write(tmp_path / "a"), write(tmp_path / "b", config={"x": 1})
    assert model_identity(folder, config_path=other) == model_identity(other) != model_identity(folder)
    assert model_identity(f"{folder}/model.safetensors") not in {model_identity(folder), model_identity(other)}
    (Path(folder) / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model: '.*config\.json' is not JSON: "):
        model_identity(folder)
