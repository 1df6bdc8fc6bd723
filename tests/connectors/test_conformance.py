"""The public suite, on the connectors that need nothing special."""

from __future__ import annotations

from vllm_omni_ext.connectors.base import ConnectorConfig
from vllm_omni_ext.connectors.conformance import Conformance
from vllm_omni_ext.coordinator.keys import Keys

KEYS = Keys.derive(b"correct horse battery staple")


class TestInProcess(Conformance):
    config = ConnectorConfig(name="tests.connectors.in_process:InProcess")
    processes = False


class TestSharedMemory(Conformance):
    config = ConnectorConfig(name="shared_memory")


class TestTcp(Conformance):
    config = ConnectorConfig(name="tcp")


class TestTcpWithKeys(Conformance):
    config = ConnectorConfig(name="tcp", listening=KEYS.listening, connecting=KEYS.connecting)
