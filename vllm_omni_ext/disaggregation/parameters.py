"""Engine settings of prefill and decode replicas, and the transfer parameters of requests: plain data, without vLLM.

The final output of a prefill request contains the location of its KV blocks, called the answer (`kv_transfer_params`,
vLLM's own field). The decode request contains the same data. So no process keeps a list of addresses that could be
outdated.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from vllm_omni_ext.ids import DECODE, PREFILL

KEY = "kv_transfer_params"
"""Key of the transfer parameters in `SamplingParams.extra_args` and in outputs. Clients must not set the key, because a
bad value crashes a stock engine."""

SHORTEST_PROMPT = 2
"""Shortest prompt, in tokens, that is sent to a prefill stage. The decode stage always computes the last prompt token,
so a shorter prompt has no KV cache to transfer."""

LOOPBACK = "127.0.0.1"

HOST = "bootstrap_host"
"""Key in a connector's extra config: the address under which replicas of the other role reach this replica's host. The
key is set when a replica is started, since the plan of the deployment is the same on all hosts."""

_HERE = "vllm_omni_ext.disaggregation"

NIXL_SHORTEST_LEASE_S = 6
"""Shortest lease in seconds: vLLM renews leases every `lease // 6` seconds, which must not be 0."""


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """How KV blocks are transferred from prefill to decode.

    Attributes:
        connector: a key of `CONNECTORS`.
        protocol: `tcp` or `rdma`.
        device: names of the RDMA devices, separated by commas; empty: all.
        transfer_timeout_s: seconds that a decode replica waits for blocks before it applies `on_failure`.
        kv_retention_s: seconds that a prefill replica keeps blocks that are not fetched.
        on_failure: `recompute`: decode computes the prompt itself; `fail`: the request ends with an error.
        transfer_workers: concurrent transfers of a prefill worker.
    """

    connector: str = "mooncake"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    transfer_timeout_s: float = 5.0
    kv_retention_s: float = 120.0
    on_failure: Literal["recompute", "fail"] = "recompute"
    transfer_workers: int = 16


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Fixed properties of one KV connector.

    Attributes:
        module: the library's module, which must be importable in a replica.
        install: how to install the library.
        settings: names of the `TransferSettings` that the connector uses, besides `connector`.
        answer: required keys of the transfer parameters of a decode request, and their types; vLLM does not check them.
        cls, path: name of the connector's class, and its module, for `kv_transfer_config`.
    """

    module: str
    install: str
    settings: frozenset[str]
    answer: Mapping[str, Any]
    cls: str
    path: str


_LAYOUT = ("dtype", "kv_cache_dtype", "block_size", "max_model_len")
"""`EngineArgs` fields that must be equal in both roles: they determine a block's memory layout, and the longest prompt.
"""

