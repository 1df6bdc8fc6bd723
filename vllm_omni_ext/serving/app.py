"""Builds vLLM's OpenAI server, adds the handlers and routes of this package and of the model's plugin, and runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.logger import init_logger

from vllm_omni_ext.config.schema import ALL_ROUTES
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.memory import malloc_trim
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.registry import family_chat_template, family_of
from vllm_omni_ext.plugins.spec import ModelFamily, resolve
from vllm_omni_ext.serving import adapters, batches, health, operator_calls, sound_files, text_responses
from vllm_omni_ext.serving.chat import METRICS, OmniServingChat
from vllm_omni_ext.serving.keys import guard_all_routes, has_keys
from vllm_omni_ext.serving.limits import media, texts, validation, video
from vllm_omni_ext.serving.limits.bodies import RefusedBody, RequestLimits, refused_handler
from vllm_omni_ext.serving.options import CHUNKS, LIST, MODALITIES, stage_param_names
from vllm_omni_ext.serving.playground import routes as playground
from vllm_omni_ext.serving.responses import omni_error_handler
from vllm_omni_ext.serving.served import ServedModel

logger = init_logger(__name__)

IMAGE_PIXELS = "VLLM_MAX_IMAGE_PIXELS"
"""Environment variable with vLLM's limit of an image's pixels; vLLM reads it before it decodes an image."""

MAX_IMAGE_PIXELS = 64_000_000
"""Value of VLLM_MAX_IMAGE_PIXELS if the user sets none."""

GRACE_S = 1
"""Seconds until open connections are closed at shutdown; the running requests have ended before."""

SERVER_ARGS = (
    "host",
    "port",
    "enable_ssl_refresh",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "h11_max_incomplete_event_size",
    "h11_max_header_count",
)
"""Arguments of `vllm serve` that are passed to the HTTP server under the same name."""

NO_HANDSHAKE = "ASGI callable returned without completing handshake."
"""Error that uvicorn logs for each handshake of a WebSocket that is answered with an HTTP error, as if it had none."""

CHAT = "ChatCompletionRequest"
COMPONENTS = "#/components/schemas/{model}"


async def run_app(
    omni: AsyncOmni, listen_address: str, sock: socket.socket, args: Namespace, ready: Callable[[], None]
) -> None:
    """Serve until the process gets a signal to stop; returns when the server has shut down and `sock` is closed.

    Args:
        listen_address: address in the log message.
        sock: bound socket, not listening yet.
        args: parsed arguments of `vllm serve`.
        ready: called when clients can connect.
    """
    try:
        if omni.connections.ready_responses is None:
            await omni.reset_mm_cache()  # has dummy data from the start of the replicas
        else:  # replicas that were running before have no dummy data, and other API servers use their caches
            await omni.renderer.clear_mm_cache_async()
        app = await make_app(omni, args)
        malloc_trim()
        with video.install(), sound_files.install(), media.install(omni.plan.config.allow_private_media):
            logger.info("Starting the server on %s", listen_address)
            sock.listen()  # from now on clients can connect; the server below answers them
            ready()
            if (worker := app.state.omni_batches) is not None:
                worker.start()
            shutdown: Awaitable[None] = await serve_http(app, sock, peer_loads=_loads(omni), **_server_options(args))
            await shutdown
    finally:
        sock.close()


async def make_app(omni: AsyncOmni, args: Namespace) -> FastAPI:
    """Return vLLM's application with the handlers and routes of this package, and the routes of the model's plugin."""
    os.environ.setdefault(IMAGE_PIXELS, str(MAX_IMAGE_PIXELS))
    logging.getLogger("uvicorn.error").addFilter(_is_no_refused_handshake)
    args = with_chat_template(args, family_of(omni.plan.family))
    tasks = await omni.get_supported_tasks()
    with without_a_stack():
        app = build_app(args, tasks, omni.model_config)
    await init_app_state(omni, app.state, args, tasks)
    model, models, stock_chat = ServedModel(omni), app.state.openai_serving_models, app.state.openai_serving_chat
    app.state.openai_serving_chat = OmniServingChat.of(stock_chat, model)
    app.state.omni_adapters = adapters.Adapters(omni, models)
    _add_facts(models, model)
    text_responses.install(app, model)
    for api in model.surface.apis:
        resolve(api)(app, model, models=models, request_logger=stock_chat.request_logger)
    for router in model.surface.routers(model):
        app.include_router(router)
    add_chat_fields(app, model)
    health.add_routes(app)
    operator_calls.add_routes(app, adapters.router)
    also_open = frozenset[str]()
    if omni.plan.config.playground:
        playground.add_routes(app, needs_key=has_keys(app))
        also_open = playground.paths()
    app.state.omni_batches = batches.install(app, omni, args)
    if omni.plan.config.api_key_routes == ALL_ROUTES:
        guard_all_routes(app, also_open)
    app.add_exception_handler(StarletteHTTPException, http_exception_handler)  # type: ignore[arg-type]
    app.add_exception_handler(OmniError, omni_error_handler)  # type: ignore[arg-type]
    app.add_exception_handler(RefusedBody, refused_handler)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, disconnect_handler)
    texts.install(app, omni.renderer)
    validation.install(app, omni.observer)
    number = omni.connections.client_index if omni.connections.client_count > 1 else None
    app.user_middleware.insert(0, Middleware(RequestLimits, config=omni.plan.config, server=number))
    app.middleware_stack = app.build_middleware_stack()
    return app


@contextlib.contextmanager
def without_a_stack() -> Iterator[None]:
    """Let vLLM's application build no middleware inside the `with` block.

    `make_app` adds more middleware, and builds all of it once: some register metrics when they are constructed.
    """
    stock = FastAPI.build_middleware_stack
    FastAPI.build_middleware_stack = lambda self: None  # type: ignore[method-assign, assignment, return-value]
    try:
        yield
    finally:
        FastAPI.build_middleware_stack = stock  # type: ignore[method-assign]


async def disconnect_handler(request: Request, error: Exception) -> Response:
    """Return a response for a client that has disconnected while it sent a body; it is not sent."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


