"""Requests and reports of calls to several replicas over HTTP."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import wraps
from http import HTTPStatus
from typing import Annotated, Any, TypeAlias

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from vllm_omni_ext.errors import RequestError, StageUnavailable, UnknownMember
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.runtime.client.calls import Replies, Reply, failed
from vllm_omni_ext.serving.failures import printable

TARGETS = "targets"
"""Query parameter, or key of a JSON body, with stage names and replica ids."""

Targets: TypeAlias = Annotated[list[str] | None, Query()]
Handler: TypeAlias = Callable[..., Awaitable[Response]]


def omni_of(request: Request) -> AsyncOmni:
    """The deployment behind the server."""
    omni: AsyncOmni = request.app.state.engine_client
    return omni


def named_in(query: list[str] | None, body: Any) -> list[str] | None:
    """Return the targets of a query or a body; None if neither has any.

    Raises:
        RequestError: the body's targets are not a list of texts, or both have targets.
    """
    if body is None:
        return query
    if query is not None:
        raise RequestError("targets: give them in the query or in the body", parameter=TARGETS)
    if isinstance(body, str):
        return [body]
    if not isinstance(body, list) or not all(isinstance(each, str) for each in body):
        raise RequestError("targets: must be a list of stage names and replica ids", parameter=TARGETS)
    return body


def refusing(handler: Handler) -> Handler:
    """Answer a refused call with an error that names the parameter; no replica was called then."""

    @wraps(handler)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        try:
            return await handler(*args, **kwargs)
        except UnknownMember as error:
            return _refusal(error, "NotFoundError", HTTPStatus.NOT_FOUND, TARGETS)
        except RequestError as error:
            return _refusal(error, "BadRequestError", HTTPStatus.BAD_REQUEST, error.parameter)
        except StageUnavailable as error:
            return _refusal(error, "ServiceUnavailableError", HTTPStatus.SERVICE_UNAVAILABLE, TARGETS)

    return answer


def _refusal(error: Exception, kind: str, status: HTTPStatus, parameter: str) -> JSONResponse:
    body = {"message": printable(str(error)), "type": kind, "param": parameter, "code": status.value}
    return JSONResponse({"error": body}, status)


def report(replies: Replies) -> Response:
    """Return the answer of each replica; status 500 if any failed."""
    body = {"replicas": {str(replica): _shown(reply) for replica, reply in replies.items()}}
    status = HTTPStatus.INTERNAL_SERVER_ERROR if failed(replies) else HTTPStatus.OK
    return Response(json.dumps(body, default=_plain), status, media_type="application/json")


def _shown(reply: Reply) -> dict[str, Any]:
    return {"value": reply.value} if reply.error is None else {"error": str(reply.error) or type(reply.error).__name__}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: sets become lists, other unknown types text, as in vLLM's `/collective_rpc`."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
