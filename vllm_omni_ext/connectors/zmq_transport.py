"""Base classes of producers and consumers (see `connectors.base`) in different processes, connected by ZeroMQ.

A producer binds a ROUTER socket. A thread of the producer answers the messages of consumers, and sleeps until a message
arrives. A consumer has no thread: it connects a DEALER socket to each producer, sends a message and waits for the
reply. Over TCP, sockets may have CURVE keys (`ConnectorConfig.listening`, `connecting`).

A consumer that reads the producer's memory requests a chunk, copies it, and requests it a second time. The second reply
shows that the producer still had the chunk when the copy was complete. This is necessary because the producer reuses
the memory of a freed request at once.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import math
import re
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.arena import Arena, room
from vllm_omni_ext.connectors.base import (
    MAX_NAME,
    BackPressure,
    ConnectorConfig,
    ConnectorError,
    Consumer,
    DeadlinePassed,
    Forgotten,
    Producer,
    ProducerLost,
    Stats,
)
from vllm_omni_ext.encoding import Malformed, Message
from vllm_omni_ext.ports import bind_within

ANY_PORT = ":*"
"""Suffix of a ZeroMQ address that lets the system choose the port."""

SLICE_BYTES = 4 * 1024 * 1024
"""Tensors are sent in frames of at most this size, which limits the memory that a malformed frame can take."""

ENVELOPE_BYTES = 64
"""Upper limit of the bytes that encryption adds to a frame (CURVE: 33); libzmq's size limits include these bytes."""

PING_MS = 1_000
PEER_GONE_MS = 10_000
"""Interval and timeout of libzmq's heartbeats, which detect unreachable hosts. The operating system closes the
connections of a process that ends at once."""

RECONNECT_MS = 3_600_000
"""Pause before libzmq reconnects, so long that it never does. Instead, a consumer closes a lost connection and makes a
new one at its next call."""

HANDSHAKE_MS = 2_000
"""A peer that accepts a connection without a ZMTP handshake is disconnected after this time."""

LOST = {
    zmq.EVENT_DISCONNECTED: "the connection to the producer was lost",
    zmq.EVENT_CONNECT_RETRIED: "no process listens at the producer's address",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "what listens at the producer's address is no producer",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens at the producer's address is no producer",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the producer does not accept this connection",
}
"""ZeroMQ monitor event -> reason for the error message. After one of these events a consumer closes a connection."""

_ADDRESS = re.compile(r"((?:tcp|ipc)://[^#\s]+)#([0-9a-f]{32})")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A stored chunk; `kept` is the result of `LinkedProducer._keep`."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kept: Any


@dataclass(slots=True)
class _Request:
    """The stored chunks of one request.

    Attributes:
        used_at: monotonic time of the last `put` or `get`.
        reader: ZeroMQ identity of the consumer that has read last; None before the first read.
    """

    chunks: list[_Held] = field(default_factory=list)
    used_at: float = 0.0
    reader: bytes | None = None