def with_chat_template(args: Namespace, family: ModelFamily) -> Namespace:
    """Return the arguments with the model family's chat template, unless the user has set `--chat-template`."""
    template = args.chat_template or family_chat_template(family)
    return Namespace(**{**vars(args), "chat_template": template})


def _loads(omni: AsyncOmni) -> tuple[Any, int] | None:
    """Return vLLM's `peer_loads`: (number of open connections by API server, index of this API server).

    None if there is a single API server.
    """
    board = omni.connections.board
    return None if board is None or omni.connections.client_count == 1 else (board.loads, omni.connections.client_index)


def _server_options(args: Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in SERVER_ARGS} | {
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_graceful_shutdown": GRACE_S,  # begins after running requests have ended
        "ws_per_message_deflate": False,  # compression of sound costs more than it saves
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
    }
    log_config = get_uvicorn_log_config(args)
    return options if log_config is None else options | {"log_config": log_config}


def _is_no_refused_handshake(record: logging.LogRecord) -> bool:
    return record.msg != NO_HANDSHAKE


def _add_facts(models: Any, model: ServedModel) -> None:
    """Add entries to the objects of vLLM's `/v1/models`: modalities, names of request fields, entries of the plugin."""
    stock, capabilities = models.show_available_models, model.capabilities
    facts = {
        "modalities": list(capabilities.modalities),
        "request_fields": list(model.fields.names),
        **capabilities.card,
        **model.surface.card(),
    }

    async def show_available_models() -> ModelList:
        found: ModelList = await stock()
        for card in found.data:
            for name, fact in facts.items():
                setattr(card, name, fact)  # cards allow extra fields
        return found

    models.show_available_models = show_available_models


def add_chat_fields(app: FastAPI, model: ServedModel) -> None:
    """Add the fields that this package and the model read in chat requests to the schema at `/openapi.json`.

    The schema is generated by the first request for it.
    """
    stock = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = stock()["components"]["schemas"]
            declared = model.runtime.fields.model_json_schema(by_alias=False, ref_template=COMPONENTS)
            schemas[CHAT]["properties"] |= chat_fields(model) | declared.get("properties", {})
            schemas |= declared.get("$defs", {})
        return stock()

    app.openapi = openapi  # type: ignore[method-assign]


def chat_fields(model: ServedModel) -> dict[str, Any]:
    """Return the JSON schemas, by name, of this package's fields in chat requests, without those of the model."""
    names = list(model.capabilities.modalities)
    fields: dict[str, Any] = {
        MODALITIES: {"type": "array", "items": {"type": "string", "enum": names}},
        CHUNKS: {"type": "object"},
        METRICS: {"type": "boolean"},
        LIST: {"type": "array", "items": {"type": "object"}},
    }
    for stage in model.omni.plan.model_stages():
        parameters: dict[str, Any] = {name: {} for name in sorted(stage_param_names(stage))}
        if parameters:
            fields[stage.model_stage] = {"type": "object", "properties": parameters, "additionalProperties": False}
    for name in names:
        fields |= {field: {"description": f"of the modality {name}"} for field in model.modalities[name].body_fields}
    return fields
