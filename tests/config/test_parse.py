"""Plain data to the schema: what is accepted, and the exact text of every refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.config.checks import LB_POLICIES, SHORTEST_HEARTBEAT_TIMEOUT_S
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import OmniConfig, StageConfig, keys
from vllm_omni_ext.coordinator import timing
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.pool import policies
from vllm_omni_ext.pool.policies import POLICIES

NAMES = Names(
    stages=("thinker", "talker", "code2wav"),
    engine=frozenset({"max_num_seqs", "dtype", "tensor_parallel_size"}),
    params={"talker": frozenset({"temperature", "top_k"})},
)


@pytest.mark.parametrize("data", [None, {}, {"stages": None}, {"stages": {}}])
def test_nothing_said_is_all_defaults(data: Any) -> None:
    assert parse_config(data, NAMES) == OmniConfig()


def test_everything_said_arrives() -> None:
    config = parse_config(
        {
            "pipeline": "qwen3_omni",
            "async_chunk": False,
            "api_servers": 2,
            "startup_timeout_s": 60,
            "shutdown_timeout_s": 1.5,
            "request_timeout_s": 30,
            "lb_policy": "random",
            "heartbeat_timeout_s": 1,
            "drain_timeout_s": 2,
            "replica_wait_timeout_s": 3,
            "restart_limit": 0,
            "restart_window_s": 4,
            "restart_backoff_s": 0.5,
            "master_address": "10.0.0.1",
            "master_port": 65535,
            "cluster_secret_file": "secret",
            "log_dir": "logs",
            "stages": {
                "talker": {
                    "replicas": 2,
                    "devices": "0, 1",
                    "lb_policy": "round-robin",
                    "kv_cache_bytes": 1024,
                    "cpu_threads": 3,
                    "engine": {"max_num_seqs": 4},
                    "params": {"temperature": 0.5},
                    "env": {"A": 1, "B": "x"},
                }
            },
        },
        NAMES,
    )
    assert config == OmniConfig(
        pipeline="qwen3_omni",
        async_chunk=False,
        api_servers=2,
        startup_timeout_s=60.0,
        shutdown_timeout_s=1.5,
        request_timeout_s=30.0,
        lb_policy="random",
        heartbeat_timeout_s=1.0,
        drain_timeout_s=2.0,
        replica_wait_timeout_s=3.0,
        restart_limit=0,
        restart_window_s=4.0,
        restart_backoff_s=0.5,
        master_address="10.0.0.1",
        master_port=65535,
        cluster_secret_file="secret",
        log_dir="logs",
        stages={
            "talker": StageConfig(
                replicas=2,
                devices="0,1",
                lb_policy="round-robin",
                kv_cache_bytes=1024,
                cpu_threads=3,
                engine={"max_num_seqs": 4},
                params={"temperature": 0.5},
                env={"A": "1", "B": "x"},
            )
        },
    )
    assert config.stage("thinker") == StageConfig()


def test_a_stage_may_have_a_policy_of_its_own() -> None:
    config = parse_config({"lb_policy": "random", "stages": {"talker": {"lb_policy": "round-robin"}}}, NAMES)
    assert [config.policy(name) for name in ("thinker", "talker")] == ["random", "round-robin"]


def test_what_is_said_twice_is_the_same() -> None:
    """The configuration may not import those who use it."""
    assert set(LB_POLICIES) == set(POLICIES)
    assert OmniConfig().lb_policy == policies.DEFAULT
    assert SHORTEST_HEARTBEAT_TIMEOUT_S == timing.SHORTEST_TIMEOUT_S


def test_chunk_sizes_become_tuples() -> None:
    config = parse_config({"chunks": {"text": "all", "frames": [4, 25], "adaptive": False}}, NAMES)
    assert config.chunks == {"text": "all", "frames": (4, 25), "adaptive": False}


@pytest.mark.parametrize("sizes", [[], [1, -1], [1.5], [True], ["all"], "any", 4, None], ids=str)
def test_what_are_no_chunk_sizes(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="chunks: must be"):
        parse_config({"chunks": {"frames": sizes}}, NAMES)


def test_one_device_may_be_a_number() -> None:
    assert parse_config({"stages": {"talker": {"devices": 1}}}, NAMES).stage("talker").devices == "1"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the configuration: must be a mapping with string keys, got []"),
        ({1: 2}, "1: Keys should be strings, got 1"),
        ({"async_chunks": True}, "async_chunks: unknown key; did you mean 'async_chunk'?"),
        ({"async-chunk": True}, "async-chunk: unknown key; did you mean 'async_chunk'?"),
        ({"stage": {}}, "stage: unknown key; did you mean 'stages'?"),
        ({"async_chunk": "yes"}, "async_chunk: must be true or false, got 'yes'"),
        ({"async_chunk": 1}, "async_chunk: must be true or false, got 1"),
        (
            {"chunks": {"frames": [0]}},
            "chunks: must be a mapping of hand-overs to lists of sizes >= 1 or 'all', and adaptive to true or false, "
            "got {'frames': [0]}",
        ),
        (
            {"chunks": {"adaptive": "yes"}},
            "chunks: must be a mapping of hand-overs to lists of sizes >= 1 or 'all', and adaptive to true or false, "
            "got {'adaptive': 'yes'}",
        ),
        ({"chunk_timeout_s": 0}, "chunk_timeout_s: must be a number of seconds > 0, got 0"),
        ({"api_servers": 0}, "api_servers: must be an integer >= 1, or auto, got 0"),
        ({"api_servers": True}, "api_servers: must be an integer >= 1, or auto, got True"),
        ({"startup_timeout_s": 0}, "startup_timeout_s: must be a number of seconds > 0, got 0"),
        ({"startup_timeout_s": None}, "startup_timeout_s: must be a number of seconds > 0, got None"),
        ({"request_timeout_s": "x"}, "request_timeout_s: must be a number of seconds > 0, auto or null, got 'x'"),
        ({"shutdown_timeout_s": float("nan")}, "shutdown_timeout_s: must be a number of seconds > 0, got nan"),
        (
            {"default_modalities": "text,"},
            "default_modalities: must be a comma-separated list of names such as 'text,audio', or null, got 'text,'",
        ),
        ({"log_dir": ""}, "log_dir: must be a non-empty string, or null, got ''"),
        (
            {"lb_policy": "fastest"},
            "lb_policy: must be 'least-queue-length', 'random' or 'round-robin', got 'fastest'",
        ),
        ({"lb_policy": None}, "lb_policy: must be 'least-queue-length', 'random' or 'round-robin', got None"),
        (
            {"stages": {"talker": {"lb_policy": 1}}},
            "stages.talker.lb_policy: must be 'least-queue-length', 'random' or 'round-robin', or null, got 1",
        ),
        ({"heartbeat_timeout_s": 0.9}, "heartbeat_timeout_s: must be a number of seconds >= 1, got 0.9"),
        ({"heartbeat_timeout_s": "x"}, "heartbeat_timeout_s: must be a number of seconds >= 1, got 'x'"),
        ({"drain_timeout_s": 0}, "drain_timeout_s: must be a number of seconds > 0, got 0"),
        ({"replica_wait_timeout_s": None}, "replica_wait_timeout_s: must be a number of seconds > 0, got None"),
        ({"restart_limit": -1}, "restart_limit: must be an integer >= 0, got -1"),
        ({"restart_window_s": 0}, "restart_window_s: must be a number of seconds > 0, got 0"),
        ({"restart_backoff_s": False}, "restart_backoff_s: must be a number of seconds > 0, got False"),
        ({"master_address": ""}, "master_address: must be a non-empty string, or null, got ''"),
        ({"master_port": 0}, "master_port: must be an integer from 1 to 65535, or null, got 0"),
        ({"master_port": 65536}, "master_port: must be an integer from 1 to 65535, or null, got 65536"),
        ({"cluster_secret_file": 1}, "cluster_secret_file: must be a non-empty string, or null, got 1"),
        ({"stages": {"talker": {"replicas": -1}}}, "stages.talker.replicas: must be an integer >= 0, got -1"),
        ({"stages": []}, "stages: must be a mapping with string keys, got []"),
        ({"stages": {"taler": {}}}, "stages.taler: no such stage; use one of thinker, talker, code2wav"),
        ({"stages": {"talker": 2}}, "stages.talker: must be a mapping with string keys, got 2"),
        ({"stages": {"talker": {"replica": 2}}}, "stages.talker.replica: unknown key; did you mean 'replicas'?"),
        (
            {"stages": {"talker": {"replicas": "two"}}},
            "stages.talker.replicas: must be an integer >= 0, got 'two'",
        ),
        ({"stages": {"talker": {"replicas": 1.5}}}, "stages.talker.replicas: must be an integer >= 0, got 1.5"),
        (
            {"stages": {"talker": {"devices": "gpu0"}}},
            "stages.talker.devices: must be a comma-separated list of device numbers such as '0,1', or null, "
            "got 'gpu0'",
        ),
        (
            {"stages": {"talker": {"zzz": 1}}},
            "stages.talker.zzz: unknown key; use one of cpu_threads, devices, engine, env, kv_cache_bytes, lb_policy, "
            "min_replicas, params, prefill_decode, replicas, step_timeout_s",
        ),
        (
            {"stages": {"talker": {"step_timeout_s": 0}}},
            "stages.talker.step_timeout_s: must be a number of seconds > 0, got 0",
        ),
        (
            {"stages": {"talker": {"max_num_seqs": 4}}},
            "stages.talker.max_num_seqs: is an engine setting; write it as stages.talker.engine.max_num_seqs",
        ),
        (
            {"stages": {"talker": {"engine": {"max_num_seq": 4}}}},
            "stages.talker.engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        ),
        (
            {"stages": {"talker": {"params": {"temprature": 1}}}},
            "stages.talker.params.temprature: unknown key; did you mean 'temperature'?",
        ),
        (
            {"stages": {"talker": {"env": {"A": None}}}},
            "stages.talker.env: must be a mapping of variable names to strings or numbers, got {'A': None}",
        ),
        (
            {"stages": {"talker": {"engine_overrides": {}}}},
            "stages.talker.engine_overrides: unknown key; use one of cpu_threads, devices, engine, env, "
            "kv_cache_bytes, lb_policy, min_replicas, params, prefill_decode, replicas, step_timeout_s",
        ),
    ],
)
def test_refusals_name_the_place(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, NAMES)
    assert str(caught.value) == message


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*keys(OmniConfig), *keys(StageConfig), "stages", "talker", "thinker", "other"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_data_is_a_config_or_a_config_error(data: Any) -> None:
    try:
        config = parse_config(data, NAMES)
    except ConfigError as err:
        assert str(err)
    else:
        assert isinstance(config, OmniConfig)
