"""What may be said about the connector of a hand-over, and what holds where nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from vllm_omni_ext.config.checks import PORT, TEXT, integer, one_of, seconds, unknown_key
from vllm_omni_ext.connectors.base import MIB
from vllm_omni_ext.connectors.registry import CONNECTORS
from vllm_omni_ext.errors import ConfigError

HERE, ANYWHERE = "shared_memory", "tcp"
"""Between processes of one host, and between any."""

_WITHIN = "in_process"

DEFAULTS: Mapping[str, Any] = {"capacity_bytes": 1024 * MIB, "deadline_s": 0.8, "keep_s": 600.0}
"""Of a hand-over, where they are not those of `ConnectorConfig`. What a get waits for has been put before."""

LOCAL = frozenset({"host", "port", "device"})
"""In these the two ends, and replicas of one stage, may differ."""

CHECKS = {
    "name": TEXT,
    "capacity_bytes": integer(at_least=1),
    "window_bytes": integer(at_least=1),
    "max_requests": integer(at_least=1),
    "deadline_s": seconds(),
    "keep_s": seconds(),
    "host": TEXT,
    "port": PORT,
    "protocol": one_of("tcp", "rdma"),
    "device": TEXT,
}
"""The fields of `ConnectorConfig`."""


def connector_settings(path: str, said: Mapping[str, Any], *, spread: bool) -> dict[str, Any]:
    """Fields of the hand-over's `ConnectorConfig`, as plain data; what each process decides for itself is left out.

    Args:
        path: of the mapping, for errors.
        spread: replicas may be on several hosts.

    Raises:
        ConfigError: an unknown field or connector, or a value of the wrong type.
    """
    settings: dict[str, Any] = {"name": ANYWHERE if spread else HERE, **DEFAULTS}
    for key, value in said.items():
        if key not in CHECKS:
            raise unknown_key(path, key, CHECKS)
        settings[key] = CHECKS[key](f"{path}.{key}", value)
    _check_name(f"{path}.name", settings["name"], spread=spread)
    return settings


def _check_name(path: str, name: str, *, spread: bool) -> None:
    if ":" not in name and name not in CONNECTORS:
        near = get_close_matches(name, CONNECTORS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use {', '.join(CONNECTORS)}, or module:Class"
        raise ConfigError(f"{path}: no connector '{name}'; {hint}")
    if name == _WITHIN:
        raise ConfigError(f"{path}: every replica is a process of its own; use {HERE} or {ANYWHERE}, got '{name}'")
    if name == HERE and spread:
        raise ConfigError(f"{path}: replicas may join from other hosts (master_address); use {ANYWHERE}, got '{name}'")
