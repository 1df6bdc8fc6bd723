"""Creates connectors by name. A connector's module is imported at its first use, since each needs another library."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

from vllm_omni_ext.connectors.base import Connector, ConnectorConfig
from vllm_omni_ext.errors import ConfigError

CONNECTORS = {
    "shared_memory": "vllm_omni_ext.connectors.shared_memory:SharedMemory",
    "tcp": "vllm_omni_ext.connectors.tcp:Tcp",
    "mooncake": "vllm_omni_ext.connectors.mooncake:Mooncake",
}
"""`module:class` of each connector name. A connector that is not in this table is configured by its `module:class`."""


def check_name(path: str, name: str) -> None:
    """Raise ConfigError, with `path` of the setting, unless `name` is in `CONNECTORS` or is a `module:class`."""
    if ":" not in name and name not in CONNECTORS:
        near = get_close_matches(name, CONNECTORS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"use {', '.join(CONNECTORS)}, or module:Class"
        raise ConfigError(f"{path}: no connector '{name}'; {hint}")


def connector(config: ConnectorConfig) -> Connector:
    """Create the configured connector; ConfigError if its name is unknown or its library cannot be imported."""
    check_name("connector.name", config.name)
    place = CONNECTORS.get(config.name, config.name)
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"connector.name: '{place}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Connector)):
        raise ConfigError(f"connector.name: '{place}' is no Connector")
    made: Connector = found(config)
    return made
