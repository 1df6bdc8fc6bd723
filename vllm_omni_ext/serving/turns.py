"""Earlier spoken answers that a client sends back as assistant messages."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.errors import RequestError


def restore_spoken_turns(messages: list[Any]) -> None:
    """Replace `audio` of assistant messages by its text, in place.

    OpenAI's API lets a client name an earlier sound by its id alone. Nothing of a finished request is kept here, so
    the message must bring its text: as `content`, or as `audio.transcript` (a message sent back as it came has it).

    Raises:
        RequestError: a message with neither.
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
