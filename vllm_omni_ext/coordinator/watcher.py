"""Receives the coordinator's views (states of all replicas) in an API server, and measures the age of the newest
one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from vllm_omni_ext.coordinator.keys import Keys, connect
from vllm_omni_ext.coordinator.members import VIEWS, Change, View, ViewDiff
from vllm_omni_ext.encoding import MAX_VIEW_BYTES, Malformed

BUSY_S = 1.0
"""If a wait takes this many seconds longer than its timeout, this process itself was busy or stopped, so the wait is
not counted in `View.timeout_s`."""

log = logging.getLogger(__name__)


class Watcher:
    """Receives the coordinator's views: an asynchronous iterator over (view, changes since the last view).

    If no view arrives within `View.timeout_s`, the last view is yielded once more, without its outdated loads. The
    iteration continues when the coordinator has restarted.

    Args:
        address: the coordinator's `views` address.
        keys: CURVE keys, if the deployment has a secret.
        clock: returns monotonic seconds.
    """

    def __init__(self, address: str, *, keys: Keys | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = 0
        self._clock = clock
        self._follower = ViewDiff()
        self._received_at = -math.inf
        self._stale = True
        self._delayed = 0.0
        """Seconds since the last view in which this process was delayed; they are not counted in `View.timeout_s`."""
        self._context = zmq.asyncio.Context()
        self._socket: Any = connect(self._context, zmq.SUB, address, keys, limit=MAX_VIEW_BYTES)

    @property
    def view(self) -> View | None:
        """The last view; None before the first view has arrived."""
        return self._follower.view

    def age(self) -> float:
        """Seconds since the last view arrived; infinite before the first view has arrived."""
        return self._clock() - self._received_at

    @property
    def fresh(self) -> bool:
        """Whether the last view is younger than `View.timeout_s`, so that the loads in it may be used."""
        return self.view is not None and self.age() < self.view.timeout_s

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> tuple[View, list[Change]]:
        """Return (next view, changes since the last view). The iteration ends when `close` has been called."""
        while not self._socket.closed:
            wait_ms, began = self._wait_ms(), self._clock()
            try:
                arrived = await self._socket.poll(wait_ms)
            except asyncio.CancelledError:
                if self._socket.closed and not _is_cancelled():  # `close` cancels the pending poll
                    break
                raise
            if not arrived:
                waited = self._clock() - began
                if wait_ms is not None and waited > wait_ms / 1000 + BUSY_S:
                    self._delayed += waited
                stale = self._expire()
                if stale is not None:
                    return stale, []
                continue
            try:
                view = VIEWS.decode(await self._socket.recv())
            except Malformed as error:
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:  # at powers of two
                    log.warning("ignored %d messages that are no views; the last: %s", self.dropped, error)
                continue
            self._received_at, self._stale, self._delayed = self._clock(), False, 0.0
            changes = self._follower.take(view)
            return self.view or view, changes
        raise StopAsyncIteration

    def _wait_ms(self) -> float | None:
        """Return the milliseconds until the last view is too old; None if it is too old already or none has arrived."""
        if self._stale or self.view is None:
            return None
        return max(0.0, math.ceil((self.view.timeout_s + self._delayed - self.age()) * 1000))

    def _expire(self) -> View | None:
        if self.view is None or self.age() < self.view.timeout_s + self._delayed:
            return None
        self._stale = True
        log.warning("no message from the coordinator for %.1f s: loads are not used until the next one", self.age())
        return self._follower.without_loads()

    def close(self) -> None:
        """Close the connection; the iteration ends."""
        self._context.destroy(linger=0)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
