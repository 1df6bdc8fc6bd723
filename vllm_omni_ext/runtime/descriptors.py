"""Open files passed from the head to its API servers, beside the messages of a pipe."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection

COME_WITHIN_S = 5.0
"""They are sent directly after the message."""


def send_descriptors(pipe: Connection, descriptors: Sequence[int]) -> None:
    """Send file descriptors through a duplex pipe, after a message that announces them."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        reduction.sendfds(channel, list(descriptors))


def receive_descriptors(pipe: Connection, count: int) -> list[int]:
    """Receive file descriptors that were announced; they are the caller's to close.

    An event loop that watches a pipe makes it non-blocking, and they may come a moment after their message.
    """
    pipe.poll(COME_WITHIN_S)
    with socket.socket(fileno=os.dup(pipe.fileno())) as channel:
        return list(reduction.recvfds(channel, count))
