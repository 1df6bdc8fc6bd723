"""File descriptors sent from the head to its API servers through a pipe, along with its messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection

COME_WITHIN_S = 5.0
"""Limit of the wait for descriptors after their message: they are sent directly after it."""


def send_descriptors(pipe: Connection, descriptors: Sequence[int]) -> None:
    """Send file descriptors through a duplex pipe, after a message that announces them."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        reduction.sendfds(channel, list(descriptors))


def receive_descriptors(pipe: Connection, count: int) -> list[int]:
    """Receive announced file descriptors. The caller must close them.

    The descriptors may arrive a moment after their message, and an event loop that watches the pipe makes it
    non-blocking.
    """
    pipe.poll(COME_WITHIN_S)
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        return list(reduction.recvfds(channel, count))
