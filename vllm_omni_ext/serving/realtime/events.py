"""Events of OpenAI's Realtime protocol: pydantic models of the client's events, and functions for server events."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_omni_ext.serving.realtime.limits import values
from vllm_omni_ext.serving.responses import printable

INVALID_REQUEST, SERVER_ERROR = "invalid_request_error", "server_error"

MISSING, UNKNOWN, WRONG_TYPE, WRONG_VALUE = (
    "missing_required_parameter",
    "unknown_parameter",
    "invalid_type",
    "invalid_value",
)
UNSUPPORTED = "unsupported_value"
"""This and the four constants above are error codes of wrong fields. UNSUPPORTED: the protocol allows the field or its
value, but this server does not support it."""

NOT_AVAILABLE = "is not available"
NO_MCP = "this server calls no MCP servers; use functions"

MOST_TOKENS = 4096
"""Largest `max_output_tokens` of the protocol other than `inf`."""

LONGEST_ID = 64
MOST_DEPTH = 100
MOST_FIELDS = 64
"""Limit of the number of fields of an object from a client. All objects of the protocol have fewer fields."""

METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")

Event = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)


class ClientError(Exception):
    """An error that the server sends to the client as an `error` event.

    Args:
        code: code of the error in the protocol.
        param: path of the wrong field in the client's event; None: the error is not about a field.
        kind: type of the error in the protocol.
    """

    def __init__(self, message: str, *, code: str, param: str | None = None, kind: str = INVALID_REQUEST) -> None:
        super().__init__(printable(message))
        self.code = code
        self.param = None if param is None else printable(param)
        self.kind = kind

    def event(self, event_id: str | None = None) -> Event:
        """Return the `error` event, to which `numbered` adds an id.

        Args:
            event_id: id of the client's event that caused the error; None: the client has set no id.
        """
        error = {"type": self.kind, "code": self.code, "message": str(self), "param": self.param, "event_id": event_id}
        return {"type": "error", "error": error}


def unsupported(param: str, reason: str) -> ClientError:
    """Return the error for a field of the protocol, or a value of it, that this server does not support."""
    return ClientError(f"{param}: {NOT_AVAILABLE}: {reason}", code=UNSUPPORTED, param=param)


def _unsupported(reason: str) -> PydanticCustomError:
    """Return the error by which a validator refuses a value of the protocol; see `unsupported`."""
    return PydanticCustomError(UNSUPPORTED, "{text}", {"text": f"{NOT_AVAILABLE}: {reason}"})


class Strict(BaseModel):
    """Base class of the protocol's objects. It refuses unknown fields, and does not convert values to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse an object with many fields before pydantic creates an error for each field, which takes a second."""
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"may have {MOST_FIELDS} fields")
        return value


class Defaulted(Strict):
    """Base class of objects in which `null` sets a field to its default."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None or name not in cls.model_fields}


def _whole_tokens(value: Any) -> Any:
    if value == "inf" or (type(value) is int and 1 <= value <= MOST_TOKENS):
        return value
    raise ValueError(f'must be an integer from 1 to {MOST_TOKENS}, or "inf"')


def _few_pairs(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > METADATA_PAIRS:
        raise ValueError(f"may have {METADATA_PAIRS} pairs")
    return value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > METADATA_KEY or len(text) > METADATA_VALUE for key, text in value.items()):
        raise ValueError(f"a key may have {METADATA_KEY} characters, a value {METADATA_VALUE}")
    return value


def _of_conversation(value: Any) -> Any:
    if value == "transcription":
        raise _unsupported("use `audio.input.transcription` of a session")
    return value


Tokens = Annotated[Any, AfterValidator(_whole_tokens)]
Metadata = Annotated[dict[str, str], BeforeValidator(_few_pairs), AfterValidator(_metadata)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
Milliseconds = Annotated[int, Field(ge=0, le=10_000)]
Modalities = Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)]


# -- fields of the session and of a response --------------------------------------------------------------------


class Pcm(Defaulted):
    """Samples of 16 bits, little-endian, mono, 24 kHz."""

    type: Literal["audio/pcm"]
    rate: Literal[24000] = 24000


class Pcmu(Strict):
    """G.711, mu-law, 8 kHz."""

    type: Literal["audio/pcmu"]


class Pcma(Strict):
    """G.711, A-law, 8 kHz."""

    type: Literal["audio/pcma"]


Format = Annotated[Pcm | Pcmu | Pcma, Field(discriminator="type")]


class ServerVad(Defaulted):
    """`turn_detection` that ends a turn after a fixed duration of silence; see `turns.ServerVad`."""

    type: Literal["server_vad"]
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: int | None = Field(None, ge=5000, le=30_000)


class SemanticVad(Defaulted):
    """`turn_detection` that ends a turn after silence, sooner if the turn is complete; see `turns.SemanticVad`."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]


