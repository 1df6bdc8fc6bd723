"""Plain data becomes the configuration, or is refused with its place; docs/configuration.md has its keys."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.config.checks import LB_POLICIES
from vllm_omni_ext.config.parse import Names, parse_config
from vllm_omni_ext.config.schema import (
    GROUPS,
    SETTINGS,
    Cluster,
    Limits,
    OmniConfig,
    PrefillDecode,
    Schema,
    StageConfig,
    Timeouts,
    keys,
)
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.pool import stage_pool
from vllm_omni_ext.pool.stage_pool import POLICIES
from vllm_omni_ext.topology.engine_args import SHARED_FIELDS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")

NAMES = Names(
    stages=("thinker", "talker", "code2wav"),
    engine=frozenset({"max_num_seqs", "dtype", "tensor_parallel_size"}),
    params={"talker": frozenset({"temperature", "top_k"})},
)


@pytest.mark.parametrize("data", [None, {}, {"stages": None}, {"stages": {}}, {"limits": None}])
def test_an_empty_configuration_has_all_defaults(data: Any) -> None:
    assert parse_config(data, NAMES) == OmniConfig()


def test_every_key_arrives() -> None:
    top = {
        "pipeline": "qwen3_omni",
        "async_chunk": False,
        "api_servers": 2,
        "lb_policy": "random",
        "restart_limit": 0,
        "log_dir": "logs",
    }
    limits = {"max_body_mib": 1, "max_media_tokens": 2}
    timeouts = {"startup_timeout_s": 60, "request_timeout_s": 30, "drain_timeout_s": 2, "replica_wait_timeout_s": 3}
    cluster = {
        "master_address": "10.0.0.1",
        "master_port": 65535,
        "cluster_secret_file": "secret",
        "heartbeat_timeout_s": 1,
    }
    talker = {
        "replicas": 2,
        "lb_policy": "round-robin",
        "kv_cache_bytes": 1024,
        "cpu_threads": 3,
        "engine": {"max_num_seqs": 4},
        "params": {"temperature": 0.5},
    }
    text = {"devices": "0, 1", "env": {"A": 1, "B": "x"}}
    converted: dict[str, Any] = {"devices": "0,1", "env": {"A": "1", "B": "x"}}
    groups = {"limits": limits, "timeouts": timeouts, "cluster": cluster}
    config = parse_config({**top, **groups, "stages": {"talker": talker | text}}, NAMES)
    stage = StageConfig(**talker, **converted)  # type: ignore[arg-type]
    assert config == OmniConfig(
        limits=Limits(**limits),
        timeouts=Timeouts(**timeouts),
        cluster=Cluster(**cluster),  # type: ignore[arg-type]
        stages={"talker": stage},
        **top,  # type: ignore[arg-type]
    )
    assert config.stage("thinker") == StageConfig()
    assert [config.policy(name) for name in ("thinker", "talker")] == ["random", "round-robin"]


def test_constants_that_are_written_twice_are_equal() -> None:
    """The configuration may not import the modules that use it."""
    assert set(LB_POLICIES) == set(POLICIES)
    assert OmniConfig().lb_policy == stage_pool.DEFAULT


def test_chunk_sizes_and_a_device_number_are_converted() -> None:
    config = parse_config({"chunks": {"text": "all", "frames": [4, 25], "adaptive": False}}, NAMES)
    assert config.chunks == {"text": "all", "frames": (4, 25), "adaptive": False}
    assert parse_config({"stages": {"talker": {"devices": 1}}}, NAMES).stage("talker").devices == "1"


SECONDS, COUNT, TEXT = "a number of seconds > 0", "an integer >= 0", "a non-empty string, or null"
POLICY = "'least-queue-length', 'random' or 'round-robin'"
MAPPING = "a mapping with string keys"
CHUNKS = "a mapping of hand-overs to lists of sizes >= 1 or 'all', and adaptive to true or false"
DEVICES = "a comma-separated list of device numbers such as '0,1', or null"
STAGE_KEYS = ", ".join(sorted({*keys(StageConfig), "prefill_decode"}))


def below(path: str, value: Any) -> Any:
    """A mapping that has a value at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(
    ("path", "expected", "values"),
    [
        ("async_chunk", "true or false", ["yes", 1]),
        ("chunks.frames", CHUNKS, [[], [0], [1, -1], [1.5], [True], ["all"], "any", 4, None]),
        ("chunks.adaptive", CHUNKS, ["yes"]),
        ("timeouts.chunk_timeout_s", SECONDS, [0, float("nan"), False]),
        ("api_servers", "an integer >= 1, or auto", [0, True]),
        ("timeouts.startup_timeout_s", SECONDS, [0, None]),
        ("timeouts.request_timeout_s", "a number of seconds > 0, auto or null", ["x"]),
        ("default_modalities", "a comma-separated list of names such as 'text,audio', or null", ["text,"]),
        ("log_dir", TEXT, [""]),
        ("lb_policy", POLICY, ["fastest", None]),
        ("stages.talker.lb_policy", f"{POLICY}, or null", [1]),
        ("cluster.heartbeat_timeout_s", "a number of seconds >= 1", [0.9, "x"]),
        ("timeouts.drain_timeout_s", SECONDS, [0]),
        ("timeouts.replica_wait_timeout_s", SECONDS, [None]),
        ("restart_limit", COUNT, [-1]),
        (
            "cluster.master_address",
            "the name or address of one host, without a port, or null",
            ["", 1, "10.0.0.1:9100", "tcp://h", "a,b", "10.0.0.0/8"],
        ),
        ("cluster.master_port", "an integer from 1 to 65535, or null", [0, 65536]),
        ("cluster.cluster_secret_file", TEXT, [1]),
        ("limits", MAPPING, [[], 1]),
        ("limits.max_body_mib", "an integer >= 1", [0, None]),
        ("limits.realtime_sessions", "an integer >= 1", [0, 1.5]),
        ("limits.realtime_idle_s", SECONDS, [0, None]),
        ("stages", MAPPING, [[]]),
        ("stages.talker", MAPPING, [2]),
        ("stages.talker.replicas", COUNT, [-1, "two", 1.5]),
        ("stages.talker.devices", DEVICES, ["gpu0"]),
        ("stages.talker.step_timeout_s", SECONDS, [0]),
        ("stages.talker.env", "a mapping of variable names to strings or numbers", [{"A": None}]),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(path: str, expected: str, values: list[Any]) -> None:
    place, chunk = ("chunks", True) if path.startswith("chunks.") else (path, False)
    for value in values:
        with pytest.raises(ConfigError) as caught:
            parse_config(below(path, value), NAMES)
        shown = below(path, value)["chunks"] if chunk else value
        assert str(caught.value) == f"{place}: must be {expected}, got {shown!r}"


@pytest.mark.parametrize("variable", [("A=B", "1"), ("", "1"), ("A\0", "1"), ("A", "\0")])
def test_a_variable_that_no_environment_can_have_is_refused_by_name(variable: tuple[str, str]) -> None:
    wrong = "must have names that are not empty, without '=', and no NUL, wrong is"
    with pytest.raises(ConfigError) as caught:
        parse_config(below("stages.talker.env", dict([variable])), NAMES)
    assert str(caught.value) == f"stages.talker.env: {wrong} {variable[0]!r}, got {dict([variable])!r}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("async_chunks", "unknown key; did you mean 'async_chunk'?"),
        ("async-chunk", "unknown key; did you mean 'async_chunk'?"),
        ("limits.max_body_mb", "unknown key; did you mean 'max_body_mib'?"),
        ("max_body_mb", "unknown key; did you mean 'limits.max_body_mib'?"),
        ("max_body_mib", "goes below 'limits'"),
        ("timeouts.max_body_mib", "goes below 'limits'"),
        ("limits.verbose", "goes to the top level"),
        ("stages.talker.verbose", f"unknown key; use one of {STAGE_KEYS}"),
        ("stages.taler", "no such stage; use one of thinker, talker, code2wav"),
        ("stages.talker.replica", "unknown key; did you mean 'replicas'?"),
        ("stages.talker.zzz", f"unknown key; use one of {STAGE_KEYS}"),
        ("stages.talker.engine_overrides", f"unknown key; use one of {STAGE_KEYS}"),
        ("stages.talker.max_num_seqs", "is an engine setting; write it as stages.talker.engine.max_num_seqs"),
        ("stages.talker.engine.max_num_seq", "unknown key; did you mean 'max_num_seqs'?"),
        ("stages.talker.params.temprature", "unknown key; did you mean 'temperature'?"),
    ],
)
def test_an_unknown_key_is_refused_with_advice(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(below(path, {}), NAMES)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("data", "message"),
    [([], f"the configuration: must be {MAPPING}, got []"), ({1: 2}, "1: Keys should be strings, got 1")],
)
def test_data_that_is_no_mapping_of_keys_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, NAMES)
    assert str(caught.value) == message


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*SETTINGS, *GROUPS, *keys(StageConfig), "stages", "talker", "thinker", "other"]), inner
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


