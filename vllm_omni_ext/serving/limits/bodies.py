"""Limits the bytes and the number of JSON values of request bodies; counts while the bytes arrive.

The number of values is limited because parsing and validation take memory and time for each value, even for a value of
two bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from vllm_omni_ext.batch.lines import PRIORITY_HEADER
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.orchestrator.admission import PRIORITY
from vllm_omni_ext.serving.limits.media import PIXELS, pixel_budget
from vllm_omni_ext.serving.responses import printable
from vllm_omni_ext.wire import priorities

MIB = 1 << 20
WHOLE = "body"
"""Parameter name of errors about the whole body."""

MAX_DEPTH = 100
"""Largest nesting depth of objects and arrays."""

WEIGHTS = {"messages": 5, "tools": 3, "input": 9, "structured_outputs": 16, "response_format": 16}
"""Weight of each value in these fields; 1 in all others. vLLM validates, renders or compiles each of these values."""

TOKEN_IDS = frozenset({"prompt", "input", "tokens", "token_ids", "prompt_token_ids", "allowed_token_ids"})
"""Fields that may contain long lists of token ids."""

ID_WEIGHT = 0.2
"""Weight of a number in a field of `TOKEN_IDS`."""

UNLIMITED = TOKEN_IDS | frozenset(
    {WHOLE, "messages", "system", "instructions", "query", "queries", "documents", "items", "text", "text_1", "text_2"}
    | {"data", "data_1", "data_2", "prompt_embeds", "features"}
    | {"image", "images", "mask", "audio", "ref_audio", "video", "file"}
    | {"args", "kwargs", "init_info", "update_info"}
)
"""Fields without a byte limit of their own (only the body's): prompts, media, and operators' messages to workers."""

FIELD_BYTES = {
    "tools": 8 * MIB,
    "response_format": MIB // 4,
    "structured_outputs": MIB // 16,
    "model": 4096,
    "request_id": 4096,
}
"""Byte limits of single fields. Fields that are neither here nor in `UNLIMITED` may have `MIB` bytes."""

LONGEST_KEY = 1 << 16
"""Byte limit of a key of the outermost object. It is limited because error messages may contain the key."""

LONGEST_WIDE_TEXT = 8 * MIB
"""Byte limit of a text with characters beyond ASCII: Python stores such a text in up to 4 times as many bytes."""

BLOCK = 1 << 16
"""Bytes per scanned block."""

DRAIN_S = 1.0
"""Seconds for which the server reads on after it has refused a body, so that the client can read the response."""

FORMS = ("multipart/", "application/x-www-form-urlencoded")
"""Content types of forms. A body with such a type that begins like JSON is scanned: a route may parse it as JSON."""

JSON_STARTS = b'{["\xef\xfe\xff\0'
"""First bytes, after white space, of an object, an array or a text: also of a byte order mark, UTF-16 or UTF-32."""

RETRY_AFTER_S = 1
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
SERVER_HEADER = "X-Api-Server"

LONGEST_ERROR = 16 << 10
"""Bytes of an error response above which its texts are truncated. Some errors of vLLM list every wrong token id."""

WRONG_PRIORITY = f"{PRIORITY_HEADER}: must be an integer from {-priorities.MOST} to {priorities.MOST}"

_COMMA, _OPEN_ARRAY, _OPEN_OBJECT = b",[{"
_OTHERS = bytes(set(range(256)).difference(b",[]{}"))


class RefusedBody(HTTPException):
    """Status 413, as an exception type that FastAPI's body parsing does not catch.

    Args:
        problem: the exceeded limit, e.g. "has more than 4096 bytes"; the message is the field's name and this text.
        parameter: name of the field.
    """

    def __init__(self, problem: str, *, parameter: str = WHOLE) -> None:
        self.parameter = printable(parameter)
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{self.parameter}: {problem}")


async def refused_handler(request: Request, error: RefusedBody) -> JSONResponse:
    """Return the response with status 413; its `param` is the name of the field."""
    return refusal(error)


def refusal(error: RefusedBody) -> JSONResponse:
    """Return the response to a body that was refused with this error."""
    status = HTTPStatus(error.status_code)
    info = ErrorInfo(message=error.detail, type=status.phrase, param=error.parameter, code=status.value)
    return JSONResponse(ErrorResponse(error=info).model_dump(), status)


class BodyScan:
    """Counts the opening brackets, strings and commas of a JSON body that arrives in pieces of any size.

    In a body that is not valid JSON, at least everything up to the first syntax error is counted.

    Args:
        most: limit of the sum of the counts, each multiplied by the weight of its field.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0.0
        self._depth = 0
        self._ended = False  # the outermost object or array has ended; a parser reads no further
        self._field = WHOLE
        self._bytes = 0  # of the current field
        self._weight = self._comma_weight = 1.0
        self._in_text = False
        self._escaped = False  # the last byte was a backslash that escapes the next byte
        self._at_key = False  # the next text is, or the current text is, a key of the outermost object
        self._key = b""
        self._text_bytes = 0
        self._wide = False  # the current text has characters beyond ASCII

    def begin_field(self, name: str) -> None:
        """Scan a JSON value next that a form has in its field `name`; all fields of the form share the limit."""
        self._enter(name)
        self._depth, self._ended = 1, False
        self._in_text = self._escaped = False

    def feed(self, data: bytes) -> None:
        """Scan the next piece of the body.

        Raises:
            RefusedBody: a limit is exceeded; the error names the field.
        """
        for start in range(0, len(data), BLOCK):
            if self._ended:
                break
            block = data[start : start + BLOCK]
            if b"\0" in block:  # NUL occurs in JSON encoded as UTF-16 or UTF-32, and never in UTF-8
                raise RefusedBody("must be JSON in UTF-8")
            for index, part in enumerate(self._without_escapes(block).split(b'"')):
                if index:
                    self._read_quote()
                if self._in_text:
                    self._read_text(part)
                else:
                    self._read_structure(part)
                self._bytes += len(part) + 1
                self._check()

    def _without_escapes(self, block: bytes) -> bytes:
        r"""Return the block with every `\\` and `\"` replaced by two underscores; its length does not change."""
        if self._escaped and block[:1] in (b'"', b"\\"):
            block = b"_" + block[1:]
        if b"\\" not in block:
            self._escaped = False
            return block
        block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = block.endswith(b"\\")
        return block

    def _enter(self, field: str) -> None:
        self._field, self._bytes, self._at_key = field, 0, False
        self._weight = WEIGHTS.get(self._field, 1)
        self._comma_weight = ID_WEIGHT if self._field in TOKEN_IDS else self._weight

    def _read_quote(self) -> None:
        self._in_text = not self._in_text
        if self._in_text:
            self._key, self._text_bytes, self._wide = b"", 0, False
        elif self._at_key:
            self._enter(_name(self._key))
        if not self._in_text:
            self._total += self._weight

    def _read_text(self, part: bytes) -> None:
        self._text_bytes += len(part)
        self._wide = self._wide or not part.isascii() or (b"\\" in part and b"\\u" in part)
        if self._at_key:
            self._key += part
            if len(self._key) > LONGEST_KEY:
                raise RefusedBody(f"has a key of more than {LONGEST_KEY} bytes")
        if self._wide and self._text_bytes > LONGEST_WIDE_TEXT:
            problem = f"has a text of more than {LONGEST_WIDE_TEXT} bytes with characters beyond ASCII"
            raise RefusedBody(problem, parameter=self._field)

    def _read_structure(self, part: bytes) -> None:
        for kind in part.translate(None, _OTHERS):
            if kind == _COMMA:
                self._total += self._comma_weight
                self._at_key = self._depth == 1
            elif kind in (_OPEN_ARRAY, _OPEN_OBJECT):
                self._total += self._weight
                self._depth += 1
                self._at_key = self._depth == 1 and kind == _OPEN_OBJECT
                if self._depth > MAX_DEPTH:
                    problem = f"has more than {MAX_DEPTH} objects and arrays inside of one another"
                    raise RefusedBody(problem, parameter=self._field)
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._ended = True
                    break

    def _check(self) -> None:
        if self._total > self._most:
            problem = f"with it the body has more than {self._most} values (limits.max_body_values)"
            raise RefusedBody(problem, parameter=self._field)
        if self._field not in UNLIMITED and self._bytes > (most := FIELD_BYTES.get(self._field, MIB)):
            raise RefusedBody(f"has more than {most} bytes", parameter=self._field)


def _name(key: bytes) -> str:
    """Return the field name of a raw JSON key (without quotes); `WHOLE` if the key is empty or not valid."""
    try:
        return str(json.loads(b'"' + key + b'"')) or WHOLE
    except ValueError:
        return WHOLE


def read_priority(headers: Headers) -> int:
    """Return the priority in a request's headers, 0 without one.

    Raises:
        ValueError: the header is not an integer, or its absolute value exceeds `wire.priorities.MOST`.
    """
    priority = int(headers.get(PRIORITY_HEADER, "0"))
    if abs(priority) > priorities.MOST:
        raise ValueError
    return priority


class RequestLimits:
    """ASGI middleware in front of every route: limits bodies, truncates error responses, and adds response headers.

    Args:
        server: index of this API server, sent as response header; None: there is a single API server, and no header.
    """

    def __init__(self, app: ASGIApp, *, config: OmniConfig, server: int | None = None) -> None:
        self._app = app
        self._config = config
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            PRIORITY.set(read_priority(headers))
        except ValueError:
            error = create_error_response(WRONG_PRIORITY, param=PRIORITY_HEADER)
            await JSONResponse(error.model_dump(), error.error.code)(scope, receive, send)
            return
        PIXELS.set(pixel_budget(self._config))
        body = _Body(headers, receive, self._config)
        answer = _Answer(send, self._server, body)
        try:
            await self._app(scope, body.receive, answer.send)
        except Exception:
            if body.refused is None or answer.started:
                raise
        if body.refused is not None and not answer.started:
            await answer.refuse(refusal(body.refused), scope, receive)


class _Body:
    """Receives one body, and refuses it as soon as it exceeds a limit. Of forms, only the bytes are counted.

    Attributes:
        refused: the error with which the body was refused. Middleware of the user may convert it to another one.
    """

    def __init__(self, headers: Headers, receive: Receive, config: OmniConfig) -> None:
        declared = headers.get("content-length", "")
        self._declared = int(declared) if declared.isdecimal() else 0
        self._received = 0
        self._most = config.limits.max_body_mib * MIB
        self._may_be_form = headers.get("content-type", "").lower().startswith(FORMS)
        self._scan: BodyScan | None = BodyScan(config.limits.max_body_values)
        self._receive = receive
        self._waits = headers.get("expect", "").lower() == "100-continue"
        self.refused: RefusedBody | None = None

    async def receive(self) -> Message:
        if self.refused is not None:
            return await self._receive()
        message = {} if self._declared > self._most else await self._receive()
        body = message.get("body", b"")
        self._received += len(body)
        if max(self._declared, self._received) > self._most:
            await self._drain(message)
            self.refused = RefusedBody(f"may have {self._most // MIB} MiB (limits.max_body_mib)")
            raise self.refused
        if self._may_be_form and (begin := body.lstrip()[:1]):
            self._may_be_form = False
            if begin not in JSON_STARTS:
                self._scan = None
        if self._scan is not None:
            try:
                self._scan.feed(body)
            except RefusedBody as error:
                await self._drain(message)
                self.refused = error
                raise
        return message

    async def _drain(self, message: Message) -> None:
        """Receive the rest of the body after `message`: a client that sends it does not read the response before."""
        if self._waits and not message:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while message.get("more_body", not message):
                    message = await self._receive()


class _Answer:
    """Sends one response with additional headers, and truncates the texts of a long error.

    Args:
        body: if it is refused before the response has started, `refuse` sends another response.
    """

    def __init__(self, send: Send, server: int | None, body: _Body) -> None:
        self._send = send
        self._server = server
        self._body = body
        self.started = False
        self._start: Message | None = None  # of a long error response, delayed until its body is complete
        self._error = b""

    async def refuse(self, response: JSONResponse, scope: Scope, receive: Receive) -> None:
        """Send the response to a refused body."""
        self.started = True
        await response(scope, receive, self.send)

    async def send(self, message: Message) -> None:
        if self._body.refused is not None and not self.started:
            return
        self.started = True
        if message["type"] == "http.response.start":
            headers, status = MutableHeaders(scope=message), message["status"]
            if status in BUSY:
                headers.setdefault("Retry-After", str(RETRY_AFTER_S))
            if self._server is not None:
                headers[SERVER_HEADER] = str(self._server)
            is_json = headers.get("content-type", "").startswith("application/json")
            if status >= HTTPStatus.BAD_REQUEST and is_json and int(headers.get("content-length", "0")) > LONGEST_ERROR:
                self._start = message
                return
        elif self._start is not None:
            self._error += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": shortened(self._error)}
            MutableHeaders(scope=self._start)["content-length"] = str(len(message["body"]))
            await self._send(self._start)
        await self._send(message)


def shortened(body: bytes) -> bytes:
    """Truncate the texts in the body of an error response; return other bodies than vLLM's errors unchanged."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return body
    answer["error"] = {name: printable(each) if isinstance(each, str) else each for name, each in error.items()}
    return json.dumps(answer).encode()