class Transcription(Strict):
    """`audio.input.transcription` of a session: settings for the transcription of the user's sound."""

    model: str | None = None
    language: str | None = Field(None, max_length=16)
    prompt: str | None = Field(None, max_length=4096)
    delay: Any = None
    keywords: Any = None
    languages: Any = None


class AudioInput(Strict):
    """`audio.input` of a session."""

    format: Format | None = None
    noise_reduction: Any = None
    transcription: dict[str, Any] | None = None
    turn_detection: dict[str, Any] | None = None


class AudioOutput(Strict):
    """`audio.output` of a session."""

    format: Format | None = None
    speed: float | None = None
    voice: str | None = None


class ResponseAudioOutput(Strict):
    """`audio.output` of a response."""

    format: Format | None = None
    voice: str | None = None


class Audio(Strict):
    """`audio` of a session."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class ResponseAudio(Strict):
    """`audio` of a response."""

    output: ResponseAudioOutput | None = None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionChoice(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    name: str


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return FunctionChoice.model_validate(value).model_dump()
    if isinstance(value, dict) and value.get("type") == "mcp":
        raise _unsupported(NO_MCP)
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')


ToolChoice = Annotated[Any, AfterValidator(_tool_choice)]


class RetentionRatio(Strict):
    """`truncation` as an object: the fraction of the tokens that is kept in a prompt that was too long."""

    type: Literal["retention_ratio"]
    retention_ratio: float = Field(ge=0, le=1)
    token_limits: Any = None


class Inference(Strict):
    """Base class of `session` and `response` in the client's events: the fields that both have."""

    output_modalities: Modalities | None = None
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    max_output_tokens: Tokens | None = None
    parallel_tool_calls: bool | None = None
    prompt: Any = None
    reasoning: Any = None


class SessionFields(Inference):
    """`session` of `session.update`; `null` sets a field to its default."""

    type: Annotated[Literal["realtime"], BeforeValidator(_of_conversation)]
    model: str | None = None
    audio: Audio | None = None
    include: Any = None
    tracing: Any = None
    truncation: Any = None


class ResponseFields(Inference):
    """`response` of `response.create`."""

    audio: ResponseAudio | None = None
    conversation: Literal["auto", "none"] | None = None
    input: Objects | None = None
    metadata: Metadata | None = None


# -- items ------------------------------------------------------------------------------------------------------


class ItemFields(Strict):
    """Base class of conversation items: the fields that all items have.

    `status` has no effect, as in OpenAI's API, except that a function call may be "incomplete"; see `make_item`.
    """

    id: Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class SystemContent(Strict):
    """Text of a system message."""

    type: Literal["input_text"]
    text: str


