"""The routes of the Realtime API: the WebSocket `/v1/realtime`, and `/v1/realtime/client_secrets`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.logger import init_logger

from vllm_omni_ext.errors import OmniError, RequestError, StageUnavailable
from vllm_omni_ext.metrics import REALTIME_SESSIONS
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.serving.chat import METRICS
from vllm_omni_ext.serving.keys import route_path
from vllm_omni_ext.serving.options import check
from vllm_omni_ext.serving.realtime import settings
from vllm_omni_ext.serving.realtime.client_secrets import PREFIX, ClientSecrets, WrongSecret
from vllm_omni_ext.serving.realtime.connection import Connection, new_id
from vllm_omni_ext.serving.realtime.detecting import SpeechFrames, available, missing
from vllm_omni_ext.serving.realtime.events import (
    UNKNOWN,
    WRONG_VALUE,
    ClientError,
    SessionFields,
    Strict,
    check_values,
    read,
    unsupported,
)
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.settings import Offer
from vllm_omni_ext.serving.responses import ERROR_RESPONSES
from vllm_omni_ext.serving.served import ServedModel

logger = init_logger(__name__)

PATH = "/v1/realtime"
PROTOCOL = "realtime"
"""WebSocket subprotocol of browsers. As they cannot send headers, a second one (`KEY_PROTOCOL`) has their key."""

KEY_PROTOCOL = "openai-insecure-api-key."
SECRET_S = 600
SHORTEST_SECRET_S, LONGEST_SECRET_S = 10, 7200
CONFIG = "vllm_omni_ext.realtime.config"
"""Key of an ASGI scope under which `RealtimeKeys` stores the session fields of a client secret."""

router = APIRouter()


@router.websocket(PATH)
async def realtime(websocket: WebSocket) -> None:
    """Serve a session of the Realtime API."""
    serving: OmniServingRealtime = websocket.app.state.omni_serving_realtime
    await serving.serve(websocket)


class ExpiresAfter(Strict):
    """`expires_after` of a client secret."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(SECRET_S, ge=SHORTEST_SECRET_S, le=LONGEST_SECRET_S)


class SecretRequest(Strict):
    """Body of `/v1/realtime/client_secrets`."""

    expires_after: ExpiresAfter = Field(default_factory=lambda: ExpiresAfter.model_validate({}))
    session: dict[str, Any] = Field(default_factory=lambda: {"type": "realtime"})


@router.post(f"{PATH}/client_secrets", responses=ERROR_RESPONSES)
async def create_client_secret(request: SecretRequest, raw_request: Request) -> JSONResponse:
    """Return a key with which a browser opens sessions until it expires."""
    serving: OmniServingRealtime = raw_request.app.state.omni_serving_realtime
    try:
        return JSONResponse(serving.make_secret(request))
    except ClientError as error:
        raise RequestError(str(error), parameter=error.param or "") from error


