"""Refuses unknown parameters of operator endpoints: a misspelt `targets` would otherwise address every replica."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from fastapi import Request

from vllm_omni_ext.serving.failures import BadRequest, printable

BODY = "body"


class KnownParameters:
    """A FastAPI dependency that checks parameters.

    Args:
        bodies: fields of a route's body, by path; a route without an entry takes no body.
    """

    def __init__(self, bodies: Mapping[str, Collection[str]] | None = None) -> None:
        self._bodies = bodies or {}

    async def __call__(self, request: Request) -> None:
        """Check one request.

        Raises:
            BadRequest: names the unknown parameter and the known ones.
        """
        route = request.scope["route"]
        allowed = [field.alias for field in route.dependant.query_params]
        _check("query parameters", request.query_params, allowed)
        fields = self._bodies.get(route.path, ())
        body = _parsed(await request.body())
        if isinstance(body, dict):
            _check("fields of the body", body, fields)
        elif body is not None and not fields:
            raise BadRequest(f"{BODY}: is not read here; {_names_text('query parameters', allowed)}", parameter=BODY)


def _check(kind: str, names: Collection[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            advice = f"did you mean '{close[0]}'? " if close else ""
            shown = printable(name)
            raise BadRequest(f"{shown}: is unknown; {advice}{_names_text(kind, allowed)}", parameter=shown)


def _names_text(kind: str, allowed: Collection[str]) -> str:
    return f"{kind}: {', '.join(sorted(set(allowed))) or 'none'}"


def _parsed(body: bytes) -> Any:
    """Return the parsed body; None if it is empty, and the text itself if it is not JSON."""
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body
