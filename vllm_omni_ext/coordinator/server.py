"""The coordinator's process: membership behind two sockets. Control plane only: no request passes through it.

One thread, which sleeps until a message arrives or the membership has something to do. Replicas talk to a ROUTER and
are answered there; views go out on an XPUB. Nothing that arrives can stop it: what is no message is counted and
dropped, who does not read is not waited for.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import zmq

from vllm_omni_ext.coordinator import translate
from vllm_omni_ext.coordinator.keys import ZAP_ADDRESS, Keys, answer_handshake
from vllm_omni_ext.coordinator.members import Attach, Detach, Event, Forget, Publish, Refuse, Reply, Subscribed, Tick
from vllm_omni_ext.coordinator.membership import Expected, Membership
from vllm_omni_ext.coordinator.refusals import Refusals
from vllm_omni_ext.coordinator.sockets import Socket, listen
from vllm_omni_ext.coordinator.timing import Timing
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, TO_COORDINATOR, Malformed, Refused, encode

LOOPBACK = "tcp://127.0.0.1:*"
"""Reachable from this machine only; the system chooses the port."""

TRUSTED = ("tcp://127.", "tcp://[::1]:", "ipc:")
"""Beginnings of addresses that nobody outside this machine can reach."""

READ_AT_ONCE = 1024
"""Messages that are read before time may pass: a flood must not keep the coordinator from noticing silence."""

QUEUED_VIEWS = 4
"""Views that wait for a slow subscriber; further ones are dropped, it gets a later one."""

QUEUED_REPLIES = 64
"""Answers that wait for a replica that does not read."""

NEVER_READ = 16 * MAX_MESSAGE_BYTES
"""libzmq disconnects who sends more than this in one frame, before it is in memory."""

PRIVATE = "ipc:"
"""Beginning of addresses that only this user's processes can reach: unix sockets in a private folder."""

LISTENING = b"listening "
"""Begins the message to the parent that holds the addresses; any other says why there are none."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """How to run a coordinator.

    Attributes:
        events: ZeroMQ address for replicas. Anything but loopback should have a secret.
        views: ZeroMQ address for API servers.
        secret_file: file with the shared secret, see `keys`; None: everybody who can connect is trusted.
        warrant: with this proof the head speaks for every replica; empty: it cannot.
    """

    expected: Expected
    timing: Timing
    events: str = LOOPBACK
    views: str = LOOPBACK
    secret_file: str | None = None
    warrant: str = ""


class Coordinator:
    """The sockets and the membership. Use as a context manager."""

    def __init__(self, config: CoordinatorConfig) -> None:
        keys = Keys.read(config.secret_file)
        if keys is None and not all(a.startswith(TRUSTED) for a in (config.events, config.views)):
            log.warning("the coordinator has no secret: whoever can reach %s can register replicas", config.events)
        self.dropped = 0
        self._keys = keys
        self._refusals = Refusals(log, told=keys is not None or config.events.startswith(PRIVATE))
        self._membership = Membership(
            config.expected,
            config.timing,
            generation=time.time_ns(),
            at=time.monotonic(),
            warrant=config.warrant,
        )
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            # First, so that it is there for the first connection.
            self._zap = listen(self._context, zmq.REP, ZAP_ADDRESS, None, limit=NEVER_READ, queued=QUEUED_REPLIES)
            self._events = listen(
                self._context, zmq.ROUTER, config.events, keys, limit=NEVER_READ, queued=QUEUED_REPLIES
            )
            self._views = listen(self._context, zmq.XPUB, config.views, keys, limit=NEVER_READ, queued=QUEUED_VIEWS)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._views.xpub_verbose = True
        self.addresses = (_endpoint(self._events), _endpoint(self._views))

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)

    def serve(self, control: Connection) -> None:
        """Run until the other end of `control` is closed or says anything."""
        poller = zmq.Poller()
        for source in (self._zap, self._events, self._views, control.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            wait = max(0.0, self._membership.deadline() - time.monotonic())
            ready = {source for source, _ in poller.poll(math.ceil(wait * 1000))}
            if control.fileno() in ready:
                return
            if self._zap in ready:
                answer_handshake(self._zap, self._keys)
            self._read_subscriptions()
            for sender, data in self._read_events():
                self._take(sender, data)
            self._handle(Tick(time.monotonic()), b"")

    def _read_subscriptions(self) -> None:
        for _ in range(READ_AT_ONCE):
            frames = _receive(self._views)
            if frames is None:
                return
            if frames[0][:1] == b"\x01":
                self._handle(Subscribed(time.monotonic()), b"")

    def _read_events(self) -> Iterator[tuple[bytes, list[bytes]]]:
        for _ in range(READ_AT_ONCE):
            frames = _receive(self._events)
            if frames is None:
                return
            yield frames[0], frames[1:]

    def _take(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise Malformed(f"{len(frames)} frames")
            message = TO_COORDINATOR.decode(frames[0])
        except Malformed as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # at powers of two: a flood must not fill the disk
                log.warning("dropped %d malformed messages; the last: %.200s", self.dropped, error)
            if error.protocol is not None:
                self._send(sender, encode(Refused(reason=str(error))))
            return
        self._handle(translate.event(message, time.monotonic()), sender)

    def _handle(self, event: Event, sender: bytes) -> None:
        for action in self._membership.handle(event):
            match action:
                case Publish(view):
                    counted = replace(view, dropped=self.dropped)
                    self._views.send(encode(translate.published(counted)), zmq.NOBLOCK)
                case Attach(member):
                    log.info("%s is up", member)
                case Detach(member, reason):
                    log.warning("%s is lost: %s", member, reason)
                case Forget(member):
                    log.info("%s is gone", member)
                case Refuse(reason):
                    words = self._refusals.words("what a replica has sent", reason)
                    self._send(sender, encode(Refused(reason=words)))
                case _:
                    reply: Reply = action
                    self._send(sender, encode(translate.reply(reply)))

    def _send(self, sender: bytes, data: bytes) -> None:
        """ROUTER drops what it cannot deliver: a sender that is gone or does not read."""
        self._events.send_multipart([sender, data], zmq.NOBLOCK)


def _receive(socket: Socket) -> list[bytes] | None:
    """The next message, without waiting; None if there is none."""
    try:
        return list(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        return None


def _endpoint(socket: Socket) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def run(config: CoordinatorConfig, control: Connection) -> None:
    """Body of the coordinator's process; `listening` reads what it sends on `control`.

    It ends when the other end of `control` is closed, so that it never outlives its parent. The terminal's interrupt
    is for the parent to act on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Coordinator(config) as coordinator:
            control.send_bytes(LISTENING + "\n".join(coordinator.addresses).encode())
            coordinator.serve(control)
    except OmniError as error:
        control.send_bytes(str(error).encode())


def listening(control: Connection, timeout_s: float) -> tuple[str, str]:
    """Wait until the coordinator at the other end listens; its addresses (events, views).

    Raises:
        OmniError: it does not, and why.
    """
    if not control.poll(timeout_s):
        raise OmniError(f"the coordinator has not started within {timeout_s:g} s")
    try:
        said = control.recv_bytes()
    except EOFError as error:
        raise OmniError("the coordinator's process ended while starting") from error
    if not said.startswith(LISTENING):
        raise OmniError(said.decode())
    events, views = said.removeprefix(LISTENING).decode().split("\n")
    return events, views
