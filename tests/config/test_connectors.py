"""Settings of the connector of a hand-over."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from vllm_omni_ext.config.connectors import DEFAULTS, LOCAL, ConnectorSettings, connector_settings
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.errors import ConfigError

PATH = "connectors.hidden_states"


@pytest.mark.parametrize(("spread", "name"), [(False, "shared_memory"), (True, "tcp")])
def test_the_default_connector_reaches_all_replicas(spread: bool, name: str) -> None:
    settings = connector_settings(PATH, {}, spread=spread)
    assert settings == {"name": name, **DEFAULTS}
    assert not LOCAL & set(settings), "each process has its own address"
    given = {"name": "mooncake", "capacity_bytes": 1 << 20, "host": "10.0.0.1", "port": 7000, "protocol": "rdma"}
    assert connector_settings(PATH, given, spread=spread) == {"name": "mooncake", **DEFAULTS, **given}


KEYS = {"listening", "connecting", "ports"}


def test_every_field_but_the_keys_can_be_set() -> None:
    written = ConnectorSettings.__annotations__.keys()
    assert {*written, *KEYS} == {field.name for field in fields(ConnectorConfig)}
    assert not KEYS & written, "each process finds its own"
    assert ConnectorConfig(**connector_settings(PATH, {"name": "pkg.mod:Class"}, spread=False)).name == "pkg.mod:Class"


@pytest.mark.parametrize(
    ("given", "spread", "message"),
    [
        ({"nam": "tcp"}, False, "nam: unknown key; did you mean 'name'?"),
        ({"name": 3}, False, "name: must be a non-empty string, got 3"),
        ({"name": "shared-memory"}, False, "name: no connector 'shared-memory'; did you mean"),
        ({"name": "pipe"}, False, "name: no connector 'pipe'; use shared_memory, tcp"),
        ({"name": "in_process"}, False, "name: no connector 'in_process'; use shared_memory, tcp"),
        ({"name": "shared_memory"}, True, "name: replicas may join from other hosts (master_address)"),
        ({"timeout_s": 0}, False, "timeout_s: must be a number of seconds > 0, got 0"),
        ({"capacity_bytes": "1G"}, False, "capacity_bytes: must be an integer >= 1, got '1G'"),
        ({"protocol": "udp"}, False, "protocol: must be 'tcp' or 'rdma', got 'udp'"),
        ({"port": 70000}, False, "port: must be an integer from 1 to 65535, got 70000"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_with_their_place(given: dict[str, Any], spread: bool, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connector_settings(PATH, given, spread=spread)
    assert str(caught.value).startswith(f"{PATH}.{message}")
