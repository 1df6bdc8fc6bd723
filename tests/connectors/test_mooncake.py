"""Mooncake over TCP. Its engine listens on all interfaces, so the suite runs in a namespace with loopback only."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.support.nested import run_suite
from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.errors import ConfigError

SUITE = Path(__file__).with_name("mooncake_suite.py")
TIMEOUT_S = 600


@pytest.mark.engine
@pytest.mark.needs("library mooncake.engine", "isolation")
def test_the_suite() -> None:
    run_suite(SUITE, "-x", timeout_s=TIMEOUT_S)


def test_without_the_library_the_error_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("vllm_omni_ext.connectors.mooncake")
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"vllm-omni-ext\[mooncake\].*libibverbs1"):
        connector(ConnectorConfig(name="mooncake"))
