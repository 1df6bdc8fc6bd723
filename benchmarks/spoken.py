"""Spoken answers of fixed lengths, and their times at a listener, who plays the sound while it arrives.

The lengths are fixed, so the work does not depend on the weights: a prompt of 19 tokens, 64 text tokens and 127 frames.
The frames are 10.2 s of sound, of which the vocoder returns 10.1 s.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

from vllm_omni_ext.connectors.playback import Player
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.runtime import RequestOptions

QUESTION = [{"role": "user", "content": "Tell me about"}]  # 19 tokens with the chat template
STAGES = ("thinker", "talker", "code2wav")

_numbers = itertools.count()


@dataclass(frozen=True)
class Lengths:
    """Lengths of an answer: text tokens, and frames of sound, 80 ms each."""

    text: int = 64
    frames: int = 127
    dropped: int = 1
    """Frames of the talker's last steps that are dropped: Qwen3-Omni drops one, Qwen2.5-Omni none."""

    @property
    def talker_tokens(self) -> int:
        """Number of tokens, i.e. steps, of the talker."""
        return self.frames + self.dropped


@dataclass(frozen=True)
class Answer:
    """Times of one answer.

    Attributes:
        first_s, whole_s: seconds from the request to the first sound and to the end of the answer.
        sound_s: seconds of sound.
        late_s: seconds of silence between the beginning and the end of the sound, if it is played while it arrives.
    """

    first_s: float
    whole_s: float
    sound_s: float
    late_s: float = 0.0

    @property
    def real_time_factor(self) -> float:
        """Seconds of the answer for each second of sound."""
        return self.whole_s / self.sound_s


Ask = Callable[[int], Awaitable[Answer]]
"""Function that takes a seed, and requests one answer."""


class Listener:
    """Simulates the playback of an answer's sound while it arrives. It is constructed when the request is sent.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began, self._player = clock, clock(), Player()

    def hear(self, seconds: float) -> None:
        """Receive the next piece of sound, of this length in seconds."""
        self._player.receive(seconds, self._clock())

    def end(self) -> Answer:
        """Return the times of the answer; called at its end. ValueError if it had no sound."""
        player, first = self._player, self._player.first_at
        if first is None:
            raise ValueError("the answer had no sound")
        return Answer(first - self._began, self._clock() - self._began, player.sound, sum(player.silences))


def sampling(omni: Any, lengths: Lengths, seed: int) -> tuple[SamplingParams, RequestOptions]:
    """Return the text stage's parameters, and options with those of the talker: configured, with seed and lengths."""
    text = SamplingParams(temperature=0, max_tokens=lengths.text, ignore_eos=True)
    (talker,) = (stage for stage in omni.plan.stages if stage.name == "talker")
    exactly = {"max_tokens": lengths.talker_tokens, "min_tokens": lengths.talker_tokens, "seed": seed}
    speech = SamplingParams(**{**talker.params, **exactly})
    return text, RequestOptions(modalities=("text", "audio"), params={"talker": speech}, streamed=True)


def inside(omni: Any, lengths: Lengths) -> Ask:
    """Return a function that requests answers from an `OmniLLM` of this process; `omni._run` must run it."""
    prompt = omni._preprocess_chat_one(QUESTION)

    async def ask(seed: int) -> Answer:
        text, options = sampling(omni, lengths, seed)
        listener, frames = Listener(), 0
        async for item in omni._omni.generate(prompt, text, f"spoken-{next(_numbers)}", options=options):
            if isinstance(item, AudioChunk):
                listener.hear(len(item.samples) / item.sample_rate)
                frames = len(item.frames)
        check_frames(frames, lengths)
        return listener.end()

    return ask


def check_frames(frames: int, lengths: Lengths) -> None:
    """Raise RuntimeError if an answer is shorter or longer than requested: it would not be comparable."""
    if frames != lengths.frames:
        raise RuntimeError(f"{frames} frames instead of {lengths.frames}")


async def several(ask: Ask, requests: int, concurrency: int) -> tuple[float, list[Answer]]:
    """Request answers with the seeds 0 to `requests` - 1, `concurrency` at a time; return (seconds of all, answers)."""
    places = asyncio.Semaphore(concurrency)

    async def one(seed: int) -> Answer:
        async with places:
            return await ask(seed)

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(seed) for seed in range(requests)))
    return time.perf_counter() - began, answers
