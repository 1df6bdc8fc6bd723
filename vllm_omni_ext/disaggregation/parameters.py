"""What makes an engine a prefill or a decode replica, and what their requests carry: plain data, without vLLM.

The final output of a prefill request says where its KV blocks are (`kv_transfer_params`, vLLM's own field); the decode
request takes that answer with it. So nobody keeps a list of addresses, and none can be out of date.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

PREFILL = "prefill"
DECODE = "decode"

KEY = "kv_transfer_params"
"""In `SamplingParams.extra_args`, and in answers. A client must never set it: a stock engine dies of a wrong one."""

LOOPBACK = "127.0.0.1"

HOST = "bootstrap_host"
"""In a connector's extra config: the address under which replicas of the other role reach this one's host. It is set
where a replica is started, since a plan is the same on all hosts."""

_HERE = "vllm_omni_ext.disaggregation"

NIXL_SHORTEST_LEASE_S = 6
"""vLLM renews a sixth of it before it ends, in whole seconds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How blocks get from prefill to decode.

    Attributes:
        connector: a key of `CONNECTORS`.
        protocol: `tcp` or `rdma`.
        device: names of the RDMA devices, separated by commas; empty: all.
        transfer_timeout_s: how long decode waits for blocks before it does without.
        hold_s: how long prefill keeps blocks that nobody fetches.
        on_failure: `recompute`: decode computes the prompt itself; `fail`: the request ends with an error.
        senders: transfers that a prefill worker has under way at once.
    """

    connector: str = "mooncake"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    transfer_timeout_s: float = 5.0
    hold_s: float = 120.0
    on_failure: Literal["recompute", "fail"] = "recompute"
    senders: int = 16


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One connector.

    Attributes:
        module: what must be importable in a replica.
        install: what to do if it is not.
        equal: `EngineArgs` fields that both roles must have in common.
        tensor_parallel: `multiple`: one size must be a multiple of the other; `equal`: they must be equal.
        settings: names of the `Settings` that mean something for it, besides `connector`.
        answer: what an answer must have, and of what type; vLLM does not check.
        cls, path: its class, and the module where vLLM finds it.
    """

    module: str
    install: str
    equal: tuple[str, ...]
    tensor_parallel: Literal["multiple", "equal"]
    settings: frozenset[str]
    answer: Mapping[str, Any]
    cls: str
    path: str


_LAYOUT = ("dtype", "kv_cache_dtype", "block_size", "max_model_len")
"""Decides how a block looks in memory, or whether a prompt fits."""

CONNECTORS: Mapping[str, Facts] = MappingProxyType(
    {
        "mooncake": Facts(
            module="mooncake.engine",
            install=(
                "pip install 'vllm-omni-ext[mooncake]' (CUDA 13: [mooncake-cuda13], without CUDA: [mooncake-cpu]), and "
                "libibverbs1 from the system's packages"
            ),
            equal=_LAYOUT,
            tensor_parallel="multiple",
            settings=frozenset({"protocol", "device", "transfer_timeout_s", "hold_s", "on_failure", "senders"}),
            answer={"transfer_id": str, "remote_engine_id": str, "remote_bootstrap_addr": str},
            cls="OmniMooncakeConnector",
            path=f"{_HERE}.mooncake_connector",
        ),
        "nixl": Facts(
            module="nixl._api",
            install="pip install 'vllm-omni-ext[nixl]'",
            equal=_LAYOUT,
            tensor_parallel="multiple",
            settings=frozenset({"hold_s", "on_failure"}),
            answer={
                "remote_block_ids": list | tuple,
                "remote_engine_id": str,
                "remote_request_id": str,
                "remote_host": str,
                "remote_port": int,
                "tp_size": int,
            },
            cls="OmniNixlConnector",
            path=f"{_HERE}.nixl_connector",
        ),
    }
)


def check(settings: Settings) -> None:
    """Refuse settings that no connector understands.

    Raises:
        ValueError: "NAME: why", NAME being a field of `Settings`.
    """
    facts = CONNECTORS.get(settings.connector)
    if facts is None:
        raise ValueError(f"connector: {settings.connector!r} is none of {', '.join(sorted(CONNECTORS))}")
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if field.name not in facts.settings | {"connector"} and value != field.default:
            raise ValueError(f"{field.name}: means nothing for the connector {settings.connector}")
    for name, allowed in {"protocol": ("tcp", "rdma"), "on_failure": ("recompute", "fail")}.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name}: {getattr(settings, name)!r} is none of {', '.join(allowed)}")
    for name in ("transfer_timeout_s", "hold_s", "senders"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}: must be above 0")
    if settings.hold_s < settings.transfer_timeout_s:
        raise ValueError(f"hold_s: must not be below transfer_timeout_s ({settings.transfer_timeout_s:g})")
    if settings.connector == "nixl" and settings.hold_s < NIXL_SHORTEST_LEASE_S:
        raise ValueError(f"hold_s: must not be below {NIXL_SHORTEST_LEASE_S} for the connector nixl")


