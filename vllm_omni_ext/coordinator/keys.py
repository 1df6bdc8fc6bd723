"""Makes the ZeroMQ sockets for heartbeats, views and joining replicas, with CURVE keys if there is a shared secret.

With a secret, ZeroMQ's CURVE encrypts and authenticates all traffic. All sockets that listen use one key pair, all
sockets that connect another. Both pairs are computed from the secret, so only the secret must be distributed: private
key = blake2b(scrypt(secret), person = "server" or "client"), public key = the matching curve point. A client without
the secret cannot compute the server's public key. A client needs that key to connect, and CURVE never sends it, so the
key alone keeps unauthorized clients out. The coordinator and the join server also check the client's key (`zap_reply`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from vllm_omni_ext.errors import ConfigError, OmniError

SHORTEST_SECRET = 16
"""Least length of a secret in bytes, without blanks at both ends. `openssl rand -hex 32` prints a suitable secret."""

_SALT = b"vllm-omni-ext coordinator 1"
_COST, _BLOCK = 2**14, 8
"""scrypt's n and r. Deriving the keys takes 16 MiB and some tens of milliseconds, once per process."""

_KEY_BYTES = 32
_ROLES = (b"server", b"client")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address to which libzmq sends the requests to authenticate clients (RFC 27)."""

_ZAP_DOMAIN = b"coordinator"


@dataclass(frozen=True, repr=False)
class KeyPair:
    """A CURVE key pair. Both keys are Z85 text (40 bytes)."""

    public: bytes
    private: bytes


@dataclass(frozen=True, repr=False)
class Keys:
    """The key pairs of listening sockets (`server`) and of connecting sockets (`client`)."""

    server: KeyPair
    client: KeyPair

    @property
    def listening(self) -> dict[int, Any]:
        """Socket options of a listening socket, by libzmq option number."""
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: self.server.private}

    @property
    def connecting(self) -> dict[int, Any]:
        """Socket options of a connecting socket, by libzmq option number."""
        return {
            zmq.CURVE_SERVERKEY: self.server.public,
            zmq.CURVE_PUBLICKEY: self.client.public,
            zmq.CURVE_SECRETKEY: self.client.private,
        }

    @classmethod
    def derive(cls, secret: bytes) -> Keys:
        """Compute both key pairs; ConfigError if the secret has fewer than `SHORTEST_SECRET` bytes."""
        secret = secret.strip()
        if len(secret) < SHORTEST_SECRET:
            raise ConfigError(f"coordinator secret: must have at least {SHORTEST_SECRET} bytes, got {len(secret)}")
        root = hashlib.scrypt(secret, salt=_SALT, n=_COST, r=_BLOCK, p=1, dklen=_KEY_BYTES)
        private = [z85.encode(hashlib.blake2b(root, person=role, digest_size=_KEY_BYTES).digest()) for role in _ROLES]
        return cls(*(KeyPair(zmq.curve_public(each), each) for each in private))

    @classmethod
    def read(cls, file: str | None) -> Keys | None:
        """Compute the keys from the secret in a file.

        Args:
            file: path of the file; None: there is no secret, and the result is None.

        Raises:
            ConfigError: the file cannot be read, or the secret is too short.
        """
        if file is None:
            return None
        try:
            return cls.derive(Path(file).read_bytes())
        except OSError as error:
            raise ConfigError(f"coordinator secret: cannot read '{file}': {error.strerror}") from error


def as_client(socket: zmq.Socket[Any], keys: Keys | None) -> None:
    """Set the CURVE options of a client on a socket that has not connected yet. Does nothing if `keys` is None."""
    if keys is not None:
        for option, value in keys.connecting.items():
            socket.setsockopt(option, value)


def zap_reply(request: Sequence[bytes], keys: Keys | None) -> list[bytes]:
    """Return the reply to a ZAP request: 200 if the peer's CURVE key is the client key of `keys`, else 400.

    libzmq sends a ZAP request (RFC 27) for every peer that connects to a listening socket with keys.

    Args:
        request: the frames of the request.
        keys: keys of the listening socket.
    """
    version, number, _domain, _address, _identity, mechanism, *credentials = request
    accepted = keys is not None and mechanism == b"CURVE" and credentials == [z85.decode(keys.client.public)]
    status, text = (b"200", b"OK") if accepted else (b"400", b"unknown key")
    return [version or b"1.0", number, status, text, b"", b""]


Socket: TypeAlias = "zmq.Socket[Any]"

PING_MS = 5_000
"""Interval of libzmq's heartbeats. They detect a host without power or network, which closes no connection."""

PEER_GONE_MS = 30_000
"""libzmq closes a connection on which nothing arrives for this time. The connecting socket then reconnects."""

RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 1_000
"""First and longest pause before a socket reconnects, in milliseconds."""


def listen(context: zmq.Context[Any], kind: int, address: str, keys: Keys | None, *, limit: int, queued: int) -> Socket:
    """Return a ZeroMQ socket that is bound to `address`.

    Args:
        kind: ZeroMQ socket type, e.g. `zmq.PULL`.
        keys: CURVE keys that peers must have; None: any peer may connect.
        limit: longest frame in bytes; libzmq disconnects a peer that sends a longer one.
        queued: most messages that are queued for a slow peer.

    Raises:
        OmniError: the address cannot be used.
    """
    socket = _socket(context, kind, address, limit)
    socket.sndhwm = queued
    if keys is not None:
        socket.zap_domain = _ZAP_DOMAIN
        for option, value in keys.listening.items():
            socket.setsockopt(option, value)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        flags = " (--omni-master-address, --omni-master-port)" if address.startswith("tcp:") else ""
        raise OmniError(f"the head cannot listen on {address}{flags}: {error.strerror}") from error
    return socket


def connect(
    context: zmq.Context[Any], kind: int, address: str, keys: Keys | None, *, limit: int, watched: int = 0
) -> Socket:
    """Return a ZeroMQ socket that connects to `address`, and reconnects after a loss.

    Args:
        kind: ZeroMQ socket type, e.g. `zmq.PUSH`.
        keys: CURVE keys; None: the peer needs none.
        limit: longest frame in bytes that the socket accepts.
        watched: libzmq event flags that `get_monitor_socket()` reports, also for the first connection attempt.

    Raises:
        OmniError: the address is invalid.
    """
    socket = _socket(context, kind, address, limit)
    as_client(socket, keys)
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = LONGEST_RECONNECT_MS
    if kind in (zmq.DEALER, zmq.PUSH):
        socket.immediate = True  # queues nothing while disconnected: an outdated heartbeat must not be sent
    if kind == zmq.SUB:
        socket.conflate = True  # keeps the newest view only; must be set before connecting
        socket.subscribe(b"")
    if watched:
        socket.get_monitor_socket(watched)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise OmniError(f"'{address}' is no address of a coordinator: {error.strerror}") from error
    return socket


def _socket(context: zmq.Context[Any], kind: int, address: str, limit: int) -> Socket:
    socket: Socket = context.socket(kind)
    if "[" in address:
        socket.ipv6 = True  # needed for IPv6 addresses; only then, because it changes names and * from IPv4 to IPv6
    socket.linger = 0
    socket.maxmsgsize = limit
    socket.heartbeat_ivl = PING_MS
    socket.heartbeat_timeout = PEER_GONE_MS
    return socket
