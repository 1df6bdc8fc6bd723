"""Settings of a Realtime session, a dict in the API's format: the defaults, and updates by events of the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.serving.realtime.events import (
    NO_MCP,
    UNSUPPORTED,
    WRONG_VALUE,
    Audio,
    AudioInput,
    AudioOutput,
    ClientError,
    FunctionTool,
    Inference,
    ResponseFields,
    RetentionRatio,
    SemanticVad,
    ServerVad,
    SessionFields,
    Strict,
    Transcription,
    read,
    unsupported,
)

Settings = dict[str, Any]

PCM: dict[str, Any] = {"type": "audio/pcm", "rate": 24000}

TRANSCRIBERS = frozenset(
    {
        "whisper-1",
        "gpt-transcribe",
        "gpt-live-transcribe",
        "gpt-4o-transcribe",
        "gpt-4o-mini-transcribe",
        "gpt-4o-mini-transcribe-2025-12-15",
        "gpt-realtime-whisper",
    }
)
"""Values of `transcription.model` in OpenAI's API. They are allowed, and the served model transcribes."""

REFUSED: Mapping[str, str] = {
    "prompt": "stored prompts do not exist; send `instructions`",
    "reasoning": "the model has no setting for it",
    "include": "log probabilities of transcripts are not available",
}
"""Fields of the protocol that are refused unless they are null, and the reasons."""