class LinkedProducer(Producer):
    """A producer whose thread answers the requests of consumers on a ROUTER socket.

    Args:
        bind: ZeroMQ address; port `*` is any port of the configuration's `ports`.
        also: a second listening socket that the thread polls; `_connected` accepts its connections.
    """

    def __init__(self, edge: str, config: ConnectorConfig, *, bind: str, also: socket.socket | None = None) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by time of the last use
        self._held_bytes = 0
        self._dropped = 0
        self._closed = ""
        """Reason for which no more chunks are taken; "" while they are."""
        self._token = secrets.token_hex(16)
        self._also = also
        self._context: zmq.Context[Any] = zmq.Context()
        self._router: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self._router.maxmsgsize = _as_sent(wire.MAX_MESSAGE_BYTES, config.listening)
        self._router.sndhwm = 0  # no limit of messages: a consumer requests one chunk at a time
        _prepare(self._router, bind, config.listening)
        try:
            if bind.endswith(ANY_PORT) and config.ports is not None:
                bind_within(config.ports, lambda port: self._router.bind(bind.removesuffix(ANY_PORT) + f":{port}"))
            else:
                self._router.bind(bind)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConnectorError(f"the producer of '{edge}' cannot listen on {bind}: {error.strerror}") from error
        self._address = f"{self._router.get_string(zmq.LAST_ENDPOINT)}#{self._token}"
        self._thread = threading.Thread(target=self._run, name=f"omni-producer-{edge}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address

    def put(self, request: str, index: int, chunk: torch.Tensor) -> None:
        data = bytes_of(chunk)
        name, size, capacity = f"{request}/{index}", room(data.nbytes), self._config.capacity_bytes
        if not 0 < len(request) <= MAX_NAME:
            raise ValueError(f"'{request}' is no request's name")
        if size > capacity:
            raise ValueError(f"{name}: {data.nbytes} bytes can never fit; capacity_bytes is {capacity}")
        with self._lock:
            if self._closed:
                raise ConnectorError(self._closed)
            self._expire()
            known = self._requests.get(request)
            if known is None and index:
                raise Forgotten(f"{request} was forgotten")
            if index != (0 if known is None else len(known.chunks)):
                raise ValueError(f"{name} is not the next chunk")
            kept = self._keep(data) if self._held_bytes + size <= capacity else None
            if kept is None:
                held = self._held_bytes
                raise BackPressure(f"{name}: no room for {data.nbytes} bytes, {held} of {capacity} are held")
            self._held_bytes += size
            known = self._requests.setdefault(request, _Request())
            known.chunks.append(_Held(str(chunk.dtype).removeprefix("torch."), tuple(chunk.shape), data.nbytes, kept))
            self._use(request, known)

    def forget(self, request: str) -> None:
        with self._lock:
            self._drop(request)

    def stats(self) -> Stats:
        with self._lock:
            self._expire()
            return Stats(len(self._requests), self._held_bytes, self._dropped)

    def close(self) -> None:
        self._refuse("the producer is closed")
        self._context.term()  # the thread closes its socket
        self._thread.join()

    def _refuse(self, reason: str) -> None:
        """Free all chunks, and take no more."""
        with self._lock:
            self._closed = reason
            for request in tuple(self._requests):
                self._drop(request)

    def _use(self, name: str, request: _Request) -> None:
        request.used_at = time.monotonic()
        self._requests.move_to_end(name)

    def _expire(self) -> None:
        """Drop requests that were not used for `retention_s`. Called with the lock held."""
        due = time.monotonic() - self._config.retention_s
        while self._requests and next(iter(self._requests.values())).used_at <= due:
            self._drop(next(iter(self._requests)))

    def _drop(self, name: str) -> None:
        """Free the chunks of a request. Called with the lock held."""
        request = self._requests.pop(name, None)
        for held in request.chunks if request is not None else ():
            self._held_bytes -= room(held.nbytes)
            self._free(held.kept)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        if self._also is not None:
            poller.register(self._also, zmq.POLLIN)
        try:
            while True:
                if self._router in (ready := dict(poller.poll())):
                    self._answer(*self._router.recv_multipart())
                if len(ready) > (self._router in ready):
                    self._connected()
        except zmq.ContextTerminated:
            pass  # the regular end: `close` has been called
        except Exception as error:  # a bug: consumers must not wait for this producer, and read nothing of it any more
            log.exception("%s has failed", self._thread.name)
            self._refuse(f"the producer has failed: {type(error).__name__}: {error}")
        finally:
            self._router.close(linger=0)

    def _answer(self, peer: bytes, *frames: bytes) -> None:
        try:
            if len(frames) != 1:
                raise Malformed(f"a message of {len(frames)} frames")
            message = wire.TO_PRODUCER.decode(frames[0])
            if not hmac.compare_digest(message.token.encode(), self._token.encode()):
                if isinstance(message, wire.Read):
                    refusal = wire.Refused(number=message.number, reason="the address is not that of this producer")
                    self._router.send_multipart([peer, wire.encode(refusal)])
                raise Malformed("a wrong token")
        except Malformed as error:
            self._count(error)
            return
        if isinstance(message, wire.Read):
            self._router.send_multipart([peer, *self._reply(peer, message)], copy=False)
            return
        with self._lock:
            known = self._requests.get(message.request)
            if known is not None and known.reader in (None, peer):
                self._drop(message.request)

    def _reply(self, peer: bytes, message: wire.Read) -> list[Any]:
        with self._lock:
            self._expire()
            known = self._requests.get(message.request)
            if known is None or message.index >= len(known.chunks):
                return [wire.encode(wire.Missing(number=message.number))]
            known.reader = peer
            self._use(message.request, known)
            held = known.chunks[message.index]
        place, memory, body = self._sent(held.kept)
        head = wire.Chunk(
            number=message.number, dtype=held.dtype, shape=held.shape, nbytes=held.nbytes, place=place, memory=memory
        )
        return [wire.encode(head), *body]

    def _count(self, error: Malformed) -> None:
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:  # at powers of two
            log.warning("%s: dropped %d messages; the last: %s", self._thread.name, self._dropped, error)

    @abstractmethod
    def _keep(self, data: Any) -> Any:
        """Store the bytes of a chunk (uint8 array); None if no memory is free. Called with the lock held.

        The result is kept with the chunk, and passed to `_sent` and `_free`. Its type depends on the connector.
        """

    def _free(self, kept: Any) -> None:
        """Free the bytes of a chunk, given the result of `_keep`. Called with the lock held."""

    @abstractmethod
    def _sent(self, kept: Any) -> tuple[int, str, list[Any]]:
        """Return the fields of the reply to a consumer: `Chunk.place`, `Chunk.memory`, and ZMQ frames with the bytes.

        Args:
            kept: the result of `_keep` for the chunk.
        """

    def _connected(self) -> None:
        """Accept a connection to the socket `also`; called in the producer's thread if there is such a socket."""


class ArenaProducer(LinkedProducer):
    """A producer whose chunks are in one block of memory that consumers read directly.

    Attributes:
        memory: the block of memory, a uint8 array.
    """

    keeps_tensors = False

    def __init__(self, edge: str, config: ConnectorConfig, arena: Arena, memory: Any, **named: Any) -> None:
        self._arena, self.memory = arena, memory
        super().__init__(edge, config, **named)

    def _keep(self, data: Any) -> Any:
        place = self._arena.take(data.nbytes)
        if place is not None:
            copy_bytes(self.memory[place : place + data.nbytes], data)
        return place

    def _free(self, kept: Any) -> None:
        self._arena.free(kept)


class Link:
    """A consumer's connection to one producer.

    Attributes:
        memory: the producer's memory; None until the consumer has mapped it.
    """

    def __init__(self, context: zmq.Context[Any], address: str, options: Mapping[int, Any]) -> None:
        self.address, (self.endpoint, self.token) = address, parse(address)
        self.memory: memoryview | None = None
        self.dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.dealer.maxmsgsize = _as_sent(SLICE_BYTES, options)
        self.dealer.sndhwm = 0
        self.dealer.reconnect_ivl = RECONNECT_MS
        _prepare(self.dealer, self.endpoint, options)
        self._monitor = self.dealer.get_monitor_socket(sum(int(event) for event in LOST))
        self._poller = zmq.Poller()
        for each in (self.dealer, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        try:
            self.dealer.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProducerLost(f"'{self.endpoint}' cannot be reached: {error.strerror}") from error

    def lost(self) -> str | None:
        """Return the reason for which the connection is lost; None if it is not lost."""
        return LOST[recv_monitor_message(self._monitor)["event"]] if self._monitor.poll(0) else None

    def send(self, message: Message) -> None:
        """Send a message to the producer. ZeroMQ stores any number of messages while it connects.

        Raises:
            ProducerLost: ZeroMQ has closed the connection, e.g. as the peer has other keys. `send` of the socket would
                wait for ever.
        """
        try:
            self.dealer.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise ProducerLost(self.lost() or LOST[zmq.EVENT_DISCONNECTED]) from None

    def receive(self, deadline: float) -> list[zmq.Frame]:
        """Return the frames of the producer's next message.

        Raises:
            DeadlinePassed: no message has arrived by the monotonic time `deadline`.
            ProducerLost: the connection is lost.
        """
        if not self._poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))):
            raise DeadlinePassed("did not come in time")
        if self.dealer.poll(0):  # also messages that arrived before the connection was lost
            return list(self.dealer.recv_multipart(copy=False))
        raise ProducerLost(self.lost() or LOST[zmq.EVENT_DISCONNECTED])

    def close(self) -> None:
        """Close the connection."""
        self.dealer.disable_monitor()
        self._monitor.close(linger=0)
        self.dealer.close(linger=0)


