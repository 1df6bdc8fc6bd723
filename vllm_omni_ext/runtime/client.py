"""vLLM's client of one engine where vLLM's constructor does not fit: after a restart, without engine, with keys."""

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
"""Where an API server hears of a replica: for the replica's input, for its output."""

CONNECT_MS = 5000
"""What an engine that runs may take to connect anew; it tries several times a second."""

log = logging.getLogger(__name__)

ENGINE = (0).to_bytes(2, "little")
"""How the only engine behind a client calls itself."""


class Client(AsyncMPClient):
    """As vLLM's, but it can follow on another client of the same engine, in a process that has ended.

    An engine says once that it is ready. A client that follows takes that as said, and waits for the connection only.

    The wait for a starting engine has a limit of our own. vLLM's (`VLLM_ENGINE_READY_TIMEOUT_S`) is read when its
    module is imported, which is before this process was forked, and 600 s by default: less than a download takes.

    Args:
        said: what the engine said when it was ready; None: it is waited for.
        keys: what the engine must know; None: whoever connects is taken for the engine.
        ready_within_s: how long it is waited for, in seconds; None: as long as vLLM does.

    Raises:
        TimeoutError: the engine was not ready in time.
    """

    said: bytes = b""

    def __init__(
        self,
        *args: Any,
        said: bytes | None = None,
        keys: Keys | None = None,
        ready_within_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._keys = keys
        self._follows = said is not None
        self._ready_within_s = ready_within_s
        self._engines: list[bytes] = []
        super().__init__(*args, **kwargs)
        self._engines = self._engines[:]
        if said is not None:
            self._await_connection()
            self._apply_ready_response(said)

    def _await_connection(self) -> None:
        """Wait until the engine has connected: what is sent to it before that is lost without a word.

        An engine that hangs does not connect. Those who watch it notice that.
        """
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket)
        socket.router_mandatory = True  # else it counts as writable always
        if not socket.poll(CONNECT_MS, zmq.POLLOUT):
            log.warning("an engine has not connected within %d ms", CONNECT_MS)
        socket.router_mandatory = False

    @property
    def ctx(self) -> Any:
        """The context of the sockets."""
        return self._context

    @ctx.setter
    def ctx(self, context: Any) -> None:
        """Take the context that vLLM's constructor has made, before it makes sockets with it.

        A pyzmq context gives its options to every socket that it makes. libzmq ignores CURVE on inproc sockets.
        """
        self._context = context
        if self._keys is not None:
            context.sockopts.update(self._keys.listening)

    @property
    def core_engines(self) -> list[bytes]:  # type: ignore[override]
        """Names of the engines."""
        return self._engines

    @core_engines.setter
    def core_engines(self, engines: list[bytes]) -> None:
        """vLLM's constructor sets it, and then waits for the engines to say that they are ready."""
        self._engines = _Ready(engines) if self._follows else engines
        if not self._follows and self._ready_within_s is not None:
            self._await_ready(self._ready_within_s)

    def _await_ready(self, limit_s: float) -> None:
        """Wait until the engine has said that it is ready, and leave what it has said for vLLM to read."""
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket)
        if not socket.poll(int(limit_s * 1000), zmq.POLLIN):
            raise TimeoutError(f"an engine was not ready within {limit_s:g} s (startup_timeout_s)")

    def _apply_ready_response(self, payload: bytes) -> None:
        self.said = payload
        super()._apply_ready_response(payload)


class _Ready(list[bytes]):
    """Engines that nobody needs to wait for: vLLM's constructor goes through the list to wait for each."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(())


def addresses(listeners: Listeners) -> dict[str, Any]:
    """`client_addresses` of vLLM's client, which takes the listeners over."""
    given, taken = listeners
    return {
        "input_address": given.address,
        "output_address": taken.address,
        "input_listener": given.socket,
        "output_listener": taken.socket,
    }


@contextlib.contextmanager
def stand_in(folder: str, said: bytes) -> Iterator[dict[str, Any]]:
    """`client_addresses` of an engine that only says it is ready: for `AsyncLLM`'s constructor, which makes a client.

    Args:
        folder: where the sockets are.
        said: what an engine of the text stage said when it was ready; empty if there is none yet.
    """
    unique = os.path.join(folder, f"stand-in-{os.getpid()}-{time.monotonic_ns()}")
    where = {"input_address": f"ipc://{unique}-i", "output_address": f"ipc://{unique}-o"}
    with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.linger = 0
        engine.setsockopt(zmq.IDENTITY, ENGINE)
        engine.connect(where["input_address"])
        engine.send(said)
        yield where
    for path in (f"{unique}-i", f"{unique}-o"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
