"""Sends the progress of a replica's start from its process to the parent process, as datagrams on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "OMNI_LOADING"
"""Name of the environment variable with the socket's path and the replica's name, separated by a blank."""

SEND_WITHIN_S = 0.2
"""Longest wait for sending a report, in seconds; the system queues few datagrams."""


def variable(path: str, replica: str) -> dict[str, str]:
    """Return {name: value} of the environment variable that a replica's process needs for `report`.

    Args:
        path: path of the parent's socket.
        replica: name of the replica.
    """
    return {VARIABLE: f"{path} {replica}"}


def report(state: str) -> None:
    """Send the state of this process's replica, e.g. "warming up", to the parent process.

    Does nothing without the environment variable `VARIABLE`, or if no process listens.
    """
    path, _, replica = os.environ.get(VARIABLE, "").rpartition(" ")
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_WITHIN_S)
            sender.sendto(f"{replica} {state}".encode(), path)