class LinkedConsumer(Consumer):
    """A consumer with a `Link` for each producer. The connections are kept until they are lost."""

    def __init__(self, edge: str, config: ConnectorConfig) -> None:
        self._edge = edge
        self._config = config
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: dict[str, Link] = {}
        self._numbers = itertools.count()

    def get(self, source: str, request: str, index: int, timeout_s: float) -> torch.Tensor:
        deadline = time.monotonic() + timeout_s
        name = f"{request}/{index}"
        try:
            return self._fetch(self._link(source), request, index, deadline)
        except (ProducerLost, Malformed) as error:
            self._close(source)
            raise ProducerLost(f"{name}: {error}") from error
        except ConnectorError as error:
            raise type(error)(f"{name}: {error}") from error

    def forget(self, source: str, request: str) -> None:
        with contextlib.suppress(ProducerLost):
            link = self._link(source)
            link.send(wire.Forget(token=link.token, request=request))

    def close(self) -> None:
        for source in tuple(self._links):
            self._close(source)
        self._context.destroy(linger=0)

    def _link(self, source: str) -> Link:
        """Close all lost connections, then return the connection to the producer at the address `source`."""
        if self._context.closed:
            raise ConnectorError("the consumer is closed")
        for lost in [link.address for link in self._links.values() if link.lost()]:
            self._close(lost)
        if source not in self._links:
            self._links[source] = Link(self._context, source, self._config.connecting)
        return self._links[source]

    def _close(self, source: str) -> None:
        link = self._links.pop(source, None)
        if link is not None:
            link.close()

    def _ask(self, link: Link, request: str, index: int, deadline: float) -> tuple[wire.Chunk, list[zmq.Frame]]:
        """Request a chunk; return (header of the chunk, frames with its bytes)."""
        number = next(self._numbers)
        link.send(wire.Read(token=link.token, number=number, request=request, index=index))
        while True:
            head, *body = link.receive(deadline)
            match reply := wire.TO_CONSUMER.decode(head.bytes):
                case _ if reply.number != number:
                    continue  # the reply to an earlier request whose deadline passed
                case wire.Chunk():
                    return reply, body
                case wire.Missing():
                    raise Forgotten("was forgotten, or never put")
                case wire.Refused():
                    raise ProducerLost(reply.reason)

    @abstractmethod
    def _fetch(self, link: Link, request: str, index: int, deadline: float) -> torch.Tensor:
        """Read a chunk from the producer of `link`; `get` calls this method and adds the chunk's name to errors."""


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes as a uint8 array, without a copy if the tensor is contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def empty(chunk: wire.Chunk, most: int) -> torch.Tensor:
    """Return an uninitialized tensor of a chunk's dtype and shape.

    Raises:
        Malformed: the header contradicts itself, or the chunk has more than `most` bytes.
    """
    dtype = getattr(torch, chunk.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"'{chunk.dtype}' is no dtype")
    if math.prod(chunk.shape) * dtype.itemsize != chunk.nbytes or chunk.nbytes > most:
        raise Malformed(f"{chunk.dtype} {list(chunk.shape)} in {chunk.nbytes} bytes, of at most {most}")
    return torch.empty(chunk.shape, dtype=dtype)


