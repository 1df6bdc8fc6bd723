"""Is a prefill worker's process still there? A connection to it that carries nothing tells, at once.

The system closes the connections of a process that ends, however it ends, but not those of one that is merely stopped
or busy: this is why it is a proof that nothing more comes from there, and silence is not. A host that has vanished is
noticed by keep-alive probes, which the system of a stopped process still answers.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

KEEPALIVE_IDLE_S = 10
KEEPALIVE_EVERY_S = 5
KEEPALIVE_PROBES = 3

ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Lines:
    """One connection to each worker that was asked, until it ends. Used by one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._watching: set[asyncio.Task[None]] = set()

    def gone(self, address: str) -> asyncio.Future[None]:
        """Done when the process that listens there, now, is gone."""
        known = self._gone.get(address)
        if known is None:
            known = self._gone[address] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._watch(address, known))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
        return known

    def close(self) -> None:
        """Hang up, when the tasks of the loop have ended. May be called twice."""
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
