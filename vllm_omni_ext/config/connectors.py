"""Settings of the connector of an edge between stages, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict
from typing_extensions import TypedDict

from vllm_omni_ext.config.checks import Count, Port, Positive, Seconds, Text
from vllm_omni_ext.config.parse import checked
from vllm_omni_ext.connectors.base import MIB
from vllm_omni_ext.connectors.registry import check_name
from vllm_omni_ext.errors import ConfigError

HERE, ANYWHERE = "shared_memory", "tcp"
"""Names of the default connectors: between processes of one host, and between hosts."""

DEFAULTS: Mapping[str, Any] = {"capacity_bytes": 1024 * MIB, "timeout_s": 0.8, "retention_s": 600.0}
"""Defaults that differ from `ConnectorConfig`. `timeout_s` is short: stages request only data that is stored."""

LOCAL = frozenset({"host", "port", "device"})
"""Fields that may differ between the two stages of an edge, and between replicas of one stage."""


class ConnectorSettings(TypedDict, total=False):
    """The fields of `ConnectorConfig` that a configuration may set."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    name: Text
    capacity_bytes: Positive
    kept_bytes: Count
    window_bytes: Positive
    timeout_s: Seconds
    retention_s: Seconds
    host: Text
    port: Port
    protocol: Literal["tcp", "rdma"]
    device: Text


def connector_settings(path: str, given: Mapping[str, Any], *, spread: bool) -> dict[str, Any]:
    """Return the fields of an edge's `ConnectorConfig` as plain data, without those that each process sets itself.

    Args:
        path: path of `given` in the configuration, for errors.
        given: the user's settings.
        spread: replicas may be on several hosts.

    Raises:
        ConfigError: a field or connector is unknown, or a value has the wrong type.
    """
    settings = {"name": ANYWHERE if spread else HERE, **DEFAULTS, **checked(ConnectorSettings, given, path=path)}
    check_name(f"{path}.name", settings["name"])
    if settings["name"] == HERE and spread:
        raise ConfigError(
            f"{path}.name: replicas may join from other hosts (master_address); use {ANYWHERE}, got '{HERE}'"
        )
    return settings
