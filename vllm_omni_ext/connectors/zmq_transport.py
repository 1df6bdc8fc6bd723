"""Connections between producers and consumers in different processes: ZeroMQ, one thread at each end, no polling.

A producer binds a ROUTER; every consumer connects a DEALER to it and sends `Hello` with the token of the address. Over
TCP, sockets may have CURVE keys (`ConnectorConfig.listening`, `connecting`). The threads sleep until a message, a
closed connection, a call from another thread (an eventfd) or a deadline of the `ProducerState`.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import re
import secrets
import select
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import Arrived, ConnectorConfig, ConnectorError
from vllm_omni_ext.connectors.base_impl import Memory, ReceivingConsumer, StoringProducer
from vllm_omni_ext.connectors.producer_state import Action, Deliver, Say
from vllm_omni_ext.encoding import Malformed
from vllm_omni_ext.ports import bind_within

ANY_PORT = ":*"
"""End of a ZeroMQ address without a port number."""

SLICE_BYTES = 4 * 1024 * 1024
"""Tensors are sent in frames of at most this size, which limits the memory that a malformed frame can take."""

ENVELOPE_BYTES = 64
"""Bytes that encryption adds to a frame (CURVE: 33); libzmq's limits include them."""

QUEUED_SLICES = 16
"""High-water mark of a consumer: frames that wait for its thread. Beyond it the sender's TCP connection stalls."""

PING_MS = 1_000
PEER_GONE_MS = 10_000
"""libzmq's heartbeats, for hosts that are unreachable: a process that ends closes its connections at once."""

HANDSHAKE_MS = 2_000
"""A peer that accepts a connection without a ZMTP handshake is disconnected after this time."""

PROBE_S = 10.0
"""How often a producer checks that its consumers are still connected, while it has requests."""

ENDING_PROBE_S = 0.5
"""The same, while the memory of an ended request waits for its consumers."""

READ_AT_ONCE = 256
"""Most messages that are read in one turn of the loop."""

LOST = {
    zmq.EVENT_DISCONNECTED: "the connection to the producer was lost",
    zmq.EVENT_CONNECT_RETRIED: "no process listens at the producer's address",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "what listens at the producer's address is no producer",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens at the producer's address is no producer",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the producer does not accept this connection",
}

_ADDRESS = re.compile(r"((?:tcp|ipc)://[^#\s]+)#([0-9a-f]{32})")

log = logging.getLogger(__name__)


class _Thread:
    """A thread around a poller that other threads can wake."""

    def __init__(self, name: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.POLLIN)
        self._waking = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _rouse(self) -> None:
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _sleep(self, until: float) -> dict[Any, int]:
        """Events by socket or file descriptor."""
        left = until - time.monotonic()
        ready = dict(self._poller.poll(None if left == math.inf else max(0, math.ceil(left * 1000))))
        if ready.pop(self._wake, None):
            os.eventfd_read(self._wake)
        return ready

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
        except Exception:  # a bug: no thread may keep waiting for this producer or consumer
            log.exception("%s has failed", self._thread.name)
            self._broken()
        finally:
            self._context.destroy(linger=0)

    def _end(self) -> None:
        """End the thread. May be called twice."""
        self._ending = True
        self._rouse()
        if self._thread.ident is not None:
            self._thread.join()
        with self._waking:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    @abstractmethod
    def _broken(self) -> None:
        """End all waits after the thread has failed."""

    @abstractmethod
    def _turn(self) -> None:
        """Sleep until the next event, then handle all pending work."""


