"""vLLM's client of one engine, for cases its constructor does not cover: reconnecting, no engine, CURVE keys."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import zmq
from vllm.utils.network_utils import ZmqListener
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_omni_ext.coordinator.keys import Keys

Listeners: TypeAlias = tuple[ZmqListener, ZmqListener]
"""The two sockets on which an API server listens for a replica: one for its input, one for its output."""

CONNECT_MS = 5000
"""Limit of a running engine's reconnection, in milliseconds; engines try several times a second."""

log = logging.getLogger(__name__)

ENGINE = (0).to_bytes(2, "little")
"""ZeroMQ identity of the only engine behind a client."""


class Client(AsyncMPClient):
    """vLLM's client, which can also replace an earlier client of the same engine whose process has ended.

    An engine sends its ready message once. A replacing client is given that message and waits only for the connection.

    The wait for a starting engine has its own limit. vLLM's (`VLLM_ENGINE_READY_TIMEOUT_S`) is read when its module is
    imported, which is before this process was forked, and its default of 600 s is shorter than a download.

    Args:
        ready_response: the engine's ready message; None: wait for it.
        keys: CURVE keys that the engine must have; None: any peer that connects counts as the engine.
        ready_within_s: limit of the wait for the ready message, in seconds; None: vLLM's limit.

    Raises:
        TimeoutError: the engine was not ready in time.
    """

    ready_response: bytes = b""

    def __init__(
        self,
        *args: Any,
        ready_response: bytes | None = None,
        keys: Keys | None = None,
        ready_within_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._keys = keys
        self._follows = ready_response is not None
        self._ready_within_s = ready_within_s
        self._engines: list[bytes] = []
        super().__init__(*args, **kwargs)
        self._engines = self._engines[:]
        if ready_response is not None:
            self._await_connection()
            self._apply_ready_response(ready_response)

    def _await_connection(self) -> None:
        """Wait until the engine has connected. ZeroMQ silently drops messages that are sent before.

        A hung engine never connects; the process supervision detects that.
        """
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket)
        socket.router_mandatory = True  # otherwise the socket always counts as writable
        if not socket.poll(CONNECT_MS, zmq.POLLOUT):
            log.warning("an engine has not connected within %d ms", CONNECT_MS)
        socket.router_mandatory = False

    @property
    def ctx(self) -> Any:
        """ZeroMQ context of the sockets."""
        return self._context

    @ctx.setter
    def ctx(self, context: Any) -> None:
        """Set the options of the context that vLLM's constructor has made, before it makes sockets with it.

        A pyzmq context gives its options to every socket that it makes. libzmq ignores CURVE on inproc sockets.
        """
        self._context = context
        if self._keys is not None:
            context.sockopts.update(self._keys.listening)

    @property
    def core_engines(self) -> list[bytes]:  # type: ignore[override]
        """ZeroMQ identities of the engines."""
        return self._engines

    @core_engines.setter
    def core_engines(self, engines: list[bytes]) -> None:
        """Set by vLLM's constructor, which then waits for the ready message of each engine."""
        self._engines = _Ready(engines) if self._follows else engines
        if not self._follows and self._ready_within_s is not None:
            self._await_ready(self._ready_within_s)

    def _await_ready(self, limit_s: float) -> None:
        """Wait until the engine's ready message has arrived, and leave the message for vLLM to read."""
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket)
        if not socket.poll(int(limit_s * 1000), zmq.POLLIN):
            raise TimeoutError(f"an engine was not ready within {limit_s:g} s (timeouts.startup_timeout_s)")

    def _apply_ready_response(self, payload: bytes) -> None:
        self.ready_response = payload
        super()._apply_ready_response(payload)


class _Ready(list[bytes]):
    """Engines that are ready already: vLLM's constructor iterates over the list to wait for each, and finds none."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(())


def addresses(listeners: Listeners) -> dict[str, Any]:
    """`client_addresses` of vLLM's client, which takes ownership of the listeners."""
    input_listener, output_listener = listeners
    return {
        "input_address": input_listener.address,
        "output_address": output_listener.address,
        "input_listener": input_listener.socket,
        "output_listener": output_listener.socket,
    }


@contextlib.contextmanager
def bootstrap_client_addresses(folder: str, ready_response: bytes) -> Iterator[dict[str, Any]]:
    """Yield `client_addresses` of a dummy engine that only sends a ready message, for the client in `AsyncLLM`'s
    constructor.

    Args:
        folder: directory of the sockets.
        ready_response: ready message of an engine of the frontend; empty if there is none yet.
    """
    unique = os.path.join(folder, f"stand-in-{os.getpid()}-{time.monotonic_ns()}")
    where = {"input_address": f"ipc://{unique}-i", "output_address": f"ipc://{unique}-o"}
    with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.linger = 0
        engine.setsockopt(zmq.IDENTITY, ENGINE)
        engine.connect(where["input_address"])
        engine.send(ready_response)
        yield where
    for path in (f"{unique}-i", f"{unique}-o"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
