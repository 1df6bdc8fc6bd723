"""One replica as the orchestrator sees it, and the stock vLLM client behind it."""

from __future__ import annotations

from typing import Any, Protocol

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_omni_ext.ids import ReplicaId


class Replica(Protocol):
    """What the orchestrator needs of a replica."""

    id: ReplicaId

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request, or a chunk of one."""

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored by the engine."""

    async def outputs(self) -> EngineCoreOutputs:
        """The next outputs; EngineDeadError when the replica is gone."""

    def close(self, timeout: float | None = None) -> None:
        """Close the connection."""


class StockReplica:
    """A replica reached through vLLM's own `AsyncMPClient`."""

    def __init__(self, replica_id: ReplicaId, client: AsyncMPClient) -> None:
        self.id = replica_id
        self.client = client

    async def add(self, request: EngineCoreRequest) -> None:
        """Send a request, or a chunk of one; what is sent to a replica that is gone is given to another one anyway."""
        if not self.dead:
            await self.client.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests."""
        await self.client.abort_requests_async(request_ids)

    async def outputs(self) -> EngineCoreOutputs:
        """The next outputs of this replica for this API server."""
        return await self.client.get_output_async()

    async def fence(self) -> None:
        """Wait until it has done all that was sent before: it answers a call only after that."""
        await self.client.get_supported_tasks_async()

    def fail(self, error: Exception) -> None:
        """Make `outputs` raise: used when a supervisor saw the process die (vLLM's client cannot)."""
        self.client.resources.engine_dead = True
        self.client.outputs_queue.put_nowait(error)

    def close(self, timeout: float | None = None) -> None:
        """Close the sockets; the process belongs to the launcher."""
        self.client.shutdown(timeout=timeout)

    @property
    def dead(self) -> bool:
        """Whether vLLM's client has given the engine up."""
        return bool(self.client.resources.engine_dead)


def chunk_request(template: EngineCoreRequest, *, extra_args: dict[str, Any], rows: Any) -> EngineCoreRequest:
    """A chunk for the request `template` was opened with: same id, no prompt of its own."""
    from vllm.sampling_params import SamplingParams

    return EngineCoreRequest(
        request_id=template.request_id,
        prompt_token_ids=None if rows is not None else [0],
        mm_features=None,
        sampling_params=SamplingParams(extra_args=extra_args),
        pooling_params=None,
        arrival_time=template.arrival_time,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=rows,
        resumable=True,
    )
