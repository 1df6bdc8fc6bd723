"""Adds `targets` (stages or replicas) to vLLM's two LoRA endpoints, and shares adapters among all API servers.

When the call that loads an adapter returns, every API server accepts its name as a model. An API server that is started
again receives the loaded adapters. Engines load an adapter by the path in a request, so replicas that join later, or
are started again, need no call. Only the frontend (the stage that writes text) can have adapters: a request has no
field that could select an adapter of another stage.
"""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.lora.request import LoRARequest

from vllm_omni_ext.errors import CallFailed
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.runtime.client.calls import Replies, failed
from vllm_omni_ext.runtime.client.replica_connections import Connections
from vllm_omni_ext.runtime.control import Adapter, AdapterLoaded, AdapterUnloaded
from vllm_omni_ext.serving.operator_calls import TARGETS, Targets, known_parameters, named_in, report
from vllm_omni_ext.serving.responses import BadRequest

NS_PER_NUMBER = 1_000_000
"""Nanoseconds per adapter number: numbers begin at the start time of the API server, in milliseconds."""


class LoadAdapter(LoadLoRAAdapterRequest):
    """vLLM's request body for loading an adapter, with the field `targets`."""

    targets: Any = None


class UnloadAdapter(UnloadLoRAAdapterRequest):
    """vLLM's request body for unloading an adapter, with the field `targets`."""

    targets: Any = None


FIELDS = known_parameters(*LoadAdapter.model_fields, *UnloadAdapter.model_fields)
"""Both routes allow the fields of both bodies: some clients send the loading body to unload an adapter too."""

router = APIRouter(dependencies=[FIELDS])


@router.post("/v1/load_lora_adapter", dependencies=[Depends(validate_json_request)])
async def load_lora_adapter(request: LoadAdapter, raw_request: Request, targets: Targets = None) -> Response:
    """Load a LoRA adapter into the targets; without targets, into all replicas of the frontend (writes text)."""
    return await raw_request.app.state.omni_adapters.load(request, named_in(targets, request.targets))


@router.post("/v1/unload_lora_adapter", dependencies=[Depends(validate_json_request)])
async def unload_lora_adapter(request: UnloadAdapter, raw_request: Request, targets: Targets = None) -> Response:
    """Remove an adapter from the targets; without targets, only its name is removed from the models, as in vLLM."""
    return await raw_request.app.state.omni_adapters.unload(request, named_in(targets, request.targets))


def _as_vllm(answer: ErrorResponse | str) -> Response:
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer)


class Adapters:
    """Loads and unloads LoRA adapters of the frontend (the stage that writes text).

    Args:
        stock: vLLM's handler of models, which has the names of the adapters.
    """

    def __init__(self, omni: AsyncOmni, stock: OpenAIServingModels) -> None:
        self._omni = omni
        self._stock = stock
        known, connections = stock.lora_requests, omni.connections
        numbers = Numbers(max((each.lora_int_id for each in known.values()), default=0), connections)
        stock.lora_id_counter = numbers  # type: ignore[assignment]
        for name in omni.operator_state.unloaded:
            known.pop(name, None)
        for adapter in omni.operator_state.adapters.values():
            self._changed(AdapterLoaded(adapter))
        omni.adapters_changed = self._changed

    async def load(self, request: LoadAdapter, targets: list[str] | None) -> Response:
        """Load an adapter into the targets (None: all frontend replicas).

        When all targets have loaded the adapter, requests can use its name as `model`.
        """
        if self._omni.vllm_config.lora_config is None:
            raise BadRequest("lora_name: this server has no LoRA; start it with --enable-lora", parameter="lora_name")
        models, replies = self._stock, Replies()
        if targets is not None:
            self._check(targets)

            async def add_lora(request: LoRARequest) -> bool:
                replies.update(await self._omni.add_lora(request, targets=targets))
                if failed(replies):
                    raise CallFailed(replies)
                return True

            models = copy.copy(self._stock)  # shallow: the copy adds the adapter to the same `lora_requests`
            models.engine_client = SimpleNamespace(add_lora=add_lora)  # type: ignore[assignment]
        answer = await models.load_lora_adapter(request)
        if not isinstance(answer, ErrorResponse):
            loaded = self._stock.lora_requests[request.lora_name]
            adapter = Adapter(
                loaded.lora_name,
                loaded.lora_int_id,
                loaded.lora_path,
                base=loaded.base_model_name,
                three_d=loaded.is_3d_lora_weight,
            )
            await self._omni.share(AdapterLoaded(adapter))
        return report(replies) if replies else _as_vllm(answer)

    async def unload(self, request: UnloadAdapter, targets: list[str] | None) -> Response:
        """Remove an adapter from the targets.

        The adapter's name is removed from the models if `targets` is None, or contains all replicas of a stage.
        """
        adapter = self._stock.lora_requests.get(request.lora_name)
        if targets is not None:
            self._check(targets)
        if targets is None or adapter is None:  # vLLM reports a name that is unknown
            return _as_vllm(await self._drop(request))
        replies = await self._omni.remove_lora(adapter.lora_int_id, targets=targets)
        stage = self._omni.calls.common({replica.stage for replica in replies})
        if stage and replies.keys() == set(self._omni.calls.resolve([stage])) and not failed(replies):
            await self._drop(request)
        return report(replies)

    async def _drop(self, request: UnloadAdapter) -> ErrorResponse | str:
        answer = await self._stock.unload_lora_adapter(request)
        if not isinstance(answer, ErrorResponse):
            await self._omni.share(AdapterUnloaded(request.lora_name))
        return answer

    def _changed(self, change: AdapterLoaded | AdapterUnloaded) -> None:
        if isinstance(change, AdapterUnloaded):
            self._stock.lora_requests.pop(change.name, None)
            return
        adapter = change.adapter
        self._stock.lora_requests[adapter.name] = LoRARequest(
            lora_name=adapter.name,
            lora_int_id=adapter.number,
            lora_path=adapter.path,
            base_model_name=adapter.base,
            is_3d_lora_weight=adapter.three_d,
        )

    def _check(self, targets: list[str]) -> None:
        """Raise BadRequest if a target is not a replica of the frontend: only the frontend can have adapters."""
        for replica in self._omni.calls.resolve(targets):
            if not self._omni.calls.is_text(replica.stage):
                raise BadRequest(
                    f"targets: requests cannot use adapters of '{replica.stage}', only of the stage that writes text; "
                    "leave targets out",
                    parameter=TARGETS,
                )


class Numbers:
    """Counts adapter numbers (vLLM's `lora_int_id`) above `before`, unique over all API servers, also ended ones."""

    def __init__(self, before: int, connections: Connections) -> None:
        self._step = connections.client_count
        first = max(before, time.time_ns() // NS_PER_NUMBER) // self._step + 1
        self._value = first * self._step + connections.client_index - self._step

    def inc(self, num: int = 1) -> int:
        """Return the next number. Same signature as vLLM's `AtomicCounter.inc`; vLLM always calls it with `num=1`."""
        self._value += self._step * num
        return self._value