def check_pair(settings: Settings, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Refuse roles between which blocks cannot be transferred.

    Args:
        prefill, decode: `EngineArgs` fields of both; one that is missing has vLLM's default.

    Raises:
        ValueError: "NAME: why", NAME being an `EngineArgs` field.
    """
    facts = CONNECTORS[settings.connector]
    for name in facts.equal:
        if prefill.get(name) != decode.get(name):
            raise ValueError(
                f"{name}: is {prefill.get(name)} in {PREFILL} and {decode.get(name)} in {DECODE}; must be equal"
            )
    sizes = sorted(int(args.get("tensor_parallel_size") or 1) for args in (prefill, decode))
    if sizes[1] % sizes[0] if facts.tensor_parallel == "multiple" else sizes[0] != sizes[1]:
        rule = "one must be a multiple of the other" if facts.tensor_parallel == "multiple" else "must be equal"
        raise ValueError(f"tensor_parallel_size: is {sizes[0]} and {sizes[1]}; {rule}")


def engine_fields(role: str, settings: Settings, *, host: str = LOOPBACK) -> dict[str, Any]:
    """`EngineArgs` fields of a replica of that role.

    Args:
        host: address under which replicas of the other role reach this one's host.
    """
    facts = CONNECTORS[settings.connector]
    extra: dict[str, Any] = {HOST: host}
    if settings.connector == "nixl":
        extra["kv_lease_duration"] = math.ceil(settings.hold_s)
    else:
        extra |= {
            "mooncake_protocol": settings.protocol,
            "device_name": settings.device,
            "num_workers": settings.senders,
            "transfer_timeout_s": settings.transfer_timeout_s,
            "hold_s": settings.hold_s,
        }
    return {
        "kv_transfer_config": {
            "kv_connector": facts.cls,
            "kv_connector_module_path": facts.path,
            "kv_role": {PREFILL: "kv_producer", DECODE: "kv_consumer"}[role],
            "kv_load_failure_policy": settings.on_failure,
            "kv_connector_extra_config": extra,
        }
    }


def environment(settings: Settings) -> dict[str, str]:
    """Environment variables of a replica's process, of either role."""
    return {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_LOG_LEVEL": "WARNING"} if settings.connector == "mooncake" else {}


def new_transfer_id() -> str:
    """A name for one attempt; one that is used twice is not answered twice."""
    return uuid.uuid4().hex


def prefill_transfer(transfer_id: str) -> dict[str, Any]:
    """What a prefill request carries under `KEY`."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def answer(transfer_id: str, engine_id: str, bootstrap: str) -> dict[str, Any]:
    """What a Mooncake prefill replica says about a request whose blocks it keeps.

    Args:
        engine_id: a name of that process and no other.
        bootstrap: URL of its bootstrap server.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }


def decode_transfer(answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a decode request carries under `KEY`; None: nothing, it computes its prompt itself.

    Args:
        answer: `kv_transfer_params` of the prefill request's final output.
    """
    return dict(answer) if answer and answer.get("do_remote_prefill") else None


def understood(role: str, params: Any, *, connector: str = "mooncake") -> bool:
    """True if a replica of that role can act on what a request carries under `KEY`; vLLM dies of anything else."""
    if not isinstance(params, dict):
        return False
    prefills, decodes = (bool(params.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
    if (prefills, decodes) != (role == PREFILL, role == DECODE):
        return False
    answer = CONNECTORS[connector].answer
    needed = answer if role == DECODE else {name: kind for name, kind in answer.items() if name == "transfer_id"}
    if not all(isinstance(params.get(name), kind) and params[name] for name, kind in needed.items()):
        return False
    return str(params.get("remote_bootstrap_addr", "http://")).startswith("http://")


def prefill_sampling() -> dict[str, Any]:
    """Constructor fields of the `SamplingParams` of a prefill request, whose token nobody reads.

    Blocks are only kept for a request that ends by its length: nothing else may end it.
    """
    return {
        "max_tokens": 1,
        "min_tokens": 0,
        "temperature": 0.0,
        "ignore_eos": True,
        "stop": [],
        "stop_token_ids": [],
        "detokenize": False,
    }
