"""Sends a replica's load to the coordinator as heartbeats, and `Leave` when the replica ends. Runs in the replica.

The coordinator is the process that tracks the states of all replicas. `Reporter` has its own thread, so that the
engine's loop never waits for the network. The coordinator may start later than the replica, and may restart: the socket
reconnects, and the next heartbeat registers the replica.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_ext.coordinator.keys import Keys, Socket, connect
from vllm_omni_ext.coordinator.members import Heartbeat, Leave, Member
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Message, encode
from vllm_omni_ext.pool.load import Load

RETRY_S = 0.2
"""Seconds until a heartbeat that could not be sent is tried again; the heartbeat interval if that is shorter."""

FAREWELL_MS = 200
"""Time limit for sending `Leave` when the replica ends, in milliseconds."""

log = logging.getLogger(__name__)


class Reporter:
    """Sends the heartbeats of one replica from `start` to `stop`.

    Args:
        address: the coordinator's `events` address.
        member: the replica's name and epoch.
        proof: result of `Member.proof`, which the head has sent.
        load: called in the reporter's thread before each heartbeat. If it returns None, the engine is not responding
            and no heartbeat is sent. If it raises, the error is logged and the last load is sent: only the statistics
            have failed, not the replica.
        interval_s: time between two heartbeats, in seconds.
        keys: CURVE keys, if the deployment has a secret.
    """

    def __init__(
        self,
        address: str,
        member: Member,
        proof: str,
        load: Callable[[], Load | None],
        *,
        interval_s: float,
        keys: Keys | None = None,
    ) -> None:
        self._member = member
        self._proof = proof
        self._load = load
        self._interval = interval_s
        self._last_load = Load()
        self._ending = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Socket = connect(self._context, zmq.PUSH, address, keys, limit=MAX_MESSAGE_BYTES)
        self._thread = threading.Thread(target=self._run, name="omni-reporter", daemon=True)

    def start(self) -> None:
        """Start the thread that sends heartbeats; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Send `Leave` and end the thread, in at most some tenths of a second; a second call does nothing."""
        self._ending.set()
        if self._thread.ident is None:  # never started
            self._context.destroy(linger=0)
        else:
            self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        try:
            while not self._ending.wait(pause):
                load = self._read_load()
                sent = load is None or self._send(Heartbeat(self._member, load.within_bounds(), proof=self._proof))
                pause = self._interval if sent else min(RETRY_S, self._interval)
            self._send(Leave(self._member, drain=False, proof=self._proof))
        finally:
            self._context.destroy(linger=FAREWELL_MS)

    def _read_load(self) -> Load | None:
        try:
            load = self._load()
        except Exception:  # the statistics have failed, not the replica
            log.exception("the load of %s cannot be read; its last one is reported", self._member)
            return self._last_load
        self._last_load = load or self._last_load
        return load

    def _send(self, message: Message) -> bool:
        """Send a message to the coordinator; return False if there is no connection."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("no connection to the coordinator; %s was not sent", type(message).__name__)
            return False
        return True
