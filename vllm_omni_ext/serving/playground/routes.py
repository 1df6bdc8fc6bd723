"""The routes of the page `/playground`: its files, and facts about the server, which the page reads first."""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

PATH = "/playground"
PAGE = "page.html"
FACTS = f"{PATH}/facts.json"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""Media types of the page's files, by suffix."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of every file. `blob:` is for pictures that the page itself makes from an answer."""

USED = ("/v1/chat/completions", "/v1/realtime/client_secrets")
"""Routes that the page uses if the server has them."""


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Return (content, media type) of each file of the page, by URL path."""
    found = {}
    for file in resources.files(__package__).iterdir():
        kind = TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            path = PATH if file.name == PAGE else f"{PATH}/{file.name}"
            found[path] = file.read_bytes(), f"{kind}; charset=utf-8"
    return found


def paths() -> frozenset[str]:
    """Return the paths that need no API key: a browser sends none for a page and its files."""
    return frozenset({*files(), FACTS})


def add_routes(app: FastAPI, *, needs_key: bool) -> None:
    """Add the routes of the page. The routes in `USED` must be added before, as the facts list those that exist.

    Args:
        needs_key: the server requires an API key.
    """
    router = APIRouter()
    served = {getattr(route, "path", None) for route in app.routes}
    found = {"needs_key": needs_key, "routes": [path for path in USED if path in served]}

    async def file(request: Request) -> Response:
        content, kind = files()[request.scope["route"].path]
        return Response(content, media_type=kind, headers=HEADERS)

    async def facts() -> JSONResponse:
        return JSONResponse(found, headers=HEADERS)

    for path in files():
        router.add_api_route(path, file, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route(FACTS, facts, include_in_schema=False)
    app.include_router(router)
