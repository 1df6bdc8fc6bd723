"""The public suite of connectors, on those that need nothing special; connectors by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.conformance import Conformance
from vllm_omni_ext.connectors.registry import CONNECTORS, connector
from vllm_omni_ext.connectors.shared_memory import SharedMemory
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.errors import ConfigError

KEYS = Keys.derive(b"correct horse battery staple")


@pytest.mark.slow
class TestSharedMemory(Conformance):
    config = ConnectorConfig(name="shared_memory")


@pytest.mark.slow
class TestTcp(Conformance):
    config = ConnectorConfig(name="tcp")


@pytest.mark.slow
class TestTcpWithKeys(Conformance):
    config = ConnectorConfig(name="tcp", listening=KEYS.listening, connecting=KEYS.connecting)


def test_a_connector_is_found_by_its_name_or_its_class() -> None:
    assert isinstance(connector(ConnectorConfig(name="shared_memory")), SharedMemory)
    assert isinstance(connector(ConnectorConfig(name=CONNECTORS["shared_memory"])), SharedMemory)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("share_memory", "did you mean 'shared_memory'"),
        ("zzz", "use shared_memory"),
        ("no.such:Thing", "cannot be imported"),
        ("pathlib:Path", "is no Connector"),
    ],
)
def test_an_unknown_connector_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        connector(ConnectorConfig(name=name))


@pytest.mark.parametrize(
    "wrong", [{"capacity_bytes": 0}, {"timeout_s": -1.0}, {"protocol": "udp"}, {"port": 70000}, {"retention_s": 0.0}]
)
def test_a_wrong_value_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ConnectorConfig(name="tcp", **wrong)  # type: ignore[arg-type]


@pytest.mark.engine
def test_the_base_of_all_connectors_imports_nothing_heavy() -> None:
    code = (
        "import sys, vllm_omni_ext.connectors.registry, vllm_omni_ext.connectors.base;"
        "print([m for m in ('torch', 'zmq', 'mooncake', 'vllm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
