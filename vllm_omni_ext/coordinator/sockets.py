"""How sockets of the control plane are set up, on both sides."""

from __future__ import annotations

from typing import Any, TypeAlias

import zmq

from vllm_omni_ext.coordinator.keys import Keys, as_client, as_server
from vllm_omni_ext.errors import OmniError

Socket: TypeAlias = "zmq.Socket[Any]"

PING_MS = 5_000
"""How often libzmq asks whether the other end is there: a host that vanished closes no connection."""

PEER_GONE_MS = 30_000
"""A connection on which nothing was heard for so long is closed (and made again by who made it)."""

RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 1_000
"""Pause before a lost connection is tried again; it grows from one to the other."""


def listen(context: zmq.Context[Any], kind: int, address: str, keys: Keys | None, *, limit: int, queued: int) -> Socket:
    """A bound socket; OmniError if the address cannot be used.

    Args:
        limit: libzmq disconnects who sends a longer frame, in bytes.
        queued: messages that wait for a slow peer.
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
    """A socket that connects to `address`, again and again; OmniError if it is no address.

    Args:
        watched: events that its `get_monitor_socket()` tells of, those of the very first attempt included.
    """
    socket = _socket(context, kind, address, limit)
    as_client(socket, keys)
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = LONGEST_RECONNECT_MS
    if kind == zmq.DEALER:
        socket.immediate = True  # nothing is queued while it is not connected: an old heartbeat says nothing
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
        socket.ipv6 = True  # libzmq takes no IPv6 address without it; with it, a name or * would no longer mean IPv4
    socket.linger = 0
    socket.maxmsgsize = limit
    socket.heartbeat_ivl = PING_MS
    socket.heartbeat_timeout = PEER_GONE_MS
    return socket
