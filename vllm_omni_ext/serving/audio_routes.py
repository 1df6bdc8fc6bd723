"""The routes below `/v1/audio`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from vllm_omni_ext.serving.encoding import SPEECH_FORMATS
from vllm_omni_ext.serving.speech_options import SpeechRequest

router = APIRouter()

_ERRORS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_SOUND = {
    encoding.media_type: {"schema": {"type": "string", "format": "binary"}} for encoding in SPEECH_FORMATS.values()
}


@router.post(
    "/v1/audio/speech",
    dependencies=[Depends(validate_json_request)],
    response_class=Response,
    responses={
        HTTPStatus.OK.value: {"content": {**_SOUND, "text/event-stream": {}}},
        **{status.value: {"model": ErrorResponse} for status in _ERRORS},
    },
)
@with_cancellation
@load_aware_call
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """Read a text out."""
    return await raw_request.app.state.omni_serving_speech.create_speech(request, raw_request)


@router.get("/v1/audio/voices")
async def list_voices(raw_request: Request) -> dict[str, Any]:
    """The speakers of the checkpoint."""
    plugin = raw_request.app.state.engine_client.plugin
    return {"voices": list(plugin.voices), "default_voice": plugin.default_voice}
