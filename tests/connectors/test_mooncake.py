"""Mooncake over TCP. Its engine listens on all interfaces, so the suite runs in a namespace with loopback only."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest

from tests.support.nested import run_suite
from vllm_omni_ext.connectors import mooncake
from vllm_omni_ext.connectors.base import MIB, ConnectorConfig
from vllm_omni_ext.connectors.registry import connector
from vllm_omni_ext.errors import ConfigError

SUITE = Path(__file__).with_name("mooncake_suite.py")
TIMEOUT_S = 600


@pytest.mark.engine
@pytest.mark.needs("library mooncake.engine", "isolation")
def test_the_suite() -> None:
    run_suite(SUITE, "-x", timeout_s=TIMEOUT_S)


class Engine:
    """Stands in for Mooncake's; its first read fails."""

    def __init__(self) -> None:
        self.reads = 0

    def register_memory(self, *args: object) -> int:
        return 0

    def unregister_memory(self, *args: object) -> None: ...

    def transfer_sync_read(self, *args: object) -> int:
        self.reads += 1
        if self.reads == 1:
            raise OSError("no route")
        return 0


def test_a_read_with_an_exception_fails_no_later_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(mooncake, "_engine", lambda *args: (engine, "here"))
    with mooncake.MooncakeConsumer("edge", ConnectorConfig(name="mooncake", window_bytes=MIB)) as consumer:
        deadline = time.monotonic() + 60
        with pytest.raises(OSError, match="no route"):
            consumer._transfer("there", 0, 8, deadline)
        consumer._transfer("there", 0, 8, deadline)


def test_without_the_library_the_error_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("vllm_omni_ext.connectors.mooncake")
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"vllm-omni-ext\[mooncake\].*libibverbs1"):
        connector(ConnectorConfig(name="mooncake"))
