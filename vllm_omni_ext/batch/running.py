"""Sends the lines of a batch to a server's routes, several at a time, and again while the server is not available."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx

from vllm_omni_ext.batch.lines import FORMS, BadLine, Job, Line, Result, answer, refused
from vllm_omni_ext.batch.store import MIB
from vllm_omni_ext.errors import OmniError

AGAIN = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
"""HTTP statuses of answers after which a line is sent again."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses before a line is sent again; each is twice as long as the one before, less up to half of it at random."""

CONNECT_S = 30.0
"""Time limit in seconds for opening a connection. The server limits the time of an answer (`request_timeout_s`)."""

Fetch = Callable[[str], Awaitable[bytes]]


class ServerGone(OmniError):
    """The server did not answer, or was not available, in all attempts to send a line; or it is at another address."""


class NotFetched(OmniError):
    """The file behind a URL of a line could not be fetched."""


class _Refused(Exception):
    """A line is not sent. Its `args` are (HTTP status of the line's answer, message, name of the wrong field)."""


class Sender:
    """Sends lines to a server.

    Args:
        client: its base URL is the server's, without `/v1`.
        fetch: returns the bytes behind an http or https URL; raises NotFetched.
        headers: sent with every request.
        attempts: how often a line is sent before `ServerGone` is raised; None: until it is answered.
        most: limit of the bytes of a line's files together; None: no limit.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        fetch: Fetch,
        *,
        headers: dict[str, str],
        attempts: int | None = None,
        most: int | None = None,
    ) -> None:
        self._client = client
        self._fetch = fetch
        self._headers = headers
        self._attempts = attempts
        self._most = most

    async def __call__(self, job: Job) -> Result:
        """Send one line until the server has answered it, and return its line of the output.

        Raises:
            ServerGone: the server was not available in any of the attempts, or has answered with a redirect.
        """
        request_id = f"batch-{uuid.uuid4().hex}"
        try:
            content = await self._content(job)
        except _Refused as err:
            status, message, parameter = err.args
            kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else HTTPStatus(status).phrase
            error = {"error": {"message": message, "type": kind, "param": parameter, "code": status}}
            return answer(job.custom_id, request_id, status, "application/json", json.dumps(error).encode())
        headers = {**self._headers, "X-Request-Id": request_id, **content.pop("headers", {})}
        found = await self._answer(job.url, headers, content)
        kind = found.headers.get("content-type", "")
        return answer(job.custom_id, request_id, found.status_code, kind, found.content)

    async def _answer(self, url: str, headers: dict[str, str], content: dict[str, Any]) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            try:
                found = await self._client.post(url, headers=headers, **content)
                if found.next_request is not None:
                    raise ServerGone(_moved(url, found.status_code, str(found.next_request.url)))
                if found.status_code not in AGAIN:
                    return found
                problem = f"status {found.status_code}: {found.text[:200]}"
            except httpx.RequestError as err:
                problem = str(err) or type(err).__name__
            if attempt == self._attempts:
                raise ServerGone(f"{url}: not answered in {attempt} attempts; the last one: {problem}")
            longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt - 1, 10))
            await asyncio.sleep(longest * random.uniform(0.5, 1))

    async def _content(self, job: Job) -> dict[str, Any]:
        """Return httpx's arguments for a line's body: JSON, or a form with fetched files for the routes in `FORMS`.

        Raises:
            _Refused: a file could not be fetched, the files have too many bytes, or the body cannot be encoded.
        """
        fields = dict(job.body)
        try:
            if job.url not in FORMS:
                return {"content": json.dumps(fields).encode(), "headers": {"Content-Type": "application/json"}}
            urls = {name: fields.pop(name, None) for name in FORMS[job.url]}
            return {"data": form_fields(fields), "files": await self._files(urls, FORMS[job.url])}
        except RecursionError:
            message = "body: has too many objects and arrays inside of one another"
            raise _Refused(HTTPStatus.BAD_REQUEST, message, "body") from None

    async def _files(self, urls: dict[str, Any], parts: dict[str, str]) -> list[tuple[str, tuple[str, bytes]]]:
        """Return the files of a form, as httpx's argument.

        Args:
            urls: the URL, the URLs, or None, by field of the line.
            parts: name in the form, by field of the line.
        """
        files, size = [], 0
        for name, given in urls.items():
            listed, part = isinstance(given, list), parts[name]
            for url in given if listed else [given] if given is not None else []:
                try:
                    data = read_data_url(url) if url[:5].lower() == "data:" else await self._fetch(url)
                except NotFetched as err:
                    raise _Refused(HTTPStatus.BAD_REQUEST, f"{name}: {err}", name) from None
                size += len(data)
                if self._most is not None and size > self._most:
                    limit = f"{self._most // MIB} MiB (limits.max_body_mib)"
                    message = f"{name}: the files of a line may have {limit} together"
                    raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, name)
                files.append((f"{part}[]" if listed else part, (part, data)))
        return files


def _moved(url: str, status: int, location: str) -> str:
    """Return the error text for a redirect. It is not followed: it may lead to another server, which would get the key.

    Args:
        url: the route of the line.
    """
    server, found, rest = location.partition(url)
    advice = f"write --url {server}" if found and not rest else "write the address of the server itself as --url"
    return f"{url}: the server redirects to {location} (status {status}); {advice}"


def read_data_url(url: str) -> bytes:
    """Return the bytes of a data URL. Raises NotFetched: the URL is malformed."""
    header, comma, data = url.partition(",")
    try:
        if comma:
            in_base64 = header.lower().endswith(";base64")
            return base64.b64decode(data, validate=True) if in_base64 else unquote_to_bytes(data)
    except ValueError:
        pass
    raise NotFetched("a data URL must be data:TYPE;base64,DATA")


def form_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a form: a list as several fields NAME[], an object as JSON, null as no field.

    Raises:
        _Refused: the name or the value of a field has half of a surrogate pair.
    """
    fields: dict[str, Any] = {}
    for name, value in body.items():
        texts = [_text(each) for each in (value if isinstance(value, list) else [value])]
        try:
            "".join([name, *texts]).encode()
        except UnicodeEncodeError:
            shown = name.encode("utf-8", "backslashreplace").decode()
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{shown}: has half of a surrogate pair", shown) from None
        if isinstance(value, list):
            fields[name if name.endswith("[]") else f"{name}[]"] = texts
        elif value is not None:
            fields[name] = texts[0]
    return fields


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


async def run(
    lines: Iterator[Line],
    send: Callable[[Job], Awaitable[Result]],
    write: Callable[[Result], None],
    places: asyncio.Semaphore,
) -> None:
    """Send the lines of an input, several at a time, and write each result on arrival.

    Args:
        lines: `next` is called in a thread, as reading a long line takes time.
        send: sends a line, and returns its line of the output.
        write: appends a line to the output.
        places: acquired before a line is sent, and released after its result was written. Several calls that share the
            semaphore take turns.

    Raises:
        ServerGone: a line could not be sent, or was redirected; the other lines that are being sent are cancelled.
        OSError: a result could not be written.
    """

    async def one(job: Job) -> None:
        write(await send(job))

    try:
        async with asyncio.TaskGroup() as running:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if isinstance(line, BadLine):
                    write(refused(line))
                    continue
                await places.acquire()
                # Not in `one`, which never begins if it is cancelled at once.
                running.create_task(one(line)).add_done_callback(lambda _: places.release())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
