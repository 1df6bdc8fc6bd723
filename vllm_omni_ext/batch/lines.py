"""Reads the lines of a batch's input, and makes the lines of its output, in the format of OpenAI and `vllm run-batch`.

An input line is `{"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}`.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from vllm_omni_ext.errors import ConfigError

FORMS = {
    "/v1/audio/transcriptions": {"file_url": "file"},
    "/v1/audio/translations": {"file_url": "file"},
    "/v1/images/edits": {"image_url": "image", "mask_url": "mask"},
}
"""Routes that take a form: name of a file in the form, by the field of a line's `body` that has the file's URL."""

MOST_FILES = 16
"""Most URLs in one field of a line, as in OpenAI's API."""

ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        *FORMS,
    }
)
"""The allowed values of a line's `url`. Operators' routes are not allowed."""

PRIORITY_HEADER = "X-Vllm-Priority"
"""vLLM's header with a request's priority; the lowest is scheduled first. Without the header, the priority is 0."""

STREAM_FIELDS = ("stream", "stream_format")
EVENTS = "text/event-stream"
LONGEST_ID = 512
"""Most characters of a `custom_id`."""

LINE = "line"
"""Key of `error` in the output of an invalid line, which was not sent: number of the line in the input, from 1."""

EXPIRED = "batch_expired"
"""OpenAI's error code for a line that was not answered before its batch expired."""

SERVERS_ENDED = "server_error"
"""Error code of a line that is not sent again, as `sends.MOST_ENDED` API servers have ended while they answered it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A valid line of the input, i.e. a request.

    Attributes:
        number: number of the line in the input, from 1.
        url: the route, one of `ROUTES`.
        body: fields of the request.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """An invalid line of the input, which is not sent.

    Attributes:
        number: number of the line in the input, from 1.
        message: the reason.
        parameter: name of the wrong field; None: the line is not a JSON object.
    """

    number: int
    custom_id: str | None
    message: str
    parameter: str | None = None


Line: TypeAlias = Job | BadLine


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of the output.

    Attributes:
        answered: the server's answer has a status of 200 to 299; False: an error, or the line was not sent.
        line: the JSON object.
    """

    answered: bool
    line: dict[str, Any]

    def encoded(self) -> bytes:
        """Return the line as JSON, followed by a newline."""
        return json.dumps(self.line, separators=(",", ":")).encode() + b"\n"


@dataclass(kw_only=True)
class Done:
    """The lines of an input for which an output file has a result; returned by `read_done`.

    Attributes:
        ids: `custom_id` of the valid lines.
        lines: numbers of the invalid lines, which were not sent.
        size: bytes of the output without an incomplete last line.
        count: number of lines of the output.
    """

    ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    size: int = 0
    count: int = 0

    def has(self, line: Line) -> bool:
        """Return whether the output file has a result for a line of the input."""
        return line.number in self.lines if isinstance(line, BadLine) else line.custom_id in self.ids


def read_lines(source: Iterable[bytes], *, endpoint: str | None = None) -> Iterator[Line]:
    """Yield a `Job` or `BadLine` for each line of an input; empty lines are skipped.

    Args:
        endpoint: the only route that lines may name; None: all of `ROUTES`.
    """
    seen: set[str] = set()
    for number, data in enumerate(source, 1):
        if data.strip():
            line = _read(number, data, seen, endpoint)
            if isinstance(line, Job):
                seen.add(line.custom_id)
            yield line


class _Wrong(Exception):
    """A line is invalid. Its `args` are (message, name of the wrong field or None)."""