def copy_bytes(target: Any, source: Any) -> None:
    """Copy bytes with numpy. torch's threads would wait for each other when other processes use the cores."""
    if len(target):
        np.copyto(target, np.frombuffer(source, np.uint8, len(target)))


def parse(address: str) -> tuple[str, str]:
    """Return (ZeroMQ endpoint, token) of an address; ValueError if it is malformed."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"'{address.partition('#')[0]}' is no address of a producer")
    return found[1], found[2]


def _as_sent(size: int, keys: Mapping[int, Any]) -> int:
    """Return the size limit of a frame with `size` bytes of content; with CURVE keys, `ENVELOPE_BYTES` more."""
    return size + ENVELOPE_BYTES if keys else size


def _prepare(sock: zmq.Socket[Any], endpoint: str, options: Mapping[int, Any]) -> None:
    """Set the timeouts of a socket before it is bound or connected to `endpoint`; over TCP, set `options` too."""
    sock.linger = 0
    sock.handshake_ivl = HANDSHAKE_MS
    # Within a host, heartbeats are unnecessary and would disconnect a process that is only stopped.
    if endpoint.startswith("tcp:"):
        sock.heartbeat_ivl = PING_MS
        sock.heartbeat_timeout = PEER_GONE_MS
        for option, value in options.items():
            sock.setsockopt(option, value)
