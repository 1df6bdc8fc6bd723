"""What a chat request asks for beyond text: the fields that stock vLLM accepts and does not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.orchestrator.requests import OmniOptions, RequestPlugin
from vllm_omni_ext.serving.encoding import CHAT_FORMATS, WAV, Encoding, streaming
from vllm_omni_ext.serving.stage_sampling import apply_to_text, read_sampling
from vllm_omni_ext.serving.values import refuse_absurd_values
from vllm_omni_ext.topology.shape import Plan

AUDIO_KEYS = ("voice", "format")
VOICE_FIELDS = ("voice", "speaker")
"""Top-level names of the voice; `audio.voice` comes before them."""

AUDIO_IN_CONTENT = "audio_in_content"
"""Field that asks for streamed sound in `delta.content` too, where clients of vllm-omni look for it."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request's wishes.

    Attributes:
        format: how sound is encoded in the answer.
        audio_in_content: streamed sound is sent in `delta.content` as well.
    """

    options: OmniOptions
    format: str
    audio_in_content: bool = False

    @property
    def encoding(self) -> Encoding:
        """How sound is encoded in the answer."""
        return CHAT_FORMATS[self.format]

    @property
    def text(self) -> bool:
        """Whether the text belongs into the answer's content."""
        return "text" in self.options.modalities


def read_request(request: ChatCompletionRequest, plugin: RequestPlugin, plan: Plan) -> Asked:
    """Read and check what a request asks for; the text stage's entry of `sampling_params_list` is put into it.

    Raises:
        RequestError: something is unknown or does not fit together; names the field and what is allowed.
    """
    refuse_absurd_values(request)
    extra = request.model_extra or {}
    audio = _audio(extra.get("audio"))
    sound_format = _format(audio.get("format"), stream=bool(request.stream))
    voice, named = _voice(audio, extra)
    options = OmniOptions(
        modalities=_modalities(extra.get("modalities"), plugin),
        voice=voice,
        sampling=read_sampling(plan, extra, seed=request.seed),
        chunks=read_chunks(extra.get("chunks")),
    )
    check_options(plugin, options, voice_field=named)
    apply_to_text(plan, request)
    if not options.text_only:
        _refuse_several(request)
    return Asked(
        options=options, format=sound_format, audio_in_content=_flag(AUDIO_IN_CONTENT, extra.get(AUDIO_IN_CONTENT))
    )


def check_options(plugin: RequestPlugin, options: OmniOptions, *, voice_field: str) -> None:
    """Let the plugin check; a wrong voice is reported under the name the request has for it."""
    try:
        plugin.check(options)
    except RequestError as err:
        if err.parameter != "voice":
            raise
        raise RequestError(str(err), parameter=voice_field) from err


def read_chunks(given: Any) -> Mapping[str, Any]:
    """What a body says about chunks; the plugin checks what is in it."""
    if given is not None and not isinstance(given, dict):
        raise RequestError('chunks: must be an object such as {"frames": [4, 25]}', parameter="chunks")
    return given or {}


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value`; RequestError lists what is allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name}: {value!r:.100} is not available; use {', '.join(allowed)}", parameter=name)
    return value


def _format(given: Any, *, stream: bool) -> str:
    name = choice("audio.format", WAV if given is None else given, CHAT_FORMATS)
    if stream and not CHAT_FORMATS[name].streams:
        allowed = ", ".join(streaming(CHAT_FORMATS))
        raise RequestError(f"audio.format: '{name}' cannot be streamed; use {allowed}", parameter="audio.format")
    return name


def _flag(name: str, given: Any) -> bool:
    if given is not None and not isinstance(given, bool):
        raise RequestError(f"{name}: must be true or false, got {given!r:.100}", parameter=name)
    return bool(given)


def _modalities(given: Any, plugin: RequestPlugin) -> tuple[str, ...]:
    if given is None:
        return plugin.output_modalities
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        allowed = ", ".join(plugin.output_modalities)
        raise RequestError(f"modalities: must be a list of names out of {allowed}", parameter="modalities")
    return tuple(dict.fromkeys(given))


def _audio(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError(f"audio: must be an object with {' and '.join(AUDIO_KEYS)}", parameter="audio")
    for key in given:
        if key not in AUDIO_KEYS:
            raise RequestError(f"audio.{key}: is unknown; use {', '.join(AUDIO_KEYS)}", parameter=f"audio.{key}")
    return given


def _voice(audio: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str | None, str]:
    """The voice, and the name of the field that says it."""
    return voice_of({"audio.voice": audio.get("voice")} | {name: extra.get(name) for name in VOICE_FIELDS})


def voice_of(named: Mapping[str, Any]) -> tuple[str | None, str]:
    """The first voice that is given, and the name of its field; a field that is not given has the value None."""
    for name, value in named.items():
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{name}: must be the name of a voice; custom voices do not exist", parameter=name)
        return value, name
    return None, VOICE_FIELDS[0]


def _refuse_several(request: ChatCompletionRequest) -> None:
    """One voice cannot speak several answers."""
    instead = 'send one request for each answer, or ask for modalities ["text"]'
    if request.use_beam_search:
        raise RequestError(f"use_beam_search: is not available with sound; {instead}", parameter="use_beam_search")
    if request.n not in (None, 1):
        raise RequestError(f"n: must be 1 when sound is asked for, got {request.n}; {instead}", parameter="n")