_DETECTORS: dict[str, type[Strict]] = {"server_vad": ServerVad, "semantic_vad": SemanticVad}


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Properties of the served model and the server that determine the settings of a session.

    Attributes:
        model: name of the model in the session; may be the name of a LoRA adapter.
        names: served names of the model.
        modalities: modalities of the model's answers: "text", "audio", or both.
        voice: default voice of the model; None: the model has no default voice.
        check_voice: raises RequestError for a voice that the model does not have.
        detectors: types of turn detection of this server; the first is the default; empty: there is none.
        tracing: value of the setting `tracing`, which clients cannot change: "auto" if the server exports spans, else
            None.
        block_ms: length in ms of the blocks of input sound that are computed before the turn ends; None: no sound is
            computed before.
    """

    model: str
    names: frozenset[str]
    modalities: tuple[str, ...]
    voice: str | None
    check_voice: Callable[[str], None]
    detectors: tuple[str, ...]
    tracing: Literal["auto"] | None
    block_ms: float | None = None

    @property
    def default_modalities(self) -> list[str]:
        """`output_modalities` of a session for which the client has set none."""
        return [AUDIO] if AUDIO in self.modalities else [TEXT]


def defaults(offer: Offer, session_id: str, expires_at: int) -> Settings:
    """Return the settings of a new session.

    Args:
        expires_at: Unix time at which the session ends.
    """
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "expires_at": expires_at,
        "model": offer.model,
        "output_modalities": offer.default_modalities,
        "instructions": "",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": "inf",
        "truncation": "auto",
        "tracing": offer.tracing,
        "prompt": None,
        "include": None,
        "audio": {
            "input": {
                "format": dict(PCM),
                "noise_reduction": None,
                "transcription": None,
                "turn_detection": _default_detection(offer),
            },
            "output": {"format": dict(PCM), "voice": offer.voice, "speed": 1.0},
        },
    }


def _default_detection(offer: Offer) -> dict[str, Any] | None:
    if not offer.detectors:
        return None
    kind = offer.detectors[0]
    return _DETECTORS[kind].model_validate({"type": kind}).model_dump()


def updated(
    current: Settings, fields: SessionFields, offer: Offer, *, voice_fixed: bool = False, sounding: bool = False
) -> Settings:
    """Return a copy of the settings, changed by the fields of `session.update`; `null` sets a field to its default.

    Args:
        current: the settings; not changed.
        voice_fixed: the session has answered with sound, so that the voice cannot change.
        sounding: the session has sound of the user, so that its format cannot change: items have sound as it was sent.

    Raises:
        ClientError: a field is invalid, not supported, or cannot change now.
    """
    path = "session"
    _refuse(fields, REFUSED, path)
    _check_tracing(fields.tracing, f"{path}.tracing")
    if fields.model is not None and fields.model != current["model"]:
        raise ClientError(
            f"{path}.model: a session has one model, {current['model']}", code=WRONG_VALUE, param=f"{path}.model"
        )
    new, default = _copied(current), defaults(offer, "", 0)
    new |= _inference(fields, offer, path, default)
    if "truncation" in fields.model_fields_set:
        new["truncation"] = _truncation(fields.truncation, f"{path}.truncation")
    if "audio" in fields.model_fields_set:
        _apply_audio(new["audio"], fields.audio, default["audio"], offer, f"{path}.audio")
    if voice_fixed and new["audio"]["output"]["voice"] != current["audio"]["output"]["voice"]:
        raise voice_error(f"{path}.audio.output.voice")
    if sounding and new["audio"]["input"]["format"] != current["audio"]["input"]["format"]:
        param = f"{path}.audio.input.format"
        message = f"{param}: cannot change while the input audio buffer or an item has sound"
        raise ClientError(message, code=WRONG_VALUE, param=param)
    return new


def _copied(settings: Settings) -> Settings:
    """Return a copy of the settings. Values that are not changed in place, such as `tools`, are shared."""
    return {**settings, "audio": {name: dict(each) for name, each in settings["audio"].items()}}


def voice_error(param: str) -> ClientError:
    """Return the error for a change of the voice after the first sound."""
    return ClientError(
        f"{param}: cannot change after the first sound of the session", code="cannot_update_voice", param=param
    )


def of_response(current: Settings, fields: ResponseFields | None, offer: Offer, *, voice_fixed: bool) -> Settings:
    """Return the settings of one response: those of the session, overridden by the fields of `response.create`.

    A field that is `null` has the value of the session.

    Args:
        current: settings of the session.
        fields: None: the settings of the session apply unchanged.
        voice_fixed: see `updated`.

    Raises:
        ClientError: a field is invalid or not supported.
    """
    if fields is None:
        return current
    path = "response"
    _refuse(fields, REFUSED, path)
    new = _copied(current)
    new |= _inference(fields, offer, path, current)
    output = None if fields.audio is None else fields.audio.output
    if output is not None:
        given = {name: getattr(output, name) for name in output.model_fields_set}
        changed = AudioOutput(**{name: value for name, value in given.items() if value is not None})
        _apply_output(new["audio"]["output"], changed, offer, f"{path}.audio.output")
        if voice_fixed and new["audio"]["output"]["voice"] != current["audio"]["output"]["voice"]:
            raise voice_error(f"{path}.audio.output.voice")
    return new


def _refuse(fields: Inference, reasons: Mapping[str, str], path: str) -> None:
    for name, reason in reasons.items():
        if getattr(fields, name, None) is not None:
            raise unsupported(f"{path}.{name}", reason)


def _check_tracing(given: Any, path: str) -> None:
    """Check `tracing`, which has no effect: clients send "auto" by default, and some end at an error event."""
    if isinstance(given, dict):
        raise unsupported(path, 'traces have no names or metadata of clients; use "auto"')
    if given not in (None, "auto"):
        raise ClientError(f'{path}: must be "auto" or null', code=WRONG_VALUE, param=path)


def _inference(fields: Inference, offer: Offer, path: str, default: Settings) -> Settings:
    """Return new values of the fields of `Inference` that the client has set; `null` becomes the value of `default`."""
    new: Settings = {}
    for name in ("output_modalities", "instructions", "tool_choice", "max_output_tokens", "parallel_tool_calls"):
        if name in fields.model_fields_set:
            given = getattr(fields, name)
            new[name] = default[name] if given is None else given
    for name in new.get("output_modalities", ()):
        if name not in offer.modalities:
            param = f"{path}.output_modalities"
            raise ClientError(
                f"{param}: '{name}' is not available; use one of {', '.join(offer.modalities)}",
                code=UNSUPPORTED,
                param=param,
            )
    if "tools" in fields.model_fields_set:
        new["tools"] = default["tools"] if fields.tools is None else read_tools(fields.tools, f"{path}.tools")
    return new


def read_tools(tools: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Validate tools of a client's event, and return them without fields that are `null`.

    Args:
        path: path of the tools in the event, for errors.

    Raises:
        ClientError: a tool is not a function, or has a wrong field.
    """
    found = []
    for index, each in enumerate(tools):
        if each.get("type") == "mcp":
            raise unsupported(f"{path}[{index}].type", NO_MCP)
        found.append(read(FunctionTool, each, f"{path}[{index}]").model_dump(exclude_none=True))
    return found


