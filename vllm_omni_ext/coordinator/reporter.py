"""A replica's client of the coordinator: registers the replica, reports its load and disconnects it.

Everything runs in a thread of its own, so that the engine's loop never waits for the network. The coordinator may
start later than the replica, and may restart: the reporter connects and registers again.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from msgspec.structs import replace

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import (
    TO_REPLICA,
    Admitted,
    Heartbeat,
    Leave,
    Member,
    NotYet,
    Refused,
    Register,
    RegisterAgain,
    Released,
)
from vllm_omni_ext.coordinator.sockets import Socket, connect
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.coordination import MAX_REPLY_BYTES, Malformed, Message, encode

REGISTER_AGAIN_S = 0.5
"""An unanswered registration is sent again after this time."""

REFUSED_AGAIN_S = 10.0
"""A refused replica registers again after this time: the head may be restarted with another configuration."""

FAREWELL_MS = 200
"""How long sending the last message may take when the replica ends."""

log = logging.getLogger(__name__)


class Reporter:
    """Keeps one replica registered with the coordinator.

    Args:
        address: the coordinator's `events` address.
        replica: the registration; `instance` must be new for every process.
        load: called in the reporter's thread before each heartbeat. If it returns None, the engine is not responding
            and no heartbeat is sent. If it raises, the error is logged and the last load is sent: a replica whose
            statistics fail still works.
        index: the preferred index, e.g. that of the plan.
        keys: needed if the coordinator has a secret.
        admitted: called in the reporter's thread whenever the coordinator assigns a name.
    """

    def __init__(
        self,
        address: str,
        replica: Register,
        load: Callable[[], Load | None],
        *,
        index: int | None = None,
        keys: Keys | None = None,
        admitted: Callable[[Member], None] = lambda member: None,
    ) -> None:
        self._replica = replica
        self._load = load
        self._admitted = admitted
        self._index = index
        self._epoch: int | None = None
        self._member: Member | None = None
        self._known = False
        self._refusal = ""
        self._last_load = Load()
        self._interval = REGISTER_AGAIN_S
        self._leaving = False
        self._ending = False
        self.released = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Socket = connect(self._context, zmq.DEALER, address, keys, limit=MAX_REPLY_BYTES)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="omni-reporter", daemon=True)

    @property
    def member(self) -> Member | None:
        """This replica's name and epoch; None before it is admitted. Changes if the coordinator had forgotten it."""
        return self._member

    @property
    def refusal(self) -> str:
        """Why the coordinator refuses this replica; empty if it does not."""
        return self._refusal

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def drain(self) -> None:
        """Announce that the replica leaves and takes no new requests. Returns at once.

        `released` is set when the last request has ended.
        """
        self._leaving = True
        if not self._ending:
            os.write(self._waker, b".")

    def stop(self) -> None:
        """Deregister and end; unfinished requests are lost. Takes a fraction of a second."""
        if self._ending:
            return
        self._ending = True
        os.write(self._waker, b".")
        if self._thread.ident is None:  # never started
            self._context.destroy(linger=0)
        else:
            self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, select.POLLIN)
        due = time.monotonic()
        try:
            while not self._ending:
                now = time.monotonic()
                if now >= due:
                    due = now + self._speak()
                ready = dict(poller.poll(math.ceil(max(0.0, due - now) * 1000)))
                if self._wake in ready:
                    os.read(self._wake, 16)
                    due = now
                if self._socket in ready and self._hear():
                    due = now
            if self._known and self._member is not None and not self.released.is_set():
                self._send(Leave(self._member, drain=False, proof=self._replica.instance))
        finally:
            self._context.destroy(linger=FAREWELL_MS)

    def _speak(self) -> float:
        """Send the messages that are due; return the seconds until the next ones."""
        if self.released.is_set():
            return REFUSED_AGAIN_S
        if self._member is None or not self._known:
            self._send(replace(self._replica, index=self._index, epoch=self._epoch))
            return REFUSED_AGAIN_S if self._refusal else REGISTER_AGAIN_S
        if self._leaving:
            self._send(Leave(self._member, drain=True, proof=self._replica.instance))
        load = self._ask()
        if load is not None:
            self._send(Heartbeat(self._member, load.within_bounds(), proof=self._replica.instance))
        return self._interval

    def _ask(self) -> Load | None:
        try:
            load = self._load()
        except Exception:  # any error here is one of the statistics, not of the replica
            log.exception("the load of %s cannot be read; its last one is reported", self._member)
            return self._last_load
        self._last_load = load or self._last_load
        return load

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the coordinator is not there; %s was not sent", type(message).__name__)

    def _hear(self) -> bool:
        """Read one reply; True if the next message is due at once."""
        try:
            message = TO_REPLICA.decode(self._socket.recv(zmq.NOBLOCK))
        except Malformed as error:
            if error.protocol is not None:  # a coordinator of another version refuses in its own protocol
                self._refuse(str(error))
            else:
                log.warning("ignored a message that is none of the coordinator's: %s", error)
            return False
        match message:
            case Admitted():
                self._admit(message.member, message.interval_s)
            case Refused():
                self._refuse(message.reason)
                return False
            case NotYet():
                self._refusal = ""
                return False
            case RegisterAgain():
                if self._member != message.member:
                    return False  # for a name that this replica no longer has
                self._known = False
            case Released():
                if self._member == message.member:
                    self.released.set()
        return True

    def _admit(self, member: Member, interval_s: float) -> None:
        self._refusal, self._known, self._interval = "", True, interval_s
        if member != self._member:
            log.info("this replica is %s", member)
        self._member, self._index, self._epoch = member, member.id.index, member.epoch
        self._admitted(member)

    def _refuse(self, reason: str) -> None:
        if reason != self._refusal:
            log.error("the coordinator refuses this replica: %s", reason)
        self._known, self._refusal = False, reason
