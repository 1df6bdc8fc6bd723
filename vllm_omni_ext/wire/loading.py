"""State of a starting replica, which its process sends to its parent: datagrams on a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "OMNI_LOADING"
"""The environment variable with the socket's path and the replica's name, separated by a blank."""

SEND_WITHIN_S = 0.2
"""How long sending a report may wait: the system queues few datagrams."""


def variable(path: str, replica: str) -> dict[str, str]:
    """Return the environment variable for a replica's process."""
    return {VARIABLE: f"{path} {replica}"}


def report(state: str) -> None:
    """Send the state of this process's replica. Without the variable, or if no process listens, this does nothing."""
    path, _, replica = os.environ.get(VARIABLE, "").rpartition(" ")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_WITHIN_S)
            sender.sendto(f"{replica} {state}".encode(), path)
