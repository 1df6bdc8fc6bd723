"""Settings of the command line replace those of the file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.config.overrides import with_overrides, with_settings
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import Cluster, Limits, OmniConfig, PrefillDecode, StageConfig, Timeouts
from vllm_omni_ext.errors import ConfigError

NAMES = Names(
    stages=("thinker", "talker"),
    engine=frozenset({"max_num_seqs", "dtype", "seed", "kv_cache_memory_bytes"}),
    params={"talker": frozenset({"temperature", "top_k"})},
)


def test_keys_of_the_stage_and_of_the_engine_are_separated() -> None:
    config = with_overrides(OmniConfig(), '{"talker": {"replicas": 2, "max_num_seqs": 4}}', NAMES)
    assert with_overrides(config, {"talker": {}}, NAMES) == with_overrides(config, {}, NAMES) == config
    assert with_settings(config, {"async_chunk": None, "log_dir": None}) == config
    assert config.stages == {"talker": StageConfig(replicas=2, engine_overrides={"max_num_seqs": 4})}


def test_values_that_are_not_overridden_stay() -> None:
    file = OmniConfig(
        async_chunk=False,
        stages={
            "talker": StageConfig(
                replicas=3, devices="1", engine={"seed": 1}, params={"top_k": 5, "temperature": 1.0}, env={"A": "1"}
            ),
            "thinker": StageConfig(replicas=2),
        },
    )
    over = {"talker": {"replicas": 2, "params": {"temperature": 0.0}, "env": {"B": 2}, "engine": {"dtype": "half"}}}
    config = with_overrides(file, over, NAMES)
    assert config.async_chunk is False
    assert config.stage("thinker") == StageConfig(replicas=2)
    assert config.stage("talker") == StageConfig(
        replicas=2,
        devices="1",
        engine={"seed": 1},
        params={"top_k": 5, "temperature": 0.0},
        env={"A": "1", "B": "2"},
        engine_overrides={"dtype": "half"},
    )


SPLIT = OmniConfig(stages={"thinker": StageConfig(prefill_decode=PrefillDecode())})
PATHS = {"talker": "stages.talker", "thinker.prefill": "stages.thinker.prefill_decode.prefill"}
TWICE = "is also written without engine; keep one of the two"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([1], "must be a mapping with string keys, got [1]"),
        ({"talker": 2}, "stages.talker: must be a mapping with string keys, got 2"),
        ({"taker": {}}, "stages.taker: no such stage; use one of thinker, talker"),
        ({"talker": {"replica": 2}}, "stages.talker.replica: unknown key; did you mean 'replicas'?"),
        ({"talker": {"max_num_seq": 2}}, "stages.talker.max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ({"talker": {"replicas": -1}}, "stages.talker.replicas: must be an integer >= 0, got -1"),
        ({"talker": {"engine": {"sed": 1}}}, "stages.talker.engine.sed: unknown key; did you mean 'seed'?"),
        ({"talker": {"params": {"seed": 1}}}, "stages.talker.params.seed: unknown key; use one of temperature, "),
        *(
            ({name: {"max_num_seqs": 4, "engine": {"max_num_seqs": 8}}}, f"{path}.engine.max_num_seqs: {TWICE}")
            for name, path in PATHS.items()
        ),
        *(
            ({name: {"kv_cache_bytes": 4, **more}}, f"{path}.engine.kv_cache_memory_bytes: {path}.kv_cache_bytes says ")
            for name, path in PATHS.items()
            for more in ({"kv_cache_memory_bytes": 8}, {"engine": {"kv_cache_memory_bytes": 8}})
        ),
        ("{", "is not valid JSON: "),
        ('{"talker": ' * 3000 + "1" + "}" * 3000, "is not valid JSON: "),
        ('{"talker": {"replicas": ' + "9" * 5000 + "}}", "is not valid JSON: "),
        ('{"talker": {"replicas": 1, "replicas": 2}}', "key 'replicas' is written twice; keep one of the two"),
    ],
)
def test_wrong_overrides_are_refused_with_their_place(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides(SPLIT, overrides, NAMES)
    assert str(caught.value).startswith(f"--stage-overrides: {message}")


def test_settings_replace_keys_of_the_top_level_and_of_groups() -> None:
    file = OmniConfig(async_chunk=True, timeouts=Timeouts(drain_timeout_s=5.0), cluster=Cluster(master_port=1))
    config = with_settings(file, {"async_chunk": False, "startup_timeout_s": 3, "max_body_mib": 1})
    assert config == OmniConfig(
        async_chunk=False,
        limits=Limits(max_body_mib=1),
        timeouts=Timeouts(drain_timeout_s=5.0, startup_timeout_s=3.0),
        cluster=Cluster(master_port=1),
    )
    with pytest.raises(ConfigError, match=r"^timeouts.startup_timeout_s: must be a number of seconds > 0, got -1$"):
        with_settings(config, {"startup_timeout_s": -1})
    with pytest.raises(
        ConfigError, match=r"^startup_timeout: unknown key; did you mean 'timeouts.startup_timeout_s'\?$"
    ):
        with_settings(config, {"startup_timeout": 1})


def test_null_removes_the_division_of_a_stage_config() -> None:
    split = {"stages": {"thinker": {"engine": {"seed": 1}, "prefill_decode": {"prefill": {"replicas": 2}}}}}
    config = parse_config(split, NAMES)
    assert with_overrides(config, {"thinker": {"prefill_decode": {}}}, NAMES) == config
    removed = with_overrides(config, {"thinker": {"prefill_decode": None, "replicas": 3}}, NAMES)
    assert removed.stage("thinker") == StageConfig(replicas=3, engine={"seed": 1})
    assert with_overrides(OmniConfig(), {"thinker": {"prefill_decode": None}}, NAMES).stage("thinker") == StageConfig()


@pytest.mark.parametrize("name", PATHS)
def test_a_second_override_of_the_kv_cache_replaces_the_first(name: str) -> None:
    first = with_overrides(SPLIT, {name: {"kv_cache_bytes": 4}}, NAMES)
    for values in ({"kv_cache_bytes": None}, {"kv_cache_bytes": 8}):
        assert with_overrides(first, {name: values}, NAMES) == with_overrides(SPLIT, {name: values}, NAMES)


@given(
    first=st.dictionaries(st.sampled_from(["max_num_seqs", "dtype", "seed"]), st.integers()),
    second=st.dictionaries(st.sampled_from(["max_num_seqs", "dtype", "seed"]), st.integers()),
)
def test_two_overrides_are_equal_to_their_union(first: dict[str, int], second: dict[str, int]) -> None:
    twice = with_overrides(with_overrides(OmniConfig(), {"talker": first}, NAMES), {"talker": second}, NAMES)
    once = with_overrides(OmniConfig(), {"talker": {**first, **second}}, NAMES)
    assert twice == once
