"""What makes a replica prefill or decode, and what requests carry."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_ext.disaggregation.parameters import (
    CONNECTORS,
    DECODE,
    PREFILL,
    Settings,
    answer,
    check,
    check_pair,
    decode_transfer,
    engine_fields,
    new_transfer_id,
    prefill_transfer,
    understood,
)

NIXL = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "tp_size": 1,
}

SAID = answer("t", "e", "http://127.0.0.1:1")


def test_the_defaults_are_good() -> None:
    check(Settings())
    check_pair(Settings(), {}, {})


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"connector": "carrier-pigeon"}, "connector"),
        ({"protocol": "udp"}, "protocol"),
        ({"on_failure": "panic"}, "on_failure"),
        ({"transfer_timeout_s": 0}, "transfer_timeout_s"),
        ({"transfer_workers": 0}, "transfer_workers"),
        ({"kv_retention_s": 1.0}, "kv_retention_s"),
        ({"connector": "nixl", "kv_retention_s": 5.0}, "kv_retention_s"),
        ({"connector": "nixl", "protocol": "rdma"}, "protocol"),
    ],
)
def test_a_wrong_setting_is_named(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        check(Settings(**changed))


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype", "block_size", "max_model_len"])
def test_blocks_must_look_alike(name: str) -> None:
    for connector in CONNECTORS:
        with pytest.raises(ValueError, match=f"^{name}: is 1 in prefill and 2 in decode"):
            check_pair(Settings(connector=connector), {name: 1}, {name: 2})


@pytest.mark.parametrize(("prefill", "decode", "good"), [(1, 2, True), (4, 2, True), (2, 3, False), (None, 1, True)])
def test_parallel_sizes(prefill: int | None, decode: int, good: bool) -> None:
    sizes = ({"tensor_parallel_size": prefill}, {"tensor_parallel_size": decode})
    if good:
        check_pair(Settings(), *sizes)
        return
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: is 2 and 3; one must be a multiple"):
        check_pair(Settings(), *sizes)


def test_the_fields_are_what_vllm_takes() -> None:
    from vllm.config import KVTransferConfig

    for connector in CONNECTORS:
        for role, kv_role in ((PREFILL, "kv_producer"), (DECODE, "kv_consumer")):
            made = KVTransferConfig(**engine_fields(role, Settings(connector=connector))["kv_transfer_config"])
            assert made.kv_load_failure_policy == "recompute"
            assert connector != "mooncake" or made.kv_role == kv_role


def test_transfer_ids_are_unique() -> None:
    assert len({new_transfer_id() for _ in range(1000)}) == 1000


def test_an_answer_leads_to_decode_and_nothing_else_does() -> None:
    assert decode_transfer(SAID) == SAID
    assert decode_transfer(None) is None
    assert decode_transfer({}) is None
    assert decode_transfer(prefill_transfer("t")) is None


def test_each_role_understands_its_own() -> None:
    assert understood(PREFILL, prefill_transfer("t"))
    assert understood(DECODE, SAID)
    assert not understood(DECODE, prefill_transfer("t"))
    assert not understood(PREFILL, SAID)


@pytest.mark.parametrize("name", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
@pytest.mark.parametrize("value", [None, "", 3, ["x"], {}])
def test_wrong_transfer_parameters_are_not_understood(name: str, value: Any) -> None:
    assert not understood(DECODE, {**SAID, name: value})
    assert not understood(DECODE, {key: each for key, each in SAID.items() if key != name})
    if name == "transfer_id":
        assert not understood(PREFILL, prefill_transfer(value))


@pytest.mark.parametrize("name", [name for name in NIXL if name != "do_remote_prefill"])
def test_wrong_nixl_parameters_are_not_understood(name: str) -> None:
    assert understood(DECODE, NIXL, connector="nixl")
    assert understood(PREFILL, prefill_transfer("t"), connector="nixl")
    for value in (None, {}, []):
        assert not understood(DECODE, {**NIXL, name: value}, connector="nixl")


@pytest.mark.parametrize("params", ["text", 3, [], {}])
def test_transfer_parameters_that_are_no_dictionary_are_not_understood(params: Any) -> None:
    assert not understood(PREFILL, params)
    assert not understood(DECODE, params)
