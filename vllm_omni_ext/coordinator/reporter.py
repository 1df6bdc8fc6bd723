"""A replica's side of the coordinator: registers it, reports its load, and takes leave of it.

Everything happens in a thread of its own, so that the engine's loop never waits for the network. The coordinator may
come later than the replica, end and come back: it is found, and told again who this is.
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

from vllm_omni_ext.coordinator import translate
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Descriptor, Member
from vllm_omni_ext.coordinator.sockets import Socket, connect
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire import coordination as wire

REGISTER_AGAIN_S = 0.5
"""A registration that was not answered is sent again after this time."""

REFUSED_AGAIN_S = 10.0
"""A refused replica asks again after this time: the other side may be the one that gets corrected."""

FAREWELL_MS = 200
"""How long the last message may take to be sent when the replica ends."""

log = logging.getLogger(__name__)


class Reporter:
    """Keeps one replica known to the coordinator.

    Args:
        address: the coordinator's `events` address.
        replica: who it is; `instance` must be new for every process.
        load: asked in the reporter's thread before each heartbeat. None: the engine shows no sign of life, and no
            heartbeat is sent. If it raises, that is logged and the last load is sent: a replica whose statistics fail
            still works.
        index: the index it would like, e.g. that of the plan.
        keys: if the coordinator has a secret.
        admitted: called in the reporter's thread whenever the coordinator has given it a name.
    """

    def __init__(
        self,
        address: str,
        replica: Descriptor,
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
        self._socket: Socket = connect(self._context, zmq.DEALER, address, keys, limit=wire.MAX_REPLY_BYTES)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="omni-reporter", daemon=True)

    @property
    def member(self) -> Member | None:
        """Who this replica is; None before it was admitted. It may change when the coordinator forgot it."""
        return self._member

    @property
    def refusal(self) -> str:
        """Why the coordinator refuses this replica; empty if it does not."""
        return self._refusal

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def drain(self) -> None:
        """Take leave: no new requests from now on. `released` is set when the last one has ended. Returns at once."""
        self._leaving = True
        if not self._ending:
            os.write(self._waker, b".")

    def stop(self) -> None:
        """End now: the coordinator is told, requests that are left are lost. Takes a fraction of a second."""
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
                self._send(wire.Leave(member=translate.bearer(self._member), drain=False, proof=self._replica.instance))
        finally:
            self._context.destroy(linger=FAREWELL_MS)

    def _speak(self) -> float:
        """Say what there is to say and return for how long that is enough, in seconds."""
        if self.released.is_set():
            return REFUSED_AGAIN_S
        if self._member is None or not self._known:
            self._send(translate.registration(self._replica, self._index, self._epoch))
            return REFUSED_AGAIN_S if self._refusal else REGISTER_AGAIN_S
        name = translate.bearer(self._member)
        if self._leaving:
            self._send(wire.Leave(member=name, drain=True, proof=self._replica.instance))
        load = self._ask()
        if load is not None:
            self._send(wire.Heartbeat(member=name, load=translate.report(load), proof=self._replica.instance))
        return self._interval

    def _ask(self) -> Load | None:
        try:
            load = self._load()
        except Exception:  # whatever it is, it is the statistics and not the replica that failed
            log.exception("the load of %s cannot be read; its last one is reported", self._member)
            return self._last_load
        self._last_load = load or self._last_load
        return load

    def _send(self, message: wire.Message) -> None:
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("the coordinator is not there; %s was not sent", type(message).__name__)

    def _hear(self) -> bool:
        """Read an answer; True if there is something to say at once."""
        try:
            message = wire.TO_REPLICA.decode(self._socket.recv(zmq.NOBLOCK))
        except wire.Malformed as error:
            if error.protocol is not None:  # the coordinator is of another version, and refuses in its own protocol
                self._refuse(str(error))
            else:
                log.warning("ignored a message that is none of the coordinator's: %s", error)
            return False
        match message:
            case wire.Admitted():
                self._admit(translate.member(message.member), message.interval_s)
            case wire.Refused():
                self._refuse(message.reason)
                return False
            case wire.NotYet():
                self._refusal = ""
                return False
            case wire.RegisterAgain():
                if self._member != translate.member(message.member):
                    return False  # of a name it no longer bears
                self._known = False
            case wire.Released():
                if self._member == translate.member(message.member):
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
