"""Addresses by the kernel's routes. No packet leaves this host."""

from __future__ import annotations

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
def test_the_local_address_that_reaches_the_head_is_found(head: str, here: str) -> None:
    assert reach(head, 9100) == here


def test_finding_the_local_address_sends_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as head:
        head.bind(("127.0.0.1", 0))
        head.setblocking(False)
        assert reach("localhost", head.getsockname()[1]) in {"127.0.0.1", "::1"}
        assert reach("127.0.0.1", head.getsockname()[1]) == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            head.recv(1)


def test_an_address_without_a_route_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name has an IPv6 address and this host has no IPv6."""
    dead = (socket.AF_INET6, ("fe80::1", 9100, 0, 0))  # link-local without a link
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [dead, (socket.AF_INET, ("127.0.0.1", 9100))])
    assert reach("head", 9100) == "127.0.0.1"
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [dead])
    with pytest.raises(ConfigError, match=r"^cluster.master_address: no route to 'head' from this host: \w"):
        reach("head", 9100)
    monkeypatch.setattr(addresses, "_resolve", lambda host, port: [])
    with pytest.raises(ConfigError, match=r"no route to 'head' from this host: it has neither an IPv4"):
        reach("head", 9100)


@pytest.mark.parametrize(
    "text", ["", " ", "256.1.1.1", "no.such.name.invalid", "a..b", "x" * 300, "[::1", "tcp://h", "0.0.0.0", "::"]
)
def test_a_text_that_is_no_address_or_the_wildcard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reach(text, 9100)
    reason = "stands for all addresses" if text in ("0.0.0.0", "::") else "is not an address or a known name: "
    assert str(caught.value).startswith(f"cluster.master_address: '{text}' {reason}")
    assert not is_loopback(text)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:9100"),
        ("localhost", "tcp://localhost:9100"),
        pytest.param("::1", "tcp://[::1]:9100", marks=needs_ipv6),
        pytest.param("[::1]", "tcp://[::1]:9100", marks=needs_ipv6),
    ],
)
def test_zeromq_accepts_the_endpoint_of_an_address(host: str, text: str) -> None:
    assert endpoint(host, 9100) == text
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        for end in (here, there):
            end.linger, end.ipv6, end.rcvtimeo = 0, ":" in host, 5000
        port = here.bind_to_random_port(endpoint(host, 0).removesuffix(":0"))
        there.connect(endpoint(host, port))
        there.send(b"x")
        assert here.recv() == b"x"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "::ffff:127.0.0.1")),
        *(
            (host, False)
            for host in ("10.0.0.1", "192.0.2.1", "2001:db8::1", "::ffff:10.0.0.1", "no.such.name.invalid")
        ),
    ],
)
def test_loopback_addresses_are_recognised(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
