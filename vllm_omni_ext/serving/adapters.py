"""LoRA adapters of single stages and replicas: vLLM's two endpoints with `targets`.

An adapter belongs to one model, so all targets of a call must be of one stage, and each stage has its own names. The
frontend's adapters are vLLM's: clients can request them as models. No request uses an adapter of a later stage yet.
"""

from __future__ import annotations

import copy
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.lora.request import LoRARequest

from vllm_omni_ext.errors import CallFailed, RequestError
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.runtime.client.calls import Replies, failed
from vllm_omni_ext.serving.call_reports import TARGETS, Targets, named_in, refusing, report
from vllm_omni_ext.serving.parameters import KnownParameters


class LoadAdapter(LoadLoRAAdapterRequest):
    """vLLM's body, with targets."""

    targets: Any = None


class UnloadAdapter(UnloadLoRAAdapterRequest):
    """vLLM's body, with targets."""

    targets: Any = None


FIELDS = (*LoadAdapter.model_fields, *UnloadAdapter.model_fields)
"""Fields of both bodies: some clients send the loading body to unload an adapter too."""

BODIES = {"/v1/load_lora_adapter": FIELDS, "/v1/unload_lora_adapter": FIELDS}

router = APIRouter(dependencies=[Depends(KnownParameters(BODIES))])


@router.post("/v1/load_lora_adapter", dependencies=[Depends(validate_json_request)])
@refusing
async def load_lora_adapter(request: LoadAdapter, raw_request: Request, targets: Targets = None) -> Response:
    """Load an adapter."""
    named = named_in(targets, request.targets)
    if named is None:
        return _as_vllm(await raw_request.app.state.openai_serving_models.load_lora_adapter(request))
    adapters: StageAdapters = raw_request.app.state.omni_adapters
    return await adapters.load(request, named)


@router.post("/v1/unload_lora_adapter", dependencies=[Depends(validate_json_request)])
@refusing
async def unload_lora_adapter(request: UnloadAdapter, raw_request: Request, targets: Targets = None) -> Response:
    """Without targets, drop an adapter's name, as vLLM does; with targets, also remove the adapter from them."""
    named = named_in(targets, request.targets)
    if named is None:
        return _as_vllm(await raw_request.app.state.openai_serving_models.unload_lora_adapter(request))
    adapters: StageAdapters = raw_request.app.state.omni_adapters
    return await adapters.unload(request, named)


def _as_vllm(answer: ErrorResponse | str) -> Response:
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer)


class StageAdapters:
    """The adapters of every stage, by name.

    Args:
        stock: vLLM's model list, which holds the adapters of the frontend.
    """

    def __init__(self, omni: AsyncOmni, stock: OpenAIServingModels) -> None:
        self._omni = omni
        self._stock = stock
        self._by_stage: dict[str, dict[str, LoRARequest]] = {}

    async def load(self, request: LoadAdapter, targets: list[str]) -> Response:
        """Load an adapter into the targets; its name becomes valid when all targets have loaded it."""
        engine = _Aimed(self._omni, targets)
        answer = await self._models(self._stage(targets), engine).load_lora_adapter(request)
        return report(engine.replies) if engine.replies else _as_vllm(answer)

    async def unload(self, request: UnloadAdapter, targets: list[str]) -> Response:
        """Remove an adapter from the targets; its name stays valid while other replicas have it."""
        stage = self._stage(targets)
        models = self._models(stage, self._omni)
        if (adapter := models.lora_requests.get(request.lora_name)) is None:
            return _as_vllm(await models.unload_lora_adapter(request))  # vLLM reports that the name is unknown
        replies = await self._omni.remove_lora(adapter.lora_int_id, targets=targets)
        if replies.keys() == set(self._omni.calls.resolve([stage])) and not failed(replies):
            await models.unload_lora_adapter(request)
        return report(replies)

    def _stage(self, targets: list[str]) -> str:
        stage = self._omni.calls.common({replica.stage for replica in self._omni.calls.resolve(targets)})
        if stage is None:
            raise RequestError("targets: an adapter is made for one stage; name replicas of one", parameter=TARGETS)
        return stage

    def _models(self, stage: str, engine: Any) -> OpenAIServingModels:
        """Return vLLM's checks and adapter names for one stage, in front of `engine`."""
        models = copy.copy(self._stock)
        models.engine_client = engine
        if not self._omni.calls.is_text(stage):
            models.lora_requests = self._by_stage.setdefault(stage, {})
        return models


class _Aimed:
    """A stand-in for the engine in vLLM's model list: calls reach only the targets."""

    def __init__(self, omni: AsyncOmni, targets: list[str]) -> None:
        self._omni = omni
        self._targets = targets
        self.replies: Replies = {}

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; `replies` holds the answer of each replica."""
        self.replies = await self._omni.add_lora(lora_request, targets=self._targets)
        if failed(self.replies):
            raise CallFailed(self.replies)
        return True