class OmniServingRealtime:
    """Opens and ends the Realtime sessions of one API server.

    Args:
        models: vLLM's `OpenAIServingModels`.
        keys: the API keys; empty: every client is admitted.
    """

    def __init__(self, app: FastAPI, model: ServedModel, models: Any, keys: Sequence[str]) -> None:
        self.omni = model.omni
        self.limits = Limits.of(model.omni.plan.config.limits)
        self.secrets = ClientSecrets(keys)
        self._app = app
        self._model = model
        self._models = models
        self.detectors = available()
        connections = model.omni.connections
        if connections.client_index == 0 and connections.ready_responses is None:  # logged once in a deployment
            for reason in missing().values():
                logger.warning("/v1/realtime: turn detection is not available: %s", reason)
        self.speech: Callable[[], SpeechFrames] = SpeechFrames
        """Creates the object that computes the turn detection of one session."""
        self._metrics = model.omni.observer.metrics
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        model.omni.when_stopping(self.drain, self._empty.wait)

    def offer(self, name: str | None = None) -> Offer:
        """Return the properties of the served model for a new session.

        Args:
            name: a served name of the model, or the name of a LoRA adapter; None: the first served name.

        Raises:
            ClientError: neither the model nor an adapter has this name.
        """
        names = [each.name for each in self._models.base_model_paths]
        if name is not None and name not in names and name not in self._models.lora_requests:
            raise ClientError(f"model: '{name:.100}' is not served", code="model_not_found", param="model")
        capabilities = self._model.capabilities
        return Offer(
            model=name or names[0],
            names=frozenset(names),
            modalities=tuple(each for each in (TEXT, AUDIO) if each in capabilities.modalities),
            voice=capabilities.card.get("default_voice"),
            check_voice=self._check_voice,
            detectors=self.detectors,
            tracing="auto" if self.omni.vllm_config.observability_config.otlp_traces_endpoint else None,
            block_ms=self._block_ms(),
        )

    def _block_ms(self) -> float | None:
        """Return the length in ms of the blocks in which sound is computed before a turn ends.

        None if `streaming_input` or the prefix cache is off, or the model does not support it.
        """
        kept = self.omni.plan.config.streaming_input and self.omni.vllm_config.cache_config.enable_prefix_caching
        return self._model.capabilities.sound_block_ms if kept else None

    def _check_voice(self, name: str) -> None:
        found = self._model.read({"audio": {"voice": name}}, stream=True, seed=None, modalities=(AUDIO,))
        check(self._model.runtime, found.options, found.paths)

    def make_secret(self, request: SecretRequest) -> dict[str, Any]:
        """Return the answer to a request for a client secret.

        Returns:
            {"value": the secret, "expires_at": Unix time, "session": settings of a session with this secret}

        Raises:
            ClientError: the requested settings are invalid or not supported.
        """
        check_values(request.session, "session")
        fields = read(SessionFields, request.session, "session")
        offer = self.offer(fields.model)
        expires_at = int(time.time()) + request.expires_after.seconds
        session = settings.updated(settings.defaults(offer, new_id("sess"), expires_at), fields, offer)
        try:
            value = self.secrets.make(request.session, expires_at)
        except ValueError as error:
            raise ClientError(f"session: {error}", code="invalid_value", param="session") from error
        return {"value": value, "expires_at": expires_at, "session": session}

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one WebSocket, from its handshake to its end."""
        try:
            connection = self._connection(websocket)
        except (ClientError, WrongSecret) as error:
            if isinstance(error, ClientError):
                self.omni.observer.refused(_counted_as(error))
            await _deny(websocket, error)
            return
        self._connections.add(connection)
        self._empty.clear()
        sessions = self._metrics.of(REALTIME_SESSIONS)
        sessions.inc()
        try:
            await websocket.accept(PROTOCOL if PROTOCOL in _protocols(websocket.scope) else None)
            await connection.run()
        except WebSocketDisconnect:
            logger.debug("A client has disconnected before its last events were sent")
        finally:
            sessions.dec()
            self._connections.remove(connection)
            if not self._connections:
                self._empty.set()

    def _connection(self, websocket: WebSocket) -> Connection:
        if self.omni.draining:
            raise ClientError("the server is shutting down", code="server_shutting_down")
        if len(self._connections) >= self.limits.sessions:
            raise ClientError(f"this server has {self.limits.sessions} sessions", code="too_many_sessions")
        _check_query(websocket)
        config = self._config(websocket.scope)
        model = websocket.query_params.get("model") or (None if config is None else config.model)
        return Connection(
            websocket,
            self.offer(model),
            self.limits,
            self._app.state.openai_serving_chat,
            self._metrics,
            config=config,
            stage_metrics=_wants_metrics(websocket),
            speech=self.speech(),
        )

    def _config(self, scope: Scope) -> SessionFields | None:
        """Return the session fields of the client's secret; None if the client has no secret."""
        found = scope.get(CONFIG)
        return None if found is None else read(SessionFields, found, "session")

    def drain(self) -> None:
        """End all sessions, each after its running responses; called when the server begins to shut down."""
        for connection in tuple(self._connections):
            connection.drain()


QUERY = ("model", METRICS)
"""Query parameters of a handshake."""

REFUSED_QUERY: Mapping[str, str] = {
    "call_id": "there are no calls of WebRTC and SIP; open a session with `model`",
    "intent": "there are no transcription sessions; use `audio.input.transcription` of a session",
}
"""Query parameters of the protocol that are refused, and the reasons."""


def _check_query(websocket: WebSocket) -> None:
    """Check the names of the query parameters.

    Raises:
        ClientError: a parameter is unknown, or this server does not support it.
    """
    for name in websocket.query_params:
        if name in REFUSED_QUERY:
            raise unsupported(name, REFUSED_QUERY[name])
        if name not in QUERY:
            raise ClientError(f"{name:.100}: is unknown", code=UNKNOWN, param=f"{name:.100}")