class UserContent(Strict):
    """Text, sound or a picture of a user message."""

    type: Literal["input_text", "input_audio", "input_image"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class AssistantContent(Strict):
    """Text of an assistant message, or the transcript of its sound."""

    type: Literal["output_text", "output_audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None


class SystemMessage(ItemFields):
    """A system message."""

    type: Literal["message"]
    role: Literal["system"]
    content: Annotated[list[SystemContent], Field(fail_fast=True)]


class UserMessage(ItemFields):
    """A user message."""

    type: Literal["message"]
    role: Literal["user"]
    content: Annotated[list[UserContent], Field(fail_fast=True)]


class AssistantMessage(ItemFields):
    """An assistant message."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: Annotated[list[AssistantContent], Field(fail_fast=True)]


class FunctionCall(ItemFields):
    """A call of a function by the model."""

    type: Literal["function_call"]
    name: str
    arguments: str
    call_id: Id | None = None


class FunctionCallOutput(ItemFields):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: str


class ItemReference(Strict):
    """A reference to an item of the conversation, in `input` of `response.create`."""

    type: Literal["item_reference"]
    id: Id


_MESSAGES: dict[str, type[ItemFields]] = {
    "system": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
}
_ITEMS: dict[str, type[Strict]] = {
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "item_reference": ItemReference,
}
_MCP_ITEMS = frozenset({"mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"})


def read_item(data: Mapping[str, Any], path: str) -> Strict:
    """Validate an item of a client's event, and return the model of its type, e.g. `UserMessage`.

    Args:
        path: path of the item in the event, for errors.

    Raises:
        ClientError: a field is wrong, or this server does not support the item's type.
    """
    kind = data.get("type")
    if kind == "message":
        role = data.get("role")
        model: type[Strict] | None = _MESSAGES.get(role) if isinstance(role, str) else None
        if model is None:
            names = ", ".join(_MESSAGES)
            raise ClientError(f"{path}.role: must be one of {names}", code=WRONG_VALUE, param=f"{path}.role")
        return read(model, data, path)
    found = _ITEMS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in _MCP_ITEMS:
        raise unsupported(f"{path}.type", NO_MCP)
    if found is None:
        names = ", ".join(("message", *_ITEMS))
        raise ClientError(f"{path}.type: must be one of {names}", code=WRONG_VALUE, param=f"{path}.type")
    return read(found, data, path)


# -- events of the client ---------------------------------------------------------------------------------------


class ClientEvent(Strict):
    """Base class of the client's events."""

    event_id: str | None = None


class SessionUpdate(ClientEvent):
    """Event `session.update`: changes settings of the session."""

    type: Literal["session.update"]
    session: SessionFields


class Append(ClientEvent):
    """Event `input_audio_buffer.append`: adds sound, in base64, to the input buffer."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class Commit(ClientEvent):
    """Event `input_audio_buffer.commit`: makes the sound of the input buffer a user's item."""

    type: Literal["input_audio_buffer.commit"]


class Clear(ClientEvent):
    """Event `input_audio_buffer.clear`: removes the sound of the input buffer."""

    type: Literal["input_audio_buffer.clear"]


class ItemCreate(ClientEvent):
    """Event `conversation.item.create`: adds an item to the conversation."""

    type: Literal["conversation.item.create"]
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemDelete(ClientEvent):
    """Event `conversation.item.delete`: removes an item from the conversation."""

    type: Literal["conversation.item.delete"]
    item_id: str


class ItemRetrieve(ClientEvent):
    """Event `conversation.item.retrieve`: requests an item with its sound."""

    type: Literal["conversation.item.retrieve"]
    item_id: str


class ItemTruncate(ClientEvent):
    """Event `conversation.item.truncate`: sets how much of an assistant's sound was played."""

    type: Literal["conversation.item.truncate"]
    item_id: str
    content_index: int = Field(ge=0)
    audio_end_ms: int = Field(ge=0)


class ResponseCreate(ClientEvent):
    """Event `response.create`: starts a response."""

    type: Literal["response.create"]
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent):
    """Event `response.cancel`: cancels a response in progress."""

    type: Literal["response.cancel"]
    response_id: str | None = None


class OutputClear(ClientEvent):
    """Event `output_audio_buffer.clear`, which exists for WebRTC only; `Session` refuses it."""

    type: Literal["output_audio_buffer.clear"]


CLIENT_EVENTS: Mapping[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": Append,
    "input_audio_buffer.commit": Commit,
    "input_audio_buffer.clear": Clear,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "output_audio_buffer.clear": OutputClear,
}


def parse(text: str, most_values: int) -> Any:
    """Return the JSON value of a client's message.

    Args:
        most_values: limit of the number of opening brackets and commas.

    Raises:
        ClientError: the text is not JSON, is nested too deeply, or has too many values.
    """
    if values(text) > most_values:
        raise ClientError(f"the event has more than {most_values} values", code="event_too_large")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"the event is not JSON: {error}", code="invalid_json") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def event_id_of(data: Any) -> str | None:
    """Return the `event_id` that the client has set in an event; None without one."""
    found = data.get("event_id") if isinstance(data, dict) else None
    return printable(found) if isinstance(found, str) else None


