"""Settings of connectors and their defaults. A connector transfers tensors from one stage to another."""

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
"""Defaults that differ from those of `connectors.base.ConnectorConfig`.

`timeout_s` is short because a stage requests only tensors that are stored already.
"""

LOCAL = frozenset({"host", "port", "device"})
"""Keys of `ConnectorSettings` that may differ between the two stages of an edge, and between replicas of one stage."""


class ConnectorSettings(TypedDict, total=False):
    """The keys of `connectors.EDGE` in a stage config; `connectors.base.ConnectorConfig` describes them."""

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
    """Return the settings of one edge's connector: defaults, overridden by the user's settings.

    Each process makes its `connectors.base.ConnectorConfig` from the result, and adds CURVE keys and ports.

    Args:
        path: path of `given` in the configuration, for errors.
        given: the user's settings.
        spread: replicas may be on several hosts, so the default connector is TCP instead of shared memory.

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
