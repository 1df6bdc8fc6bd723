"""Addresses as the kernel's routes have them. Nothing here leaves this host."""

from __future__ import annotations

import ipaddress
import socket

import pytest
import zmq

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.runtime.launch import addresses
from vllm_omni_ext.runtime.launch.addresses import endpoint, is_loopback, reach

needs_ipv6 = pytest.mark.needs("IPv6")


@pytest.mark.parametrize(
    ("head", "here"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.9", "127.0.0.1"),
        pytest.param("::1", "::1", marks=needs_ipv6),
        pytest.param("[::1]", "::1", marks=needs_ipv6),
        pytest.param("::ffff:127.0.0.1", "127.0.0.1", marks=needs_ipv6),
    ],
)
def test_reach(head: str, here: str) -> None:
    assert reach(head, 9100) == here


def test_reach_a_name() -> None:
    assert reach("localhost", 9100) in {"127.0.0.1", "::1"}


def test_nothing_is_sent() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as head:
        head.bind(("127.0.0.1", 0))
        head.setblocking(False)
        assert reach("127.0.0.1", head.getsockname()[1]) == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            head.recv(1)


def test_an_address_without_route_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name has an IPv6 address and this host has no IPv6."""
    dead = (socket.AF_INET6, ("fe80::1", 9100, 0, 0))  # link-local without a link
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [dead, (socket.AF_INET, ("127.0.0.1", 9100))])
    assert reach("head", 9100) == "127.0.0.1"
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [dead])
    with pytest.raises(ConfigError, match=r"^master_address: no route to 'head' from this host: \w"):
        reach("head", 9100)
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [])
    with pytest.raises(
        ConfigError, match=r"^master_address: no route to 'head' from this host: it has neither an IPv4"
    ):
        reach("head", 9100)


@pytest.mark.parametrize(
    "nonsense", ["", " ", "256.1.1.1", "no.such.name.invalid", "a..b", "x" * 300, "[::1", "tcp://h"]
)
def test_nonsense(nonsense: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reach(nonsense, 9100)
    assert str(caught.value).startswith(f"master_address: '{nonsense}' is not an address or a known name: ")
    assert not is_loopback(nonsense)


@pytest.mark.parametrize("everything", ["0.0.0.0", "::"])
def test_all_addresses_are_nowhere(everything: str) -> None:
    with pytest.raises(ConfigError, match=r"stands for all addresses of a host; write one of the head's$"):
        reach(everything, 9100)
    assert not is_loopback(everything)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:9100"),
        ("head.example", "tcp://head.example:9100"),
        ("::1", "tcp://[::1]:9100"),
        ("[::1]", "tcp://[::1]:9100"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:9100"),
    ],
)
def test_endpoint(host: str, text: str) -> None:
    assert endpoint(host, 9100) == text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6)])
def test_an_endpoint_is_what_zeromq_takes(host: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        for end in (here, there):
            end.linger, end.ipv6, end.rcvtimeo = 0, ":" in host, 5000
        port = here.bind_to_random_port(endpoint(host, 0).removesuffix(":0"))
        there.connect(endpoint(host, port))
        there.send(b"x")
        assert here.recv() == b"x"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.2.1", "2001:db8::1", "::ffff:10.0.0.1", "no.such.name.invalid"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_an_address_of_another_host_is_reached_from_none_of_loopback() -> None:
    try:
        found = reach("192.0.2.1", 9100)  # TEST-NET-1: routed like any other, owned by nobody
    except ConfigError as err:
        assert "no route to '192.0.2.1' from this host: " in str(err)
    else:
        assert not ipaddress.ip_address(found).is_loopback
