"""Finds the address of this host that other hosts can reach, and tests whether an address is local."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import cast

from vllm_omni_ext.errors import ConfigError

_FAMILIES = (socket.AF_INET, socket.AF_INET6)

_Address = tuple[str, int] | tuple[str, int, int, int]
"""Socket address as `getaddrinfo` returns it: host and port; for IPv6 also flow and zone."""


def reach(head: str, port: int) -> str:
    """Return the address of this host from which packets to the head are sent, so that the head can reach it.

    Reads the kernel's routes and sends nothing.

    Args:
        head: IPv4 or IPv6 address, or host name, of the process that replicas of this host join. The first address of a
            name that has a route is used.
        port: the head's TCP port.

    Raises:
        ConfigError: the name is unknown or there is no route; the message contains the reason.
    """
    reason = "it has neither an IPv4 nor an IPv6 address"
    for family, address in _resolve(head, port):
        if _ip(address[0]).is_unspecified:
            raise ConfigError(
                f"cluster.master_address: '{head}' stands for all addresses of a host; write one of the head's"
            )
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(_ip(probe.getsockname()[0]))
        except OSError as err:
            reason = str(err.strerror or err)
    raise ConfigError(f"cluster.master_address: no route to '{head}' from this host: {reason}")


def endpoint(host: str, port: int) -> str:
    """Return the ZeroMQ endpoint `tcp://HOST:PORT`, with an IPv6 address in brackets."""
    plain = _unbracketed(host)
    return f"tcp://[{plain}]:{port}" if ":" in plain else f"tcp://{plain}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback addresses; False for an unknown name."""
    try:
        addresses = [address[0] for _, address in _resolve(host, 0)]
    except ConfigError:
        return False
    return bool(addresses) and all(_ip(address).is_loopback for address in addresses)


def is_here(host: str) -> bool:
    """Return whether at least one address of a host belongs to this machine; False for an unknown name."""
    with contextlib.suppress(ConfigError):
        for family, address in _resolve(host, 0):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)  # the kernel refuses to bind to an address of another machine
                return True
    return False


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, _Address]]:
    """Return the IPv4 and IPv6 addresses of a host, in the system's order of preference."""
    try:
        found = socket.getaddrinfo(_unbracketed(host), port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as err:  # UnicodeError: a label that is empty or too long
        reason = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise ConfigError(f"cluster.master_address: '{host}' is not an address or a known name: {reason}") from err
    return [(family, cast(_Address, address)) for family, _, _, _, address in found if family in _FAMILIES]


def _unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; an IPv4 address mapped into IPv6 becomes the IPv4 address."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found
