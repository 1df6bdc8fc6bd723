"""Connects to one replica through vLLM's client, extended by CURVE keys, reconnection and a start without engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from vllm.utils.network_utils import ZmqListener
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.sent_media import SentMedia
from vllm_omni_ext.wire.stage_input import ABORT_CLIENT

Listeners: TypeAlias = tuple[ZmqListener, ZmqListener]
"""The two sockets on which an API server listens for a replica: for the replica's input, and for its output."""

CONNECT_MS = 5000
"""Limit of the wait for a running engine to reconnect, in milliseconds; engines try several times a second."""

ENGINE = (0).to_bytes(2, "little")
"""ZeroMQ identity of a replica's engine: vLLM's for the first engine of a client, and a replica is one engine."""


class Client(AsyncMPClient):
    """vLLM's client of an engine, which can also replace the client of an API server that has died.

    An engine sends its ready message once. A replacing client gets that message as an argument, and waits only for the
    connection.

    `ready_within_s` limits the wait for a starting engine. vLLM's own limit (`VLLM_ENGINE_READY_TIMEOUT_S`) cannot be
    used: vLLM reads it at import, before this process is forked, and its default of 600 s is too short for a download.

    Args:
        ready_response: the engine's ready message; None: wait for it.
        keys: CURVE keys that the engine must have; None: any peer that connects is accepted as the engine.
        ready_within_s: limit of the wait for the ready message, in seconds; None: vLLM's limit.

    Raises:
        TimeoutError: the engine was not ready in time.
    """

    ready_response: bytes = b""
    connected: bool = True
    """Whether the engine has connected; only a client with the argument `ready_response` starts without."""

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
        """Wait at most `CONNECT_MS` until the engine has connected, and set `connected`.

        ZeroMQ drops messages that are sent earlier, without an error.
        """
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.input_socket)
        socket.router_mandatory = True  # otherwise the socket always counts as writable
        self.connected = bool(socket.poll(CONNECT_MS, zmq.POLLOUT))
        socket.router_mandatory = False

    async def connection(self) -> None:
        """Wait without a limit until the engine has connected, and set `connected`. Until then, sending is an error."""
        self.input_socket.router_mandatory = True  # as in `_await_connection`
        await self.input_socket.poll(flags=zmq.POLLOUT)  # an event of the socket's file descriptor wakes the loop
        self.input_socket.router_mandatory = False
        self.connected = True

    @property
    def ctx(self) -> Any:
        """ZeroMQ context of the sockets."""
        return self._context

    @ctx.setter
    def ctx(self, context: Any) -> None:
        """Store the context that vLLM's constructor has made, and set the CURVE options before it makes sockets.

        A pyzmq context sets its options on every socket that it makes. libzmq ignores CURVE on inproc sockets.
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
        """Store the engines. vLLM's constructor does this before it waits for the ready message of each engine."""
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
    """List of engines that are ready, and that vLLM's constructor must not wait for.

    The constructor iterates over the list to wait for each engine; the iteration yields none.
    """

    def __iter__(self) -> Iterator[bytes]:
        return iter(())


def addresses(listeners: Listeners) -> dict[str, Any]:
    """Return the argument `client_addresses` of vLLM's client, which takes ownership of the listeners."""
    input_listener, output_listener = listeners
    return {
        "input_address": input_listener.address,
        "output_address": output_listener.address,
        "input_listener": input_listener.socket,
        "output_listener": output_listener.socket,
    }


