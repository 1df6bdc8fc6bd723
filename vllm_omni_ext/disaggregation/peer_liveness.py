"""Detects the end of a prefill worker's process through an otherwise unused connection to it.

The operating system closes the connections of a process that ends, but not those of a process that is only stopped or
busy. So a closed connection proves that the process sends no more; a missing reply does not. TCP keep-alive probes
detect a host that is down. For a stopped process, the operating system still answers the probes.
"""

from __future__ import annotations

import asyncio
import logging

import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_PROBES = 3

ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def has_unread_input() -> bool:
    """Return whether an ended process has sent data to this process that may not be read yet.

    The operating system keeps a connection that its other end has closed (CLOSE_WAIT) until this process has read its
    data and closes it. Only connections to this process's listening ports count.
    """
    ports = {own.laddr.port for own in psutil.Process().net_connections("tcp") if own.status == psutil.CONN_LISTEN}
    return any(
        each.status == psutil.CONN_CLOSE_WAIT and each.laddr.port in ports for each in psutil.net_connections("tcp")
    )


class PeerLiveness:
    """Keeps one connection to each queried prefill worker until the worker ends. Used by one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._watching: set[asyncio.Task[None]] = set()

    def gone(self, address: str) -> asyncio.Future[None]:
        """Return a future that is done when the process listening at the address has ended."""
        known = self._gone.get(address)
        if known is None:
            known = self._gone[address] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._watch(address, known))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return known

    def close(self) -> None:
        """Close all connections; the loop's tasks must have ended. May be called twice."""
        self._context.destroy(linger=0)

    async def _watch(self, address: str, gone: asyncio.Future[None]) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        monitor = socket.get_monitor_socket(ENDED)
        try:
            socket.connect(address)
            await recv_monitor_message(monitor)
            log.warning("the prefill worker at %s is gone", address)
        finally:
            del self._gone[address]
            if not gone.done():
                gone.set_result(None)
            socket.disable_monitor()
            socket.close()
