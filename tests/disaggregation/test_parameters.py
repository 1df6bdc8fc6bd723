"""Engine settings of prefill and decode replicas, and the transfer parameters of requests."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from vllm_omni_ext.disaggregation.parameters import (
    CONNECTORS,
    DECODE,
    PREFILL,
    TransferSettings,
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

ANSWER = answer("t", "e", "http://127.0.0.1:1")


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
    check(TransferSettings())
    with pytest.raises(ValueError, match=f"^{name}: "):
        check(TransferSettings(**changed))


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype", "block_size", "max_model_len"])
def test_both_roles_need_the_same_layout_of_blocks(name: str) -> None:
    check_pair({name: 1}, {name: 1})
    with pytest.raises(ValueError, match=f"^{name}: is 1 in prefill and 2 in decode"):
        check_pair({name: 1}, {name: 2})


@pytest.mark.parametrize(("prefill", "decode", "good"), [(1, 2, True), (4, 2, True), (2, 3, False), (None, 1, True)])
def test_one_tensor_parallel_size_is_a_multiple_of_the_other(prefill: int | None, decode: int, good: bool) -> None:
    refused = pytest.raises(ValueError, match=r"^tensor_parallel_size: is 2 and 3; one must be a multiple")
    with nullcontext() if good else refused:
        check_pair({"tensor_parallel_size": prefill}, {"tensor_parallel_size": decode})


def test_vllm_accepts_the_fields_of_an_engine() -> None:
    from vllm.config import KVTransferConfig

    for connector in CONNECTORS:
        for role, kv_role in ((PREFILL, "kv_producer"), (DECODE, "kv_consumer")):
            made = KVTransferConfig(**engine_fields(role, TransferSettings(connector=connector))["kv_transfer_config"])
            assert made.kv_load_failure_policy == "recompute"
            assert connector != "mooncake" or made.kv_role == kv_role


def test_only_the_answer_of_prefill_leads_to_decode() -> None:
    assert decode_transfer(ANSWER) == ANSWER
    for other in (None, {}, prefill_transfer("t")):
        assert decode_transfer(other) is None
    assert new_transfer_id() != new_transfer_id()


def test_each_role_accepts_its_own_parameters_only() -> None:
    assert understood(PREFILL, prefill_transfer("t")) and understood(DECODE, ANSWER)
    assert not understood(DECODE, prefill_transfer("t")) and not understood(PREFILL, ANSWER)
    for params in ("text", 3, [], {}):
        assert not understood(PREFILL, params) and not understood(DECODE, params)


@pytest.mark.parametrize("name", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
@pytest.mark.parametrize("value", [None, "", 3, ["x"], {}])
def test_wrong_transfer_parameters_are_refused(name: str, value: Any) -> None:
    assert not understood(DECODE, {**ANSWER, name: value})
    assert not understood(DECODE, {key: each for key, each in ANSWER.items() if key != name})
    if name == "transfer_id":
        assert not understood(PREFILL, prefill_transfer(value))


@pytest.mark.parametrize("name", [name for name in NIXL if name != "do_remote_prefill"])
def test_wrong_nixl_parameters_are_refused(name: str) -> None:
    assert understood(DECODE, NIXL, connector="nixl")
    assert understood(PREFILL, prefill_transfer("t"), connector="nixl")
    for value in (None, {}, []):
        assert not understood(DECODE, {**NIXL, name: value}, connector="nixl")
