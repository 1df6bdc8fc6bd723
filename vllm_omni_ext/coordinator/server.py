"""The coordinator's process: receives heartbeats of replicas, and publishes views (the states of all replicas).

No request passes through it. One thread sleeps until a message arrives or the next deadline of `Membership` is due. A
PULL socket receives the replicas' messages; a PUB socket publishes views. No input can stop the process: malformed
messages are counted and dropped, and sending never waits for slow receivers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import zmq
from msgspec.structs import replace

from vllm_omni_ext.coordinator.keys import ZAP_ADDRESS, Keys, listen, zap_reply
from vllm_omni_ext.coordinator.members import LEFT, TO_COORDINATOR, Attach, Detach, Forget, View, ViewDiff
from vllm_omni_ext.coordinator.membership import Membership, Timing
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Malformed, encode
from vllm_omni_ext.errors import OmniError

LOOPBACK = "tcp://127.0.0.1:*"
"""Default ZeroMQ address: reachable from this machine only, with a port that the operating system chooses."""

TRUSTED = ("tcp://127.", "tcp://[::1]:", "ipc:")
"""Prefixes of ZeroMQ addresses that are reachable from this machine only, so that no secret is needed."""

READ_AT_ONCE = 1024
"""Most messages that are received between two calls of `Membership.tick`, so that a flood does not delay deadlines."""

QUEUED_VIEWS = 4
"""Most views that are queued for a slow subscriber. Views beyond that are dropped, since later ones replace them."""

QUEUED_ANSWERS = 64
"""Most replies to authentication requests (ZAP) that are queued."""

MAX_FRAME_BYTES = 16 * MAX_MESSAGE_BYTES
"""libzmq disconnects a peer that sends a longer frame, before the frame is in memory."""

LISTENING = b"listening "
"""Prefix of the message with the addresses that the process sends to its parent; without it, a message is an error."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Attributes:
        timing: heartbeat timeout, and the time limits that depend on it.
        events: ZeroMQ address to which replicas send. An address that other hosts reach should have a secret.
        views: ZeroMQ address from which API servers receive views.
        secret_file: file with the shared secret, see `keys`; None: every process may connect.
        key: the head's key, with which `Member.proof` of a message is checked.
    """

    timing: Timing
    key: str
    events: str = LOOPBACK
    views: str = LOOPBACK
    secret_file: str | None = None


class Coordinator:
    """Receives replicas' messages at one ZeroMQ socket and publishes views at another. Use as a context manager.

    Attributes:
        addresses: the addresses of the two sockets.
        dropped: number of malformed messages.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        keys = Keys.read(config.secret_file)
        if keys is None and not all(a.startswith(TRUSTED) for a in (config.events, config.views)):
            log.warning("the coordinator has no secret: any process that can reach %s receives its views", config.views)
        self.dropped = 0
        self._logged = ViewDiff()
        self._keys = keys
        self._membership = Membership(config.key, config.timing, generation=time.time_ns(), at=time.monotonic())
        self._context: zmq.Context[Any] = zmq.Context()
        bind = partial(listen, self._context, limit=MAX_FRAME_BYTES)
        try:
            # First: libzmq needs the ZAP handler for the first connection.
            self._zap = bind(zmq.REP, ZAP_ADDRESS, None, queued=QUEUED_ANSWERS)
            self._events = bind(zmq.PULL, config.events, keys, queued=1)
            self._views = bind(zmq.PUB, config.views, keys, queued=QUEUED_VIEWS)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.addresses = [str(each.getsockopt_string(zmq.LAST_ENDPOINT)) for each in (self._events, self._views)]

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)

    def serve(self, control: Connection) -> None:
        """Receive messages and publish views until the other end of the pipe `control` is closed or sends a message."""
        poller = zmq.Poller()
        for source in (self._zap, self._events, control.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            wait = max(0.0, self._membership.deadline() - time.monotonic())
            ready = {source for source, _ in poller.poll(math.ceil(wait * 1000))}
            if control.fileno() in ready:
                return
            if self._zap in ready:
                self._zap.send_multipart(zap_reply(self._zap.recv_multipart(), self._keys))
            with contextlib.suppress(zmq.Again):
                for _ in range(READ_AT_ONCE):
                    self._take(self._events.recv_multipart(zmq.NOBLOCK))
            view = self._membership.tick(time.monotonic())
            if view is not None:
                self._views.send(encode(replace(view, dropped=self.dropped, pid=os.getpid())), zmq.NOBLOCK)
                self._log_changes(view)

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise Malformed(f"{len(frames)} frames")
            message = TO_COORDINATOR.decode(frames[0])
        except Malformed as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # at powers of two: a flood must not fill the disk
                log.warning("dropped %d malformed messages; the last: %.200s", self.dropped, error)
            return
        self._membership.receive(message, time.monotonic())

    def _log_changes(self, view: View) -> None:
        for change in self._logged.take(view):
            match change:
                case Attach(member):
                    log.info("%s is up", member)
                case Detach(member, reason) if reason == LEFT:
                    log.info("%s has left", member)
                case Detach(member, reason):
                    log.warning("%s is lost: %s", member, reason)
                case Forget(member):
                    log.info("%s is gone", member)


def run(config: CoordinatorConfig, control: Connection) -> None:
    """Run the coordinator, as the body of a process.

    The process sends its addresses, or an error text, on the pipe `control`; the parent receives them with `listening`.
    The process ends when the other end of `control` is closed, so that it never outlives its parent. It ignores the
    terminal's SIGINT, which the parent handles.
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
    """Wait until the coordinator's process at the other end of the pipe `control` listens.

    Returns:
        Its addresses: (address for replicas' messages, address of views).

    Raises:
        OmniError: the coordinator failed to start.
    """
    if not control.poll(timeout_s):
        raise OmniError(f"the coordinator has not started within {timeout_s:g} s")
    try:
        reply = control.recv_bytes()
    except EOFError as error:
        raise OmniError("the coordinator's process ended while starting") from error
    if not reply.startswith(LISTENING):
        raise OmniError(reply.decode())
    events, views = reply.removeprefix(LISTENING).decode().split("\n")
    return events, views