CONNECTORS: Mapping[str, Facts] = MappingProxyType(
    {
        "mooncake": Facts(
            module="mooncake.engine",
            install=(
                "pip install 'vllm-omni-ext[mooncake]' (CUDA 13: [mooncake-cuda13], without CUDA: [mooncake-cpu]), and "
                "libibverbs1 and ibverbs-providers (libmlx5) from the system's packages"
            ),
            settings=frozenset(
                {"protocol", "device", "transfer_timeout_s", "kv_retention_s", "on_failure", "transfer_workers"}
            ),
            answer={"transfer_id": str, "remote_engine_id": str, "remote_bootstrap_addr": str},
            cls="OmniMooncakeConnector",
            path=f"{_HERE}.mooncake_connector",
        ),
        "nixl": Facts(
            module="nixl._api",
            install="pip install 'vllm-omni-ext[nixl]'",
            settings=frozenset({"kv_retention_s", "on_failure"}),
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


def check(settings: TransferSettings) -> None:
    """Check that the settings are valid for their connector.

    Raises:
        ValueError: "NAME: why", NAME being a field of `TransferSettings`.
    """
    facts = CONNECTORS.get(settings.connector)
    if facts is None:
        raise ValueError(f"connector: {settings.connector!r} is none of {', '.join(sorted(CONNECTORS))}")
    for field in fields(TransferSettings):
        value = getattr(settings, field.name)
        if field.name not in facts.settings | {"connector"} and value != field.default:
            raise ValueError(f"{field.name}: means nothing for the connector {settings.connector}")
    for name, allowed in {"protocol": ("tcp", "rdma"), "on_failure": ("recompute", "fail")}.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name}: {getattr(settings, name)!r} is none of {', '.join(allowed)}")
    for name in ("transfer_timeout_s", "kv_retention_s", "transfer_workers"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}: must be above 0")
    if settings.kv_retention_s < settings.transfer_timeout_s:
        raise ValueError(f"kv_retention_s: must not be below transfer_timeout_s ({settings.transfer_timeout_s:g})")
    if settings.connector == "nixl" and settings.kv_retention_s < NIXL_SHORTEST_LEASE_S:
        raise ValueError(f"kv_retention_s: must not be below {NIXL_SHORTEST_LEASE_S} for the connector nixl")


def check_pair(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Check that blocks can be transferred from prefill replicas to decode replicas with these settings.

    Args:
        prefill, decode: `EngineArgs` fields of the roles; a missing field has vLLM's default.

    Raises:
        ValueError: "NAME: why", NAME being an `EngineArgs` field.
    """
    for name in _LAYOUT:
        if prefill.get(name) != decode.get(name):
            raise ValueError(
                f"{name}: is {prefill.get(name)} in {PREFILL} and {decode.get(name)} in {DECODE}; must be equal"
            )
    sizes = sorted(int(args.get("tensor_parallel_size") or 1) for args in (prefill, decode))
    if sizes[1] % sizes[0]:
        raise ValueError(f"tensor_parallel_size: is {sizes[0]} and {sizes[1]}; one must be a multiple of the other")


def engine_fields(role: str, settings: TransferSettings, *, host: str = LOOPBACK) -> dict[str, Any]:
    """Return the `EngineArgs` fields of a replica of the given role.

    Args:
        host: address under which replicas of the other role reach this replica's host.
    """
    facts = CONNECTORS[settings.connector]
    extra: dict[str, Any] = {HOST: host}
    if settings.connector == "nixl":
        extra["kv_lease_duration"] = math.ceil(settings.kv_retention_s)
    else:
        extra |= {
            "mooncake_protocol": settings.protocol,
            "device_name": settings.device,
            "num_workers": settings.transfer_workers,
            "transfer_timeout_s": settings.transfer_timeout_s,
            "kv_retention_s": settings.kv_retention_s,
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


def environment(settings: TransferSettings) -> dict[str, str]:
    """Return the environment variables of a replica's process, of either role."""
    return {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_LOG_LEVEL": "WARNING"} if settings.connector == "mooncake" else {}


def new_transfer_id() -> str:
    """Return a unique id for one attempt of a transfer. A prefill replica answers each transfer id only once."""
    return uuid.uuid4().hex


def prefill_transfer(transfer_id: str) -> dict[str, Any]:
    """Return the transfer parameters of a prefill request, the value of `KEY`."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def answer(transfer_id: str, engine_id: str, bootstrap: str) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a prefill request's final output, if a Mooncake replica keeps its blocks.

    Args:
        transfer_id: the id in the request's own transfer parameters (`prefill_transfer`).
        engine_id: unique name of the replica's process.
        bootstrap: URL of the replica's bootstrap server.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }


def decode_transfer(answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the transfer parameters of a decode request, the value of `KEY`.

    The result is None if the prefill replica keeps no blocks: the decode replica then computes the prompt.

    Args:
        answer: `kv_transfer_params` of the prefill request's final output.
    """
    return dict(answer) if answer and answer.get("do_remote_prefill") else None


def understood(role: str, params: Any, *, connector: str = "mooncake") -> bool:
    """Return whether transfer parameters are valid for a replica of this role; invalid parameters crash vLLM."""
    if not isinstance(params, dict):
        return False
    prefills, decodes = (bool(params.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
    if (prefills, decodes) != (role == PREFILL, role == DECODE):
        return False
    for name, kind in CONNECTORS[connector].answer.items():
        needed = role == DECODE or name == "transfer_id"
        if needed and not (isinstance(params.get(name), kind) and params[name]):
            return False
    return str(params.get("remote_bootstrap_addr", "http://")).startswith("http://")


def prefill_sampling() -> dict[str, Any]:
    """Return the `SamplingParams` fields of a prefill request, whose only token is discarded.

    vLLM keeps blocks only for a request that ends by its length, so no other stop condition is set.
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