@contextlib.contextmanager
def bootstrap_client_addresses(folder: str, ready_response: bytes) -> Iterator[dict[str, Any]]:
    """Yield `client_addresses` of a dummy engine, which only sends a ready message.

    `AsyncLLM`'s constructor makes a client that waits for an engine's ready message. `AsyncOmni` then replaces this
    client by a `TextClient` for all replicas.

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


@dataclass(frozen=True, slots=True)
class _Mark:
    """Marker that `StockReplica.fence` puts into the queue of outputs; `passed` is set when `outputs` reads it."""

    passed: asyncio.Future[None]


class StockReplica:
    """Connection to one replica: sends requests and calls, and receives outputs, with vLLM's own `AsyncMPClient`.

    Args:
        media: the media that this process has sent to the replica; None: each request has all its media.
    """

    def __init__(self, replica_id: ReplicaId, client: Client, media: SentMedia | None = None) -> None:
        self.id = replica_id
        self.client = client
        self._media = media
        self._calls: set[asyncio.Future[Any]] = set()
        self._gone = False
        self.reason = ""
        """Reason why the replica's process has ended, from the supervisor; "" before."""

    @property
    def connected(self) -> bool:
        """Whether the engine has connected. ZeroMQ drops messages that are sent earlier, without an error."""
        return bool(self.client.connected)

    async def connection(self) -> None:
        """Wait until the engine has connected."""
        await self.client.connection()

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request, or a chunk of one, to the engine.

        Does nothing if the replica is dead: `Orchestrator.replica_down` sends its requests to other replicas.
        """
        if not self.dead:
            await self.client.add_request_async(request if self._media is None else self._media.without_held(request))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests in the replica."""
        if self._media is not None:
            self._media.forget(request_ids)
        await self.client.abort_requests_async(request_ids)

    async def call(self, utility: str, *args: Any) -> Any:
        """Call a utility method of vLLM's client, e.g. `sleep_async`, and return its result.

        Raises:
            EngineDeadError: the replica is dead, or died before it answered (vLLM's client would wait for ever).
        """
        if self._gone:
            raise EngineDeadError()
        return await self._until_gone(asyncio.ensure_future(getattr(self.client, utility)(*args)))

    async def _until_gone(self, call: asyncio.Future[Any]) -> Any:
        """Wait for a call; EngineDeadError if the replica ends first."""
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self._gone:
                raise EngineDeadError() from None
            raise
        finally:
            self._calls.discard(call)

    async def outputs(self) -> EngineCoreOutputs:
        """Return the next outputs of this replica for this API server.

        While outputs are queued, this method yields to the other tasks of the event loop; `Queue.get` alone would not.

        Raises:
            EngineDeadError: the replica is dead. Pending `call`s raise EngineDeadError too.
        """
        try:
            while True:
                if (waiting := self.client.outputs_queue) is not None and not waiting.empty():
                    await asyncio.sleep(0)
                outputs = await self.client.get_output_async()
                if not isinstance(outputs, _Mark):
                    await self._send_again(outputs)
                    return outputs
                if not outputs.passed.done():
                    outputs.passed.set_result(None)
        except (EngineDeadError, asyncio.CancelledError):
            self._gone = True
            for call in self._calls:
                call.cancel()
            raise

    async def _send_again(self, outputs: EngineCoreOutputs) -> None:
        """Send requests whose media the engine lacks again, with all media; remove their outputs from `outputs`."""
        for request in () if self._media is None else self._media.missed(outputs):
            await self.client.add_request_async(request)

    async def fence(self) -> None:
        """Wait until the engine has processed all earlier messages, and `outputs` has returned all their outputs.

        Called after old requests were aborted, so that no output of them arrives later. The engine answers a utility
        call after all earlier messages. vLLM's client resolves the call while earlier outputs may still be in its
        queue, so a marker is put into that queue.

        Raises:
            EngineDeadError: the replica is dead, or died meanwhile.
        """
        await self.call("get_supported_tasks_async")
        if self._gone:
            raise EngineDeadError()
        mark = _Mark(asyncio.get_running_loop().create_future())
        self.client.outputs_queue.put_nowait(mark)
        await self._until_gone(mark.passed)

    def fail(self, reason: str) -> None:
        """Make `outputs` raise EngineDeadError.

        Called when the supervisor has detected the end of the replica's process; vLLM's client does not detect it.
        """
        self.reason = reason
        self.client.resources.engine_dead = True
        self.client.outputs_queue.put_nowait(EngineDeadError(reason))

    def close(self, timeout: float | None = None) -> None:
        """Close the sockets, from any thread. Does not end the replica's process."""
        resources = self.client.resources
        loop = None if resources.output_queue_task is None else resources.output_queue_task.get_loop()
        self.client.shutdown(timeout=timeout)
        # vLLM leaves the context to garbage collection, which waits in the event loop for messages that were not sent.
        term = threading.Thread(target=resources.ctx.term, name="end-zmq", daemon=True)
        if loop is None or not loop.is_running() or asyncio._get_running_loop() is loop:
            term.start()
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(term.start)  # after vLLM has closed the sockets there

    @property
    def dead(self) -> bool:
        """Whether vLLM's client has marked the engine as dead."""
        return bool(self.client.resources.engine_dead)


def abort_client(client: int, before: float) -> EngineCoreRequest:
    """Return a message that makes a replica abort the requests of a dead API server.

    The message has the form of a request, see `wire.stage_input.ABORT_CLIENT`.

    Args:
        client: index of the dead API server.
        before: Unix time in seconds; requests that were sent later, by the server's successor, are kept.
    """
    from vllm.sampling_params import SamplingParams

    return EngineCoreRequest(
        request_id=f"abort-client-{client}-{before}",
        prompt_token_ids=[0],
        mm_features=None,
        sampling_params=SamplingParams(extra_args={ABORT_CLIENT: {"client": client, "before": before}}),
        pooling_params=None,
        arrival_time=before,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
