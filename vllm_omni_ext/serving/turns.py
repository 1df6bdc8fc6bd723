"""Earlier spoken answers that a client sends back as assistant messages."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.errors import RequestError


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
