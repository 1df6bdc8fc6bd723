"""Ranges of ports, and sockets within them."""

from __future__ import annotations

import errno
import socket

import pytest
import zmq

from vllm_omni_ext.ports import ANY, bind_within, port_range


@pytest.mark.parametrize(
    ("text", "ports"), [("20000-20099", (20000, 20099)), (" 1-65535 ", (1, 65535)), ("7-7", (7, 7))]
)
def test_a_range_has_a_first_and_a_last_port(text: str, ports: tuple[int, int]) -> None:
    assert port_range(text) == ports


@pytest.mark.parametrize("text", ["", "20000", "2-1", "0-5", "1-65536", "a-b", "1-2-3", "1,2", "-1-5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        port_range(text)


def test_all_free_ports_of_a_range_are_found_and_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (port - 2, min(port + 2, 65535))
        made, context = [], zmq.Context()
        try:
            with pytest.raises(
                OSError, match=f"all ports of cluster.port_range {ports[0]}-{ports[1]} are in use"
            ) as caught:
                while True:
                    made.append(bind_within(ports, lambda each: socket.create_server(("127.0.0.1", each))))
            assert caught.value.errno == errno.EADDRINUSE
            found = {each.getsockname()[1] for each in made}
            assert port not in found and len(found) == len(made) <= 4 and all(ports[0] <= p <= ports[1] for p in found)
            with pytest.raises(OSError, match="are in use"):
                router = context.socket(zmq.ROUTER)
                bind_within(ports, lambda each: router.bind(f"tcp://127.0.0.1:{each}"))
        finally:
            context.destroy(linger=0)
            for each in made:
                each.close()


def test_without_a_range_the_system_chooses() -> None:
    assert bind_within(None, lambda port: port) == ANY


def test_another_error_is_not_one_of_a_port() -> None:
    def bind(port: int) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    with pytest.raises(OSError, match="no such address"):
        bind_within((1, 9), bind)
