"""Creates the ZeroMQ sockets of the control plane, listening and connecting."""

from __future__ import annotations

from typing import Any, TypeAlias

import zmq

from vllm_omni_ext.coordinator.keys import Keys, as_client, as_server
from vllm_omni_ext.errors import OmniError

Socket: TypeAlias = "zmq.Socket[Any]"

PING_MS = 5_000
"""Interval of libzmq's heartbeats: a host that loses power or network closes no connection."""

PEER_GONE_MS = 30_000
"""A connection that received nothing for this time is closed; the connecting side makes it again."""

RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 1_000
"""First and longest pause before a lost connection is made again."""


def listen(context: zmq.Context[Any], kind: int, address: str, keys: Keys | None, *, limit: int, queued: int) -> Socket:
    """Return a bound socket; OmniError if the address cannot be used.

    Args:
        limit: longest frame in bytes; libzmq disconnects a peer that sends a longer one.
        queued: messages that are queued for a slow peer.
    """
    socket = _socket(context, kind, address, limit)
    socket.sndhwm = queued
    as_server(socket, keys)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise OmniError(f"the coordinator cannot listen on {address}: {error.strerror}") from error
    return socket


def connect(
    context: zmq.Context[Any], kind: int, address: str, keys: Keys | None, *, limit: int, watched: int = 0
) -> Socket:
    """Return a socket that connects to `address` and reconnects; OmniError if the address is invalid.

    Args:
        watched: events that its `get_monitor_socket()` reports, including those of the first attempt.
    """
    socket = _socket(context, kind, address, limit)
    as_client(socket, keys)
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = LONGEST_RECONNECT_MS
    if kind in (zmq.DEALER, zmq.PUSH):
        socket.immediate = True  # queues nothing while disconnected: an old heartbeat is worthless
    if kind == zmq.SUB:
        socket.conflate = True  # only the newest view counts; must be set before connecting
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
        socket.ipv6 = True  # needed for IPv6 addresses; not always set, since a name or * would no longer mean IPv4
    socket.linger = 0
    socket.maxmsgsize = limit
    socket.heartbeat_ivl = PING_MS
    socket.heartbeat_timeout = PEER_GONE_MS
    return socket
