"""Answers of a server to the cases, through the `openai` client."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai
import soundfile

from tests.accuracy.cases import Case
from tests.support.cluster import LARGEST_DIFFERENCE

AT_ONCE = 8
ROUNDING = 1e-3
MAX_FRAMES = 120
"""The longest answers have 45 frames; a talker that does not end is detected early."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        sound: samples at 24 kHz, as the 16 bits of the WAV file; empty for an answer without sound.
        likelihood: logarithm of the text's probability; 0 for an answer with sound.
    """

    text: str
    sound: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    likelihood: float = 0.0

    def alike(self, other: Answer) -> bool:
        """Whether both are one answer up to rounding."""
        if self.text != other.text or self.sound.shape != other.sound.shape:
            return False
        difference = np.abs(self.sound.astype(int) - other.sound).max(initial=0)
        return bool(difference <= LARGEST_DIFFERENCE) and abs(self.likelihood - other.likelihood) < ROUNDING


async def ask(client: openai.AsyncOpenAI, model: str, case: Case, **extra: Any) -> Answer:
    """Request one answer; nothing in it is random. `extra` fields are sent with OpenAI's."""
    speaks = case.voice is not None
    options: dict[str, Any] = {"modalities": ["text"], "logprobs": True}
    if speaks:
        options = {"modalities": ["text", "audio"], "audio": {"voice": case.voice, "format": "wav"}}
    reply = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": case.content}],
        temperature=0,
        max_completion_tokens=16,
        **options,
        extra_body=extra | ({"talker": {"temperature": 0, "max_tokens": MAX_FRAMES}} if speaks else {}),
    )
    message = reply.choices[0].message
    if not speaks:
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        return Answer(message.content or "", likelihood=sum(token.logprob for token in logprobs.content))
    assert message.audio is not None, f"{case.name}: the answer has no sound"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="int16")
    assert rate == 24_000
    return Answer(message.audio.transcript, samples)


async def ask_all(base_url: str, model: str, cases: Iterable[Case], **extra: Any) -> dict[str, Answer]:
    """Request all answers, `AT_ONCE` at a time; returns them by the names of the cases."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> tuple[str, Answer]:
        async with turn:
            return case.name, await ask(client, model, case, **extra)

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        return dict(await asyncio.gather(*map(one, cases)))