def _read(number: int, data: bytes, seen: set[str], endpoint: str | None) -> Line:
    custom_id: str | None = None
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
        if not isinstance(found, dict):
            raise _Wrong("the line must be a JSON object", None)
        given = found.get("custom_id")
        if not isinstance(given, str) or not 0 < len(given) <= LONGEST_ID:
            raise _Wrong(f"custom_id: must be a text of 1 to {LONGEST_ID} characters", "custom_id")
        custom_id = given
        _check(found, endpoint)
        if custom_id in seen:
            raise _Wrong("custom_id: an earlier line of the batch has the same one", "custom_id")
        return Job(number=number, custom_id=custom_id, url=found["url"], body=found["body"])
    except _Wrong as err:
        message, parameter = err.args
        return BadLine(number=number, custom_id=custom_id, message=message, parameter=parameter)
    except (ValueError, RecursionError) as err:
        return BadLine(number=number, custom_id=None, message=f"the line is not JSON in UTF-8: {err}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(line: dict[str, Any], endpoint: str | None) -> None:
    url, body = line.get("url"), line.get("body")
    if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
        name = min(unknown)
        raise _Wrong(f"{name:.100}: is unknown; a line has custom_id, method, url and body", name[:100])
    if line.get("method") != "POST":
        raise _Wrong("method: must be POST", "method")
    if not isinstance(url, str) or url not in ROUTES:
        raise _Wrong(f"url: must be one of {', '.join(sorted(ROUTES))}", "url")
    if endpoint is not None and url != endpoint:
        raise _Wrong(f"url: must be the endpoint of the batch, {endpoint}", "url")
    if not isinstance(body, dict):
        raise _Wrong("body: must be an object", "body")
    if endpoint is not None and "priority" in body:
        raise _Wrong("priority: all lines of a batch have the same; remove it", "priority")
    if body.get("stream") or body.get("stream_format") == "sse":
        name = next(name for name in STREAM_FIELDS if body.get(name))
        raise _Wrong(f"{name}: an answer of a batch is not streamed; remove it", name)
    _check_files(url, body)


def _check_files(url: str, body: dict[str, Any]) -> None:
    """Check the fields of a line's body that have the URLs of files (see `FORMS`).

    The first of these fields is required. A field with the name of the file itself is refused.

    Raises:
        _Wrong: a field is missing, not a URL, has too many URLs, or is refused.
    """
    for place, (name, part) in enumerate(FORMS.get(url, {}).items()):
        if part in body:
            raise _Wrong(f"{part}: a line has no files; write their URL or data URL in {name}", part)
        urls = body.get(name)
        urls = urls if isinstance(urls, list) and urls else [urls]
        if urls == [None] and place:
            continue
        if not all(isinstance(each, str) and each.lower().startswith(("http:", "https:", "data:")) for each in urls):
            raise _Wrong(f"{name}: must be an http, https or data URL", name)
        if len(urls) > MOST_FILES:
            raise _Wrong(f"{name}: may have {MOST_FILES} URLs", name)


def answer(custom_id: str, request_id: str, status: int, content_type: str, data: bytes) -> Result:
    """Return the line of the output for a server's answer.

    A JSON body is copied. Any other body is written as an object with `content_type`, and with `text` or `data` (the
    bytes as base64). An error is written to `error`, as by `vllm run-batch`, and to `response.body`, as by OpenAI.

    Args:
        status: HTTP status of the answer.
        data: body of the answer.
    """
    kind = content_type.partition(";")[0].strip().lower()
    body: Any
    if kind == EVENTS:
        message = "the answer is streamed, which an answer of a batch must not be"
        body, status = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}, 400
    elif kind == "application/json" and (read := _json(data)) is not None:
        body = read
    elif kind.startswith(("text/", "application/json")):
        body = {"content_type": content_type, "text": data.decode("utf-8", "replace")}
    else:
        body = {"content_type": content_type, "data": base64.b64encode(data).decode("ascii")}
    answered = 200 <= status < 300
    response = {"status_code": status, "request_id": request_id, "body": body}
    return Result(answered=answered, line=_line(custom_id, response, None if answered else body))


def _json(data: bytes) -> Any:
    """Return the value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def refused(line: BadLine) -> Result:
    """Return the line of the output for an invalid line of the input."""
    error = {"code": "invalid_request", "message": line.message, "param": line.parameter, LINE: line.number}
    return Result(answered=False, line=_line(line.custom_id, None, error))


def expired(job: Job) -> Result:
    """Return the line of the output for a line that was not answered before its batch expired."""
    error = {"code": EXPIRED, "message": "the batch expired before the request was answered"}
    return Result(answered=False, line=_line(job.custom_id, None, error))


def given_up(job: Job, ended: int) -> Result:
    """Return the line of the output for a line that is not sent again.

    Args:
        ended: number of API servers that have ended while they answered the line.
    """
    message = f"the request is not sent again: {ended} API servers ended while they answered it"
    error = {"code": SERVERS_ENDED, "message": message}
    return Result(answered=False, line=_line(job.custom_id, None, error))


def _line(custom_id: str | None, response: dict[str, Any] | None, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def read_done(path: Path) -> Done:
    """Read an output file, and return the lines of the input for which it has a result.

    A missing file counts as empty. An incomplete last line, which a process left that was killed, is ignored.

    Raises:
        ConfigError: a complete line of the file is not one of a batch's output.
    """
    done = Done()
    if not path.exists():
        return done
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n"):
                break
            try:
                line = json.loads(data)
                custom_id, error = line["custom_id"], line["error"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f"{path}: line {number} is not the output of a batch; name another file") from None
            if isinstance(error, dict) and LINE in error:
                done.lines.add(error[LINE])
            else:
                done.ids.add(custom_id)
            done.size, done.count = done.size + len(data), number
    return done
