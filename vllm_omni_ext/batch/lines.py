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
"""Routes that take a form: names of the form's files, by the field of the body that has their URL."""

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
"""The routes that a line may name. Routes of operators are not among them."""

PRIORITY_HEADER = "X-Vllm-Priority"
"""vLLM's header with a request's priority; the lowest is scheduled first, and 0 is the priority without it."""

STREAM_FIELDS = ("stream", "stream_format")
EVENTS = "text/event-stream"
LONGEST_ID = 512
"""Most characters of a `custom_id`."""

LINE = "line"
"""Field of the error of a line that was not sent: its number in the input, from 1."""

EXPIRED = "batch_expired"
"""Error code of OpenAI's for a line that was not answered in time."""

SERVERS_ENDED = "server_error"
"""Error code of a line that is not sent again, since API servers ended while they answered it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A line that can be sent. `number`: of the line in the input, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that cannot be sent, and the reason."""

    number: int
    custom_id: str | None
    message: str
    parameter: str | None = None


Line: TypeAlias = Job | BadLine


@dataclass(frozen=True, kw_only=True)
class Result:
    """A line of the output. `answered`: the server's answer has a status below 400."""

    answered: bool
    line: dict[str, Any]

    def encoded(self) -> bytes:
        """Return the line as it is written to the file, with its end."""
        return json.dumps(self.line, separators=(",", ":")).encode() + b"\n"


@dataclass(kw_only=True)
class Done:
    """The lines of an input that have a line of output.

    Attributes:
        ids: `custom_id` of the lines that were sent.
        lines: numbers of the lines that were not sent, because they are wrong.
        size: bytes of the output without an incomplete last line.
        count: number of lines of the output.
    """

    ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    size: int = 0
    count: int = 0

    def has(self, line: Line) -> bool:
        """Return whether a line of the input has a line of output."""
        return line.number in self.lines if isinstance(line, BadLine) else line.custom_id in self.ids


def read_lines(source: Iterable[bytes], *, endpoint: str | None = None) -> Iterator[Line]:
    """Yield the lines of an input; empty lines are skipped.

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
    """A line is wrong: message, and name of the field."""


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
    """Check the fields with the URLs of a form's files: the first one is required, and a file itself is refused."""
    for place, (name, part) in enumerate(FORMS.get(url, {}).items()):
        if part in body:
            raise _Wrong(f"{part}: a line has no files; write their URL or data URL in {name}", part)
        urls = body.get(name)
        urls = urls if isinstance(urls, list) and urls else [urls]
        if urls == [None] and place:
            continue
        if not all(isinstance(each, str) and each.lower().startswith(("http:", "https:", "data:")) for each in urls):
            raise _Wrong(f"{name}: must be an http, https or data URL", name)


def answer(custom_id: str, request_id: str, status: int, content_type: str, data: bytes) -> Result:
    """Return the output line of an answer.

    JSON is copied. Another body becomes an object with its `content_type`, and its `text`, or its bytes as base64 in
    `data`. An error is in `error`, as `vllm run-batch` writes it, and in `response.body`, as OpenAI does.
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
    answered = status < 400
    response = {"status_code": status, "request_id": request_id, "body": body}
    return Result(answered=answered, line=_line(custom_id, response, None if answered else body))


def _json(data: bytes) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def refused(line: BadLine) -> Result:
    """Return the output line of a line that cannot be sent."""
    error = {"code": "invalid_request", "message": line.message, "param": line.parameter, LINE: line.number}
    return Result(answered=False, line=_line(line.custom_id, None, error))


def expired(job: Job) -> Result:
    """Return the output line of a line whose answer did not come before the batch expired."""
    error = {"code": EXPIRED, "message": "the batch expired before the request was answered"}
    return Result(answered=False, line=_line(job.custom_id, None, error))


def given_up(job: Job, ended: int) -> Result:
    """Return the output line of a line that is not sent again: `ended` API servers ended while they answered it."""
    message = f"the request is not sent again: {ended} API servers ended while they answered it"
    error = {"code": SERVERS_ENDED, "message": message}
    return Result(answered=False, line=_line(job.custom_id, None, error))


def _line(custom_id: str | None, response: dict[str, Any] | None, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def read_done(path: Path) -> Done:
    """Return the lines that an output file has; a file that does not exist has none.

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
