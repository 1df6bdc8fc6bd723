"""The listener of `OmniNixlConnector` gets a port that no process uses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

from tests.support.cluster import free_ports
from vllm_omni_ext.disaggregation import nixl_connector
from vllm_omni_ext.disaggregation.nixl_connector import OmniNixlConnector

HOST = "127.0.0.1"


@pytest.fixture
def connector() -> Iterator[OmniNixlConnector]:
    """A connector whose scheduler has only the parts that listen."""
    made = OmniNixlConnector.__new__(OmniNixlConnector)
    scheduler = made.connector_scheduler = object.__new__(NixlBaseConnectorScheduler)
    scheduler.side_channel_host, scheduler.side_channel_port = HOST, 5600
    scheduler._nixl_handshake_listener_t, scheduler._stop_event = None, threading.Event()
    scheduler._handshake_data = {}  # vLLM 0.33
    yield made
    scheduler._stop_event.set()
    if scheduler._nixl_handshake_listener_t is not None:
        scheduler._nixl_handshake_listener_t.join()


def listens(connector: OmniNixlConnector) -> bool:
    with socket.create_connection((HOST, connector.connector_scheduler.side_channel_port), timeout=5):
        return True


@pytest.mark.slow
def test_the_listener_takes_the_only_free_port_of_the_range(
    connector: OmniNixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_ports(3)
    monkeypatch.setattr(nixl_connector, "own_ports", lambda: (first, first + 2))
    with socket.create_server((HOST, first)), socket.create_server((HOST, first + 2)):
        connector.set_xfer_handshake_metadata_pp_aware({})
        assert connector.connector_scheduler.side_channel_port == first + 1 and listens(connector)


def test_a_range_without_a_free_port_is_an_error_and_no_endless_wait(
    connector: OmniNixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_ports(1)
    monkeypatch.setattr(nixl_connector, "own_ports", lambda: (first, first))
    with socket.create_server((HOST, first)), pytest.raises(OSError, match="all ports"):
        connector.set_xfer_handshake_metadata_pp_aware({})


@pytest.mark.slow
def test_without_a_range_the_system_chooses_the_port(
    connector: OmniNixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_connector, "own_ports", lambda: None)
    connector.set_xfer_handshake_metadata_pp_aware({})
    assert connector.connector_scheduler.side_channel_port != 5600 and listens(connector)


def test_an_error_after_the_start_of_the_listener_is_not_hidden(
    connector: OmniNixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its socket fails while it serves."""
    failed: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_type))

    def listen(data: object, ready: threading.Event, *_: object) -> None:
        ready.set()
        raise zmq.ZMQError(zmq.ETERM)

    monkeypatch.setattr(nixl_connector, "own_ports", lambda: None)
    connector.connector_scheduler._nixl_handshake_listener = listen
    connector.set_xfer_handshake_metadata_pp_aware({})
    connector.connector_scheduler._nixl_handshake_listener_t.join()
    assert failed == [zmq.ZMQError]