def _truncation(given: Any, path: str) -> Any:
    if given is None:
        return "auto"
    if given in ("auto", "disabled"):
        return given
    if not isinstance(given, dict):
        raise ClientError(f'{path}: must be "auto", "disabled" or an object', code=WRONG_VALUE, param=path)
    ratio = read(RetentionRatio, given, path)
    if ratio.token_limits is not None:
        raise unsupported(f"{path}.token_limits", "the limit is the model's context")
    return {"type": ratio.type, "retention_ratio": ratio.retention_ratio}


def _apply_audio(current: Settings, fields: Audio | None, default: Settings, offer: Offer, path: str) -> None:
    fields = Audio(input=None, output=None) if fields is None else fields
    if fields.input is not None:
        _apply_input(current["input"], fields.input, offer, f"{path}.input")
    if fields.output is not None:
        _apply_output(current["output"], fields.output, offer, f"{path}.output")
    current |= {name: default[name] for name in fields.model_fields_set if getattr(fields, name) is None}


def _apply_input(current: Settings, fields: AudioInput, offer: Offer, path: str) -> None:
    given = fields.model_fields_set
    if fields.noise_reduction is not None:
        raise unsupported(f"{path}.noise_reduction", "the model gets the sound as it is sent; use null")
    if "format" in given:
        current["format"] = dict(PCM) if fields.format is None else fields.format.model_dump()
    if "transcription" in given:
        current["transcription"] = _transcription(current, fields.transcription, offer, f"{path}.transcription")
    if "turn_detection" in given:
        current["turn_detection"] = _detection(current, fields.turn_detection, offer, f"{path}.turn_detection")


def _transcription(current: Settings, given: dict[str, Any] | None, offer: Offer, path: str) -> Settings | None:
    """Return the new value of `transcription`. Fields that the client has not set keep their values."""
    if given is None:
        return None
    fields = read(Transcription, {**(current["transcription"] or {}), **given}, path)
    for name in ("delay", "keywords", "languages"):
        if getattr(fields, name) is not None:
            raise unsupported(f"{path}.{name}", "use `language` and `prompt`")
    if fields.model is not None and fields.model not in TRANSCRIBERS | offer.names | {offer.model}:
        raise unsupported(f"{path}.model", f"{offer.model} transcribes; name it, or leave the field out")
    return {"model": offer.model, "language": fields.language, "prompt": fields.prompt}


def _detection(current: Settings, given: dict[str, Any] | None, offer: Offer, path: str) -> Settings | None:
    """Return the new value of `turn_detection`. Fields that are not set keep their values if the type stays."""
    if given is None:
        return None
    kind = given.get("type")
    model = _DETECTORS.get(kind) if isinstance(kind, str) else None
    if model is None:
        param = f"{path}.type"
        raise ClientError(f"{param}: must be one of {', '.join(_DETECTORS)}", code=WRONG_VALUE, param=param)
    if kind not in offer.detectors:
        reason = f"use one of {', '.join(offer.detectors)}" if offer.detectors else "commit turns, and use null"
        raise unsupported(f"{path}.type", reason)
    before = current["turn_detection"]
    kept = before if before is not None and before["type"] == kind else {}
    return read(model, {**kept, **given}, path).model_dump()


def _apply_output(current: Settings, fields: AudioOutput, offer: Offer, path: str) -> None:
    given = fields.model_fields_set
    if fields.speed is not None and fields.speed != 1:
        raise unsupported(f"{path}.speed", "only 1.0; change the speed where the sound is played")
    if "format" in given:
        current["format"] = dict(PCM) if fields.format is None else fields.format.model_dump()
    if "voice" in given:
        if fields.voice is not None:
            _check_voice(fields.voice, offer, f"{path}.voice")
        current["voice"] = offer.voice if fields.voice is None else fields.voice


def _check_voice(name: str, offer: Offer, path: str) -> None:
    try:
        offer.check_voice(name)
    except RequestError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise ClientError(f"{path}: {reason}", code=WRONG_VALUE, param=path) from error
