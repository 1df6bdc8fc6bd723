"""A replica, reached through the stock vLLM client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.wire.stage_input import ABORT_CLIENT


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place in the queue of outputs; `passed` is set when `outputs` reaches the place."""

    passed: asyncio.Future[None]


class StockReplica:
    """A replica reached through vLLM's own `AsyncMPClient`."""

    def __init__(self, replica_id: ReplicaId, client: AsyncMPClient) -> None:
        self.id = replica_id
        self.client = client
        self._calls: set[asyncio.Future[Any]] = set()
        self._gone = False
        self.reason = ""
        """Reason of the process's end, once a supervisor has reported it."""

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request or a chunk of one. No-op if the replica is dead: `replica_down` replays its requests."""
        if not self.dead:
            await self.client.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests."""
        await self.client.abort_requests_async(request_ids)

    async def call(self, utility: str, *args: Any) -> Any:
        """Call one of the client's utilities.

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
        """The next outputs of this replica for this API server. A pending call ends when the replica has no more
        outputs.

        All other tasks of the loop run between the outputs of a backlog: `Queue.get` alone does not yield to them.
        """
        try:
            while True:
                if (waiting := self.client.outputs_queue) is not None and not waiting.empty():
                    await asyncio.sleep(0)
                outputs = await self.client.get_output_async()
                if not isinstance(outputs, _Mark):
                    return outputs
                if not outputs.passed.done():
                    outputs.passed.set_result(None)
        except (EngineDeadError, asyncio.CancelledError):
            self._gone = True
            for call in self._calls:
                call.cancel()
            raise

    async def fence(self) -> None:
        """Wait until the engine has processed all messages sent before, and `outputs` has returned all their outputs.

        The engine answers the call of a utility in order, but vLLM's client resolves the call at once, while outputs
        that arrived before it may still be in its queue.

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
        """Make `outputs` raise: called when a supervisor has detected the process's end (vLLM's client does not)."""
        self.reason = reason
        self.client.resources.engine_dead = True
        self.client.outputs_queue.put_nowait(EngineDeadError(reason))

    def close(self, timeout: float | None = None) -> None:
        """Close the sockets, from any thread. The launcher owns the process."""
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
    """A request that aborts the requests that a dead API server sent until `before` (Unix seconds); see
    `wire.stage_input.ABORT_CLIENT`.
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