def read_event(data: Any) -> ClientEvent:
    """Validate the JSON value of a client's event, and return the model of its type, e.g. `SessionUpdate`.

    Raises:
        ClientError: the type is unknown, or a field is unknown, missing or invalid.
    """
    if not isinstance(data, dict):
        raise ClientError("an event must be an object", code=WRONG_TYPE)
    kind = data.get("type")
    if kind is None:
        raise ClientError("type: is missing", code=MISSING, param="type")
    model = CLIENT_EVENTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        names = ", ".join(CLIENT_EVENTS)
        raise ClientError(f"type: {kind!r:.100} is not one of {names}", code=WRONG_VALUE, param="type")
    if model is not Append:  # which has no nested fields, and whose text is long
        check_values(data, "")
    return read(model, data, "")


def check_values(value: Any, path: str) -> None:
    """Check that `value` has no infinite number, no text with half of a surrogate pair, and no deep nesting.

    These are valid JSON, but cannot be tokenized or sent back to the client.

    Args:
        path: path of the value in the event, for errors; "": the event itself.

    Raises:
        ClientError: the check has failed.
    """
    if (found := _problem(value, MOST_DEPTH)) is not None:
        param = f"{path}{found[0]}".removeprefix(".")
        raise ClientError(f"{param}: {found[1]}", code=WRONG_VALUE, param=param)


def _problem(value: Any, depth: int) -> tuple[str, str] | None:
    """Return (path, error text) of the first value inside `value` that `check_values` refuses, or None.

    Args:
        depth: allowed levels of nested objects and arrays.

    Raises:
        ClientError: `value` has more levels.
    """
    if isinstance(value, str):
        return ("", "has half of a surrogate pair") if _HALF_CHARACTER.search(value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", "has a number that is too large")
    if not isinstance(value, dict | list):
        return None
    if not depth:
        message = f"the event has more than {MOST_DEPTH} objects and arrays inside of one another"
        raise ClientError(message, code="event_too_large")
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        found = _problem(key, depth - 1) or _problem(each, depth - 1)
        if found is not None:
            return (f".{key}" if isinstance(value, dict) else f"[{key}]") + found[0], found[1]
    return None


def read(model: type[ModelT], data: Any, path: str) -> ModelT:
    """Validate an object of a client's event, and return it as an instance of `model`.

    Args:
        path: path of the object in the event, for errors; "": the event itself.

    Raises:
        ClientError: a field is unknown, missing or invalid; the error names the first such field.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise as_client_error(error, path) from error


def as_client_error(error: ValidationError, path: str) -> ClientError:
    """Convert the first problem of a pydantic error to a `ClientError`.

    Args:
        path: path of the validated object in the event; the error has the path of the field.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    loc = [part for part in first["loc"] if part not in _TAGS]
    found = path
    for part in loc:
        found += f"[{part}]" if isinstance(part, int) else f".{part}" if found else str(part)
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return ClientError(f"{found}: is unknown", code=UNKNOWN, param=found)
    if kind == "missing":
        return ClientError(f"{found}: is missing", code=MISSING, param=found)
    if kind == UNSUPPORTED:
        return ClientError(f"{found}: {message}", code=UNSUPPORTED, param=found)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        found = f"{found}.type"
    code = WRONG_TYPE if kind.endswith(("_type", "_parsing")) or kind == "model_type" else WRONG_VALUE
    return ClientError(f"{found}: {message}", code=code, param=found or None)


_TAGS = frozenset({"audio/pcm", "audio/pcmu", "audio/pcma", "server_vad", "semantic_vad"})
"""Elements that pydantic adds to an error's path for the members of a union. They are not fields of the event."""


# -- events of the server ---------------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> Event:
    """Return an event of the server, to which `numbered` adds an id; `kind` is its `type`."""
    return {"type": kind, **fields}


def numbered(found: Event, new_id: Callable[[str], str]) -> Event:
    """Return a copy of an event with a new `event_id`, as its second field."""
    return {"type": found["type"], "event_id": new_id("event"), **{k: v for k, v in found.items() if k != "type"}}