class LinkedProducer(StoringProducer, _Thread):
    """A producer behind a ROUTER.

    Args:
        bind: ZeroMQ address; port `*` is any port of the configuration's `ports`.
        also: a further file descriptor to poll; `_ready` handles its events.
    """

    def __init__(
        self,
        edge: str,
        config: ConnectorConfig,
        memory: Memory,
        *,
        leases: bool,
        bind: str,
        also: int | None = None,
    ) -> None:
        StoringProducer.__init__(self, edge, config, memory, leases=leases)
        _Thread.__init__(self, f"omni-producer-{edge}")
        self._token = secrets.token_hex(16)
        self._outbox: deque[Say | Deliver] = deque()
        self._peers: set[bytes] = set()
        self._probe = math.inf
        self._router: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self._router.maxmsgsize = _as_sent(wire.MAX_MESSAGE_BYTES, config.listening)
        self._router.router_mandatory = True  # sending to an unreachable consumer raises instead of dropping
        self._router.sndhwm = 0  # no limit of messages: the windows limit the bytes in flight
        _watch_peer(self._router, bind, config.listening)
        try:
            if bind.endswith(ANY_PORT) and config.ports is not None:
                bind_within(config.ports, lambda port: self._router.bind(bind.removesuffix(ANY_PORT) + f":{port}"))
            else:
                self._router.bind(bind)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            self._end()
            raise ConnectorError(f"the producer of '{edge}' cannot listen on {bind}: {error.strerror}") from error
        self._poller.register(self._router, zmq.POLLIN)
        if also is not None:
            self._poller.register(also, zmq.POLLIN)
        self._address = f"{self._router.last_endpoint.decode()}#{self._token}"
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address

    def close(self) -> None:
        self._broken()
        self._end()

    def _broken(self) -> None:
        with self._lock:
            self._shut()
            self._outbox.clear()

    def _links(self) -> int:
        return len(self._peers)

    def _queue(self, action: Action) -> None:
        if isinstance(action, Say | Deliver):
            self._outbox.append(action)

    def _performed(self) -> None:
        if self._outbox and threading.current_thread() is not self._thread:
            self._rouse()

    def _turn(self) -> None:
        self._flush()
        ready = self._sleep(self._due())
        self._flush()
        if self._router in ready:
            self._read()
        self._ready(ready)
        if time.monotonic() >= self._probe:
            for peer in tuple(self._peers):
                self._send(Say(peer, wire.Ping()))
        with self._lock:
            self._perform(self._producer_state.expire(time.monotonic()))

    def _due(self) -> float:
        """When the thread must wake up without a message."""
        now = time.monotonic()
        with self._lock:
            expiry = self._producer_state.next_expiry()
            ending, held = bool(self._producer_state.ending()), len(self._producer_state)
        self._probe = now + (ENDING_PROBE_S if ending else PROBE_S) if held and self._peers else math.inf
        return min(self._probe, math.inf if expiry is None else expiry)

    def _flush(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    def _send(self, action: Say | Deliver) -> None:
        try:
            if isinstance(action, Deliver):
                self._send_chunk(action)
            else:
                self._send_message(action.link, action.message)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._peers.discard(action.link)  # type: ignore[arg-type]
            self._lost(action.link)

    def _send_message(self, link: Any, message: wire.ToConsumer, *body: Any) -> None:
        self._router.send(link, zmq.SNDMORE | zmq.NOBLOCK)
        self._router.send(wire.encode(message), zmq.SNDMORE if body else 0)
        for frame in body:
            self._router.send(frame, copy=False)

    def _send_chunk(self, action: Deliver) -> None:
        """Send a chunk's header; connectors that send payloads in messages override this."""
        self._send_message(action.link, action.chunk.head)

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise Malformed(f"a message of {len(frames)} frames")
                self._take(peer, wire.TO_PRODUCER.decode(frames[0]))
            except Malformed as error:
                self._drop(error)

    def _take(self, peer: bytes, message: wire.ToProducer) -> None:
        if isinstance(message, wire.Hello):
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                self._drop(Malformed("a wrong token"))
                self._send(Say(peer, wire.Refused(reason="the address is not that of this producer")))
            elif message.edge != self._edge:
                reason = f"this is the producer of edge '{self._edge}', not '{message.edge}'"
                self._send(Say(peer, wire.Refused(reason=reason)))
            else:
                self._peers.add(peer)
                self._send(Say(peer, self._welcome()))
        elif peer in self._peers:
            self._heard(peer, message)
        else:
            self._drop(Malformed("a message of a peer that has not sent the token"))

    def _drop(self, error: Malformed) -> None:
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:  # at powers of two
            log.warning("producer of %s: dropped %d messages; the last: %s", self._edge, self._dropped, error)

    def _welcome(self) -> wire.Welcome:
        return wire.Welcome()

    def _ready(self, ready: dict[Any, int]) -> None:
        """Handle events of the file descriptor `also`."""


class _Source:
    """A consumer's connection to one producer."""

    def __init__(self, context: zmq.Context[Any], address: str, edge: str, options: Mapping[int, Any]) -> None:
        endpoint, token = parse(address)
        self.address = address
        self.dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.maxmsgsize = _as_sent(SLICE_BYTES, options)
        self.dealer.rcvhwm = QUEUED_SLICES
        self.dealer.sndhwm = 0
        _watch_peer(self.dealer, endpoint, options)
        self.monitor = self.dealer.get_monitor_socket(_bits(LOST))
        self.dealer.connect(endpoint)
        self.dealer.send(wire.encode(wire.Hello(token=token, edge=edge)))

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.dealer.close(linger=0)


class LinkedConsumer(ReceivingConsumer, _Thread):
    """A consumer with a DEALER for each producer. The connections are kept until they are lost."""

    def __init__(self, edge: str, config: ConnectorConfig, arrived: Arrived, *, window: int) -> None:
        ReceivingConsumer.__init__(self, edge, config, arrived, window=window)
        _Thread.__init__(self, f"omni-consumer-{edge}")
        self._sources: dict[str, _Source] = {}
        self._outbox: deque[tuple[str, wire.ToProducer]] = deque()
        self._thread.start()

    def close(self) -> None:
        self._broken()
        self._end()
        self._sources.clear()

    def _broken(self) -> None:
        self._consumer_state.close()

    def _links(self) -> int:
        return len(self._sources)

    def _check_address(self, source: str) -> None:
        parse(source)

    def _send_to_source(self, source: str, message: wire.ToProducer) -> None:
        self._outbox.append((source, message))
        if threading.current_thread() is not self._thread:
            self._rouse()

    def _turn(self) -> None:
        ready = self._sleep(math.inf)
        for source in tuple(self._sources.values()):
            if source.dealer in ready:
                self._read(source)
            if source.monitor in ready and source.address in self._sources:
                self._watch(source)
        while self._outbox:
            self._send(*self._outbox.popleft())

    def _send(self, address: str, message: wire.ToProducer) -> None:
        source = self._sources.get(address)
        if source is None:
            if not isinstance(message, wire.Open):
                return  # the producer is lost and needs no message
            try:
                source = _Source(self._context, address, self._edge, self._config.connecting)
            except zmq.ZMQError as error:
                self._consumer_state.lost(address, f"'{parse(address)[0]}' cannot be reached: {error.strerror}")
                return
            self._sources[address] = source
            self._poller.register(source.dealer, zmq.POLLIN)
            self._poller.register(source.monitor, zmq.POLLIN)
        source.dealer.send(wire.encode(message))

    def _read(self, source: _Source) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                head, *body = source.dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._take(source.address, wire.TO_CONSUMER.decode(head.bytes), body)
            except Malformed as error:
                self._dropped += 1
                log.warning("consumer of %s: dropped a message: %s", self._edge, error)
            if source.address not in self._sources:
                return

    def _take(self, source: str, message: wire.ToConsumer, body: Sequence[zmq.Frame]) -> None:
        match message:
            case wire.ChunkHeader():
                self._arrive(source, message)
            case wire.Slice():
                if len(body) != 1:
                    raise Malformed(f"{len(body)} frames with a slice")
                self._piece(source, message, body[0].buffer)
            case wire.Failed():
                self._consumer_state.failed(message.request, source, message.reason)
            case wire.Gone():
                self._consumer_state.gone(message.request, source)
            case wire.Welcome():
                self._welcomed(source, message)
            case wire.Refused():
                self._lose(source, message.reason)

    def _watch(self, source: _Source) -> None:
        event = recv_monitor_message(source.monitor)["event"]
        if event in LOST and source.address in self._sources:
            self._read(source)  # messages that arrived before the connection ended
            self._lose(source.address, LOST[event])

    def _lose(self, address: str, reason: str) -> None:
        source = self._sources.pop(address, None)
        if source is not None:
            self._poller.unregister(source.dealer)
            self._poller.unregister(source.monitor)
            source.close()
            self._consumer_state.lost(address, reason)

    @abstractmethod
    def _arrive(self, source: str, head: wire.ChunkHeader) -> None:
        """Handle the header of a chunk."""

    def _piece(self, source: str, part: wire.Slice, data: memoryview) -> None:
        raise Malformed("a slice, where payloads do not travel in messages")

    def _welcomed(self, source: str, welcome: wire.Welcome) -> None:
        """Handle the producer's `Welcome`."""


def parse(address: str) -> tuple[str, str]:
    """Return (ZeroMQ endpoint, token) of an address; ValueError if it is malformed."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"'{address.partition('#')[0]}' is no address of a producer")
    return found[1], found[2]


def _as_sent(size: int, keys: Mapping[int, Any]) -> int:
    """Longest frame on the wire, in bytes, for contents of at most `size` bytes."""
    return size + ENVELOPE_BYTES if keys else size


def _watch_peer(socket: zmq.Socket[Any], endpoint: str, options: Mapping[int, Any]) -> None:
    """Set timeouts of a socket before it is bound or connected; `options` are applied to TCP only."""
    socket.linger = 0
    socket.handshake_ivl = HANDSHAKE_MS
    # Within a host, heartbeats are unnecessary and would disconnect a process that is only stopped.
    if endpoint.startswith("tcp:"):
        socket.heartbeat_ivl = PING_MS
        socket.heartbeat_timeout = PEER_GONE_MS
        for option, value in options.items():
            socket.setsockopt(option, value)


def _bits(events: dict[Any, str]) -> int:
    return sum(int(event) for event in events)