def _wants_metrics(websocket: WebSocket) -> bool:
    """Return whether the query parameter `return_stage_metrics` is "true"; without the parameter False.

    Raises:
        ClientError: the value is neither "true" nor "false".
    """
    value = websocket.query_params.get(METRICS, "false")
    if value not in ("true", "false"):
        raise ClientError(f"{METRICS}: must be true or false, got '{value:.100}'", code=WRONG_VALUE, param=METRICS)
    return value == "true"


_STATUS = {
    "model_not_found": HTTPStatus.NOT_FOUND,
    "server_shutting_down": HTTPStatus.SERVICE_UNAVAILABLE,
    "too_many_sessions": HTTPStatus.SERVICE_UNAVAILABLE,
}


def _status(error: ClientError) -> HTTPStatus:
    return _STATUS.get(error.code, HTTPStatus.BAD_REQUEST)


def _counted_as(error: ClientError) -> OmniError:
    """Return the error as which the metrics count a refused handshake."""
    if _status(error) == HTTPStatus.SERVICE_UNAVAILABLE:
        return StageUnavailable(str(error))
    return RequestError(str(error), parameter=error.param or "")


async def _deny(websocket: WebSocket, error: Exception) -> None:
    """Refuse a WebSocket handshake with an HTTP error response."""
    status, param = HTTPStatus.UNAUTHORIZED, None
    if isinstance(error, ClientError):
        status, param = _status(error), error.param
    body = create_error_response(str(error), status.phrase, status, param)
    await websocket.send_denial_response(JSONResponse(body.model_dump(), status))


class RealtimeKeys:
    """ASGI middleware in front of vLLM's check of API keys, for WebSocket handshakes of `PATH`.

    It sets the header `Authorization`, which vLLM checks. A key in a subprotocol is copied to the header. A valid
    client secret is replaced by the API key, and its session fields are stored in the scope under `CONFIG`. An invalid
    secret is answered with status 401. Other keys are passed on to vLLM's check.

    Args:
        keys: the API keys; empty: every client is admitted that does not send an invalid secret.
    """

    def __init__(self, app: ASGIApp, *, secrets: ClientSecrets, keys: Sequence[str]) -> None:
        self._app = app
        self._secrets = secrets
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request or handshake."""
        if scope["type"] == "websocket" and route_path(scope) == PATH:
            scope = await self._with_key(scope, receive, send) or {}
            if not scope:
                return
        await self._app(scope, receive, send)

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> Scope | None:
        """Return the scope with an API key in its header `Authorization`, which vLLM's middleware checks.

        A client secret is replaced by the server's first key, and the session settings that it contains are added to
        the scope. If the secret is invalid, the handshake is refused, and the result is None.
        """
        given = _given_key(scope)
        if given is None:
            return scope
        if given.startswith(PREFIX):
            try:
                scope = {**scope, CONFIG: self._secrets.read(given, time.time())}
            except WrongSecret as error:
                await _deny(WebSocket(scope, receive, send), error)
                return None
            given = self._keys[0] if self._keys else given
        others = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        return {**scope, "headers": [*others, (b"authorization", f"Bearer {given}".encode("latin-1", "replace"))]}


def _given_key(scope: Scope) -> str | None:
    """Return the key of a handshake from its header `Authorization`, else from its subprotocol; None without a key."""
    kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key
    protocols = _protocols(scope)
    return next((each.removeprefix(KEY_PROTOCOL) for each in protocols if each.startswith(KEY_PROTOCOL)), None)


def _protocols(scope: Scope) -> list[str]:
    found: list[str] = scope.get("subprotocols") or []
    return found


def install(app: FastAPI, model: ServedModel, *, models: Any, **_: Any) -> None:
    """Replace vLLM's route for `PATH` by the routes of this module, and add `RealtimeKeys`.

    Args:
        models: vLLM's `OpenAIServingModels`.
    """
    keys = _api_keys(app)
    serving = app.state.omni_serving_realtime = OmniServingRealtime(app, model, models, keys)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != PATH]
    app.include_router(router)
    app.user_middleware.insert(0, Middleware(RealtimeKeys, secrets=serving.secrets, keys=keys))  # type: ignore[arg-type]


def _api_keys(app: FastAPI) -> list[str]:
    """Return the API keys that vLLM's middleware checks; empty without such a middleware."""
    for each in app.user_middleware:
        if each.cls is AuthenticationMiddleware:  # type: ignore[comparison-overlap]
            tokens: Any = each.kwargs["tokens"]
            return list(tokens)
    return []
