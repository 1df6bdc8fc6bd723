"""Parts of messages that vLLM's chat does not take: earlier spoken answers, and sound that is neither WAV nor MP3."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.fields import choice

SOUND_FORMATS = ("wav", "mp3", "mpeg", "mpga", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm")
"""Values of `input_audio.format`: the files that `/v1/audio/transcriptions` takes, and those that a reply may be."""

CHECKED_BY_VLLM = ("wav", "mp3")
"""The two that the type of vLLM's request has, which is OpenAI's."""


def sound_of_any_format(messages: list[Any], sent: Any) -> None:
    """Replace the content of messages that have `input_audio` in another format than WAV and MP3, in place.

    The part becomes an `audio_url` with the same data, which vLLM reads the same way.

    Args:
        messages: of the request; pydantic checks their content when it is read, and refuses other formats then.
        sent: the body's `messages`.

    Raises:
        RequestError: a format is unknown.
    """
    if not isinstance(sent, list) or len(sent) != len(messages):
        return
    for index, (message, raw) in enumerate(zip(messages, sent, strict=True)):
        parts = raw.get("content") if isinstance(raw, dict) else None
        if not isinstance(parts, list) or not isinstance(message, dict):
            continue
        changed = [_as_url(part, f"messages[{index}].content[{at}]") for at, part in enumerate(parts)]
        if any(new is not old for new, old in zip(changed, parts, strict=True)):
            message["content"] = changed


def _as_url(part: Any, name: str) -> Any:
    sound = part.get("input_audio") if isinstance(part, dict) else None
    if not isinstance(sound, dict) or not isinstance(sound.get("data"), str):
        return part
    given = sound.get("format")
    if given in CHECKED_BY_VLLM:
        return part
    field = f"{name}.input_audio.format"
    choice(field, given, SOUND_FORMATS)
    uuid = {"uuid": part["uuid"]} if "uuid" in part else {}
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/{given};base64,{sound['data']}"}, **uuid}


def transcripts_for_assistant_audio(messages: list[Any]) -> None:
    """Replace `audio` of assistant messages by its text, in place.

    OpenAI's API lets a client name an earlier sound by its id. This server keeps nothing of finished requests, so the
    message must contain its text: as `content`, or as `audio.transcript` (an unchanged answer message has it).

    Raises:
        RequestError: a message has neither.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        audio = message.pop("audio", None)
        if audio is None or message.get("content"):
            continue
        transcript = audio.get("transcript") if isinstance(audio, dict) else None
        if isinstance(transcript, str) and transcript:
            message["content"] = transcript
        elif not message.get("tool_calls"):
            name = f"messages[{index}].audio"
            raise RequestError(
                f"{name}: earlier sound is not kept by the server; send the message with its text, as 'content' or as "
                "'audio.transcript'",
                parameter=name,
            )