def test_a_name_is_in_one_group_alone() -> None:
    """Flags and keywords have no group."""
    assert len(SETTINGS) == sum(len(keys(schema)) for schema in (OmniConfig, *GROUPS.values()))
    assert SETTINGS["lb_policy"][0] == "" and SETTINGS["master_port"][0] == "cluster"


def rows(schema: Schema) -> list[str]:
    default_of = {f.name: getattr(schema(), f.name) for f in fields(schema)}
    return [
        f"| `{name}` | `{text(default_of[name])}` | {key.unit} | {key.text} |" for name, key in keys(schema).items()
    ]


def text(default: object) -> str:
    if isinstance(default, dict):
        return f"{{{', '.join(f'{name}: {each}' for name, each in default.items())}}}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))


def test_the_documentation_has_the_keys_of_the_schema() -> None:
    assert ", ".join(f"`{name}`" for name in sorted(SHARED_FIELDS)) in DOCUMENT
    schemas = (OmniConfig, *GROUPS.values(), StageConfig, PrefillDecode)
    assert all("\n".join(rows(schema)) + "\n" in DOCUMENT for schema in schemas)
    documented = [line for line in DOCUMENT.splitlines() if line.startswith("| `") and line.count("|") == 5]
    assert documented == [row for schema in schemas for row in rows(schema)]
