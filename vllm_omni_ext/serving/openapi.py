"""The fields of `/v1/chat/completions` beyond vLLM's, in `/openapi.json`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from vllm_omni_ext.serving.chat import METRICS
from vllm_omni_ext.serving.options import CHUNKS, MODALITIES
from vllm_omni_ext.serving.served import ServedModel
from vllm_omni_ext.serving.stage_params import LIST, named_stages, stage_param_names

CHAT = "ChatCompletionRequest"
COMPONENTS = "#/components/schemas/{model}"


def install(app: FastAPI, model: ServedModel) -> None:
    """Add the fields to the page, which the first request for it generates."""
    stock = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = stock()
            fields, definitions = chat_fields(model)
            page["components"]["schemas"] |= definitions
            page["components"]["schemas"][CHAT]["properties"] |= fields
        return stock()

    app.openapi = openapi  # type: ignore[method-assign]


def chat_fields(model: ServedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return JSON schemas of the fields by name, and the definitions that they refer to."""
    names = list(model.capabilities.modalities)
    fields: dict[str, Any] = {
        MODALITIES: {"type": "array", "items": {"type": "string", "enum": names}},
        CHUNKS: {"type": "object"},
        METRICS: {"type": "boolean"},
        LIST: {"type": "array", "items": {"type": "object"}},
    }
    for stage in named_stages(model.omni.plan):
        parameters: dict[str, Any] = {name: {} for name in sorted(stage_param_names(stage))}
        fields[stage.model_stage] = {"type": "object", "properties": parameters, "additionalProperties": False}
    for name in names:
        for field in model.modalities[name].body_fields:
            fields[field] = {"description": f"of the modality {name}"}
    declared = model.runtime.fields.model_json_schema(by_alias=False, ref_template=COMPONENTS)
    return fields | declared.get("properties", {}), declared.get("$defs", {})
