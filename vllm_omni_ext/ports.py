"""Chooses TCP ports for listeners that other hosts reach: any port, or one of a range that a firewall allows."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

ANY = 0
"""Port number with which the system chooses a free port."""

EVENTS_PORT, VIEWS_PORT = 1, 2
"""Offsets from the head's port to the coordinator's ports for heartbeats and for views (states of all replicas)."""

LAST_PORT = 65535

MOONCAKE_VARIABLES = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
"""Environment variables with the first and the last port of Mooncake's engine, which listens on 2 of them."""

UCX_VARIABLE = "UCX_TCP_PORT_RANGE"
"""Environment variable with the ports, `first-last`, of UCX, which NIXL uses. UCX listens on one port of each network
interface, and tries another one if a port is in use."""

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")


def port_range(text: str) -> tuple[int, int]:
    """Parse `20000-20099`: first and last port.

    Raises:
        ValueError: the text is not a range of ports.
    """
    match = _RANGE.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= LAST_PORT:
        raise ValueError(text)
    return first, last


def bind_within(ports: Sequence[int] | None, bind: Callable[[int], T]) -> T:
    """Call `bind` with ports until one is free, and return its result.

    Args:
        ports: first and last port, tried in a random order; None: `bind` is called once, with `ANY`.
        bind: raises an error with `errno.EADDRINUSE` if a port is in use.

    Raises:
        OSError: all ports are in use.
    """
    if ports is None:
        return bind(ANY)
    first, last = ports
    for port in random.sample(range(first, last + 1), last + 1 - first):
        try:
            return bind(port)
        except Exception as error:  # OSError, or ZMQError, which is no OSError
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports of cluster.port_range {first}-{last} are in use")
