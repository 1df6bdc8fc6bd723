"""What may be said about a hand-over's connector."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from vllm_omni_ext.config.connectors import DEFAULTS, LOCAL, ConnectorSettings, connector_settings
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.errors import ConfigError

PATH = "connectors.hidden_states"


@pytest.mark.parametrize(("spread", "name"), [(False, "shared_memory"), (True, "tcp")])
def test_what_nobody_has_said(spread: bool, name: str) -> None:
    settings = connector_settings(PATH, {}, spread=spread)
    assert settings == {"name": name, **DEFAULTS}
    assert not LOCAL & set(settings), "where it listens, each process knows best"
    assert settings["timeout_s"] < 1, "a lost chunk is noticed within a second"


def test_what_was_said_wins() -> None:
    said = {"name": "mooncake", "capacity_bytes": 1 << 20, "host": "10.0.0.1", "port": 7000, "protocol": "rdma"}
    assert connector_settings(PATH, said, spread=True) == {"name": "mooncake", **DEFAULTS, **said}


KEYS = {"listening", "connecting"}


def test_every_field_but_the_keys_may_be_said_and_is_one() -> None:
    written = ConnectorSettings.__annotations__.keys()
    assert {*written, *KEYS} == {field.name for field in fields(ConnectorConfig)}
    assert not KEYS & written, "each process finds its own"
    assert ConnectorConfig(**connector_settings(PATH, {"name": "pkg.mod:Class"}, spread=False)).name == "pkg.mod:Class"


@pytest.mark.parametrize(
    ("said", "spread", "message"),
    [
        ({"nam": "tcp"}, False, "connectors.hidden_states.nam: unknown key; did you mean 'name'?"),
        ({"name": 3}, False, "connectors.hidden_states.name: must be a non-empty string, got 3"),
        ({"name": "shared-memory"}, False, "connectors.hidden_states.name: no connector 'shared-memory'; did you mean"),
        ({"name": "pipe"}, False, "connectors.hidden_states.name: no connector 'pipe'; use shared_memory, tcp"),
        (
            {"name": "in_process"},
            False,
            "connectors.hidden_states.name: no connector 'in_process'; use shared_memory, tcp",
        ),
        (
            {"name": "shared_memory"},
            True,
            "connectors.hidden_states.name: replicas may join from other hosts (master_address)",
        ),
        ({"timeout_s": 0}, False, "connectors.hidden_states.timeout_s: must be a number of seconds > 0, got 0"),
        ({"capacity_bytes": "1G"}, False, "connectors.hidden_states.capacity_bytes: must be an integer >= 1, got '1G'"),
        ({"protocol": "udp"}, False, "connectors.hidden_states.protocol: must be 'tcp' or 'rdma', got 'udp'"),
        ({"port": 70000}, False, "connectors.hidden_states.port: must be an integer from 1 to 65535, got 70000"),
    ],
    ids=str,
)
def test_what_is_refused(said: dict[str, Any], spread: bool, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connector_settings(PATH, said, spread=spread)
    assert str(caught.value).startswith(message)
