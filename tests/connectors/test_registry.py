"""Connectors by name, and what a configuration may say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.connectors.in_process import InProcess
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import CONNECTORS, connector
from vllm_omni_ext.connectors.shared_memory import SharedMemory
from vllm_omni_ext.errors import ConfigError


def test_a_registered_name_and_an_external_class() -> None:
    assert isinstance(connector(ConnectorConfig(name="shared_memory")), SharedMemory)
    assert isinstance(connector(ConnectorConfig(name="tests.connectors.in_process:InProcess")), InProcess)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("share_memory", "did you mean 'shared_memory'"),
        ("zzz", "there are shared_memory"),
        ("no.such:Thing", "cannot be imported"),
        ("pathlib:Path", "is no Connector"),
    ],
)
def test_a_wrong_name_says_what_to_write(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        connector(ConnectorConfig(name=name))


@pytest.mark.parametrize(
    "wrong", [{"capacity_bytes": 0}, {"timeout_s": -1.0}, {"protocol": "udp"}, {"port": 70000}, {"retention_s": 0.0}]
)
def test_a_wrong_value_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ConnectorConfig(name="tcp", **wrong)  # type: ignore[arg-type]


@pytest.mark.engine
def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, vllm_omni_ext.connectors.registry as r;"
        "r.connector(r.ConnectorConfig(name='tests.connectors.in_process:InProcess')).producer('e');"
        "print([m for m in ('torch', 'zmq', 'mooncake', 'vllm') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    assert set(CONNECTORS) == {"shared_memory", "tcp", "mooncake"}
