"""Requires the API key for all routes except the paths in `OPEN`. vLLM requires it only for a list of routes."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_omni_ext.serving.health import LIVE, READY, STARTED

OPEN = frozenset({"/health", "/ping", "/metrics", LIVE, READY, STARTED})
"""Paths that need no key: load balancers, Kubernetes and Prometheus read them."""

REFUSED = "this server needs its API key: send the header 'Authorization: Bearer KEY'"


class KeyGuard(AuthenticationMiddleware):
    """ASGI middleware that answers 401 to every request without a key, except for the paths in `open_paths`.

    vLLM's class compares the key in constant time. This class replaces only vLLM's choice of routes.
    """

    def __init__(self, app: ASGIApp, tokens: list[str], open_paths: frozenset[str] = OPEN) -> None:
        super().__init__(app, tokens)
        self._open = open_paths
        error = create_error_response(REFUSED, "AuthenticationError", HTTPStatus.UNAUTHORIZED)
        self._refusal = error.model_dump()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request, or one handshake of a WebSocket."""
        headers = Headers(scope=scope) if "headers" in scope else Headers()
        if scope["type"] == "lifespan" or _is_open(scope, headers, self._open) or self.verify_token(headers):
            return self.app(scope, receive, send)
        response = JSONResponse(self._refusal, HTTPStatus.UNAUTHORIZED.value, {"WWW-Authenticate": "Bearer"})
        return response(scope, receive, send)


def guard_all_routes(app: FastAPI, also_open: frozenset[str] = frozenset()) -> None:
    """Replace vLLM's middleware with `KeyGuard`; without an API key there is no middleware to replace.

    Args:
        also_open: further paths that need no key.
    """
    paths = OPEN | also_open
    app.user_middleware[:] = [
        Middleware(KeyGuard, *each.args, **{**each.kwargs, "open_paths": paths})  # type: ignore[arg-type]
        if each.cls is AuthenticationMiddleware  # type: ignore[comparison-overlap]
        else each
        for each in app.user_middleware
    ]


def has_keys(app: FastAPI) -> bool:
    """Return whether the server has API keys."""
    return any(each.cls is AuthenticationMiddleware for each in app.user_middleware)  # type: ignore[comparison-overlap]


def _is_open(scope: Scope, headers: Headers, paths: frozenset[str]) -> bool:
    """Return whether a request needs no key: its path in the router is in `paths`, or it is a CORS preflight.

    A browser sends a preflight without the key, and the CORS middleware behind this one answers it.
    """
    if scope["type"] != "http":
        return False
    if scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers:
        return True
    return route_path(scope).removesuffix("/") in paths


def route_path(scope: Scope) -> str:
    """Return the path of a request without the server's `--root-path`, as the router compares it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))
