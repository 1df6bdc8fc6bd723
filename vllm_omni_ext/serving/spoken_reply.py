"""A whole answer with sound, in OpenAI's shape."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

from vllm_omni_ext.outputs import AudioOutput
from vllm_omni_ext.serving.encoding import encode_aside
from vllm_omni_ext.serving.options import Asked
from vllm_omni_ext.serving.wav import CHANNELS


def new_audio_id() -> str:
    """An id for one answer's sound."""
    return f"audio-{uuid.uuid4().hex}"


def expiry() -> int:
    """Until when the id of a sound can be used instead of its text: never, nothing is kept after the answer."""
    return int(time.time())


def metadata(sound_format: str, rate: int, samples: int, note: str | None = None) -> dict[str, Any]:
    """What `audio_metadata` of a choice says about the sound beside it."""
    facts: dict[str, Any] = {
        "format": sound_format,
        "sample_rate_hz": rate,
        "frame_count": samples,
        "channels": CHANNELS,
    }
    return facts if note is None else {**facts, "note": note}


class SpokenReply:
    """Collects the sound of one request and puts it into vLLM's response."""

    def __init__(self, asked: Asked, sample_rate: int) -> None:
        self._asked = asked
        self._rate = sample_rate
        self._pieces: list[np.ndarray[Any, Any]] = []
        self._frames = 0
        self._note: str | None = None

    async def text_of(self, source: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The text outputs of `source`; the sound is kept. Closes `source`."""
        async with aclosing(source):
            async for item in source:
                if isinstance(item, AudioOutput):
                    self._pieces.append(item.samples)
                    self._frames = len(item.frames)
                    self._note = item.note
                else:
                    yield item

    async def complete(self, response: ChatCompletionResponse) -> None:
        """Add the sound, how it is encoded and what it cost.

        A reply too short to be spoken keeps its text as content, whatever was asked for: nothing else is left of it.
        """
        samples = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.float32)
        choice = response.choices[0]
        facts = metadata(self._asked.format, self._rate, len(samples), self._note)
        choice.audio_metadata = facts  # type: ignore[attr-defined]  # the model takes extra fields
        if len(samples):
            choice.message.audio = await self._audio(samples, choice.message.content or "")
            if not self._asked.text:
                choice.message.content = None
        details = response.usage.completion_tokens_details or CompletionTokenUsageInfo()
        details.audio_tokens = self._frames  # type: ignore[attr-defined]
        response.usage.completion_tokens_details = details

    async def _audio(self, samples: np.ndarray[Any, Any], transcript: str) -> ChatCompletionAudio:
        data = await encode_aside(samples, self._rate, self._asked.encoding)
        return ChatCompletionAudio(
            id=new_audio_id(),
            data=base64.b64encode(data).decode("ascii"),
            expires_at=expiry(),
            transcript=transcript,
        )
