"""The engine client of `AsyncLLM`: passes requests to the orchestrator, and utility calls to all replicas concerned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.admission import Admission
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.runtime.client.calls import Calls


class TextClient:
    """The engine client of `AsyncLLM` in place of vLLM's `EngineCoreClient`, for all replicas of the frontend.

    The frontend is the stage that writes text.

    Args:
        config: vLLM config of the frontend.
        admission: starts requests.
        sides: names of the prefill and the decode stage of each split stage, by the name of the split stage.
        own_models: stages that run a model class of the plugin (see `Calls`).
    """

    def __init__(
        self,
        config: VllmConfig,
        orchestrator: Orchestrator,
        sides: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        admission: Admission,
        own_models: Collection[str] = (),
    ) -> None:
        self._admission = admission
        self._orchestrator = orchestrator
        self.calls = Calls(
            orchestrator.replicas, orchestrator.pools, orchestrator.frontend, sides, own_models=own_models
        )
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._handling = False
        self.resources = SimpleNamespace(engine_dead=False)  # also without a replica, because true ends the server
        self.vllm_config = config
        self.stats_update_address = None

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Queue outputs for `AsyncLLM`, after the orchestrator has processed them."""
        self._outputs.put_nowait(outputs)

    @property
    def engine_ranks_managed(self) -> list[int]:
        """Indices of the frontend's replicas."""
        return [replica.index for replica in self._replicas()]

    def _replicas(self) -> dict[ReplicaId, Any]:
        replicas, frontend = self._orchestrator.replicas, self._orchestrator.frontend
        return {name: replica for name, replica in replicas.items() if name.stage == frontend}

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next outputs of any replica of the frontend.

        The call also acknowledges that `AsyncLLM` has processed the previous outputs, for which `delivered` waits.
        """
        if self._handling:
            self._outputs.task_done()
        self._handling = False
        outputs = await self._outputs.get()
        self._handling = True
        return outputs

    async def delivered(self) -> None:
        """Wait until `AsyncLLM` has processed all queued outputs."""
        await self._outputs.join()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a request in the orchestrator, which sends it to the stages that it needs."""
        await self._admission.open(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End the text output of requests in which `AsyncLLM` has found a stop string.

        Their other stages continue; `AsyncOmni.abort` ends all stages.
        """
        await self._orchestrator.text_stopped(request_ids)

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Return the KV event publishers of the frontend's replicas, by index of the replica."""
        return {
            name.index: source
            for name, replica in self._replicas().items()
            for source in replica.client.get_kv_event_sources().values()
        }

    def dp_engines_running(self) -> bool:
        """Always false: replicas are independent, so there are no data parallel waves."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: `AsyncOmni.shutdown` closes the connections of all stages."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a function that passes calls of a utility, e.g. `reset_prefix_cache_async`, to `Calls.everywhere`."""
        if not name.endswith("_async"):
            raise AttributeError(f"TextClient has no attribute '{name}'")
        return partial(self.calls.everywhere, name)
