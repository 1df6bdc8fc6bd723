"""Checks Qwen3-Omni requests and creates their flows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_omni_ext.errors import PromptTooLong, RequestError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.model_plugins.qwen3_omni.flow import TALKER, THINKER, ReadAloudFlow, SpeechFlow, SpeechPlan
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import HEADER, PADS, Medium, PromptSegments, SpecialIds, find_parts
from vllm_omni_ext.model_plugins.qwen3_omni.sound_blocks import (
    FRAME_MS,
    beginning,
    block_frames,
    divided,
    named_by_padding,
)
from vllm_omni_ext.model_plugins.qwen3_omni.sound_features import pad_to_longest
from vllm_omni_ext.model_plugins.qwen3_omni.voice import CODE2WAV
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import of_videos
from vllm_omni_ext.model_plugins.qwen_omni.requests import (
    SAMPLE_RATE_HZ,
    VOICE,
    ReadAloud,
    SpeakingRuntime,
    too_long,
)
from vllm_omni_ext.plugins.flow import ForwardFlow
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.stage_input import EXPORT

TALKER_TAIL = HEADER + PADS + 2  # talker prompt positions after the user segments

OPENAI_VOICES = {
    **dict.fromkeys(("alloy", "coral", "marin", "nova", "sage", "shimmer"), "chelsie"),
    **dict.fromkeys(("ash", "cedar", "echo", "onyx"), "ethan"),
    **dict.fromkeys(("ballad", "fable", "verse"), "aiden"),
}


class Qwen3OmniRuntime(SpeakingRuntime):
    """`plugins.runtime.ModelRuntime` of Qwen3-Omni: checks requests in an API server, and creates their flows."""

    text_stages = frozenset({THINKER})
    spoken_stages = SpeechFlow.stages
    aloud_stages = ReadAloudFlow.stages
    preferred_voice = "ethan"  # Transformers' default speaker
    openai_voices = OPENAI_VOICES
    own_marks = True

    def __init__(self, context: RuntimeContext) -> None:
        config = context.hf_config
        self._ids = SpecialIds.of(config) if config.enable_audio_output else None
        self._block = block_frames(config.thinker_config.audio_config)
        if context.processor is not None:
            pad_to_longest(context.processor)
        super().__init__(context, self._ids.speakers if self._ids else ())

    @property
    def most_frames(self) -> int:
        """Largest number of frames that code2wav can decode for one request."""
        return self._limits[CODE2WAV] // int(self._config.talker_config.num_code_groups)

    @property
    def most_speech_tokens(self) -> int:
        """Length in tokens of the longest text that `/v1/audio/speech` accepts: each token needs one frame at least."""
        return self.most_frames

    def capabilities(self) -> Capabilities:
        """Return the output modalities, and the length of the blocks in which the thinker encodes a sound."""
        block = None if self._block is None else float(self._block * FRAME_MS)
        return replace(super().capabilities(), sound_block_ms=block)

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Return the flow and the token limits of a request.

        The thinker exports hidden states only for an answer with sound to a multimodal prompt.

        Raises:
            RequestError: the prompt does not end in an assistant turn, so there is nothing to speak; or the prompt
                fills the talker's context; or the request's text or `max_tokens` exceed the frames that code2wav can
                decode.
        """
        if request.features:
            request = replace(request, features=named_by_padding(request.features))
        if options.ahead_of is not None:
            return self._plan_ahead(request, options.ahead_of)
        planned = self._plan_answer(request, options)
        if not request.features:
            return planned
        if not options.in_blocks:
            return replace(planned, features=request.features)
        assert self._block is not None, "sounds have blocks"
        return replace(planned, features=divided(request.features, self._block))

    def _plan_ahead(self, request: Rendered, modalities: Sequence[str]) -> Planned:
        """Return the plan of a request that only computes the beginning of its prompt (`RequestOptions.ahead_of`).

        The thinker's encoder cache and prefix cache then have it for a later request with a longer prompt.

        Args:
            modalities: modalities of the later answer. With audio, the thinker exports (and keeps) hidden states too.
        """
        assert self._block is not None, "sounds have blocks"
        prompt, features = beginning(request.prompt, request.features, self._block)
        spans: list[list[int]] = []
        if AUDIO in modalities:
            end = len(prompt) - 1
            spans = [[start, min(stop, end)] for start, stop in self._parts(request.prompt).multimodal if start < end]
        return Planned(
            flow=ForwardFlow(THINKER),
            frontend_args={EXPORT: spans} if spans else {},
            skip_prefix_cache=bool(spans),
            prompt=prompt,
            features=features,
        )

    def _plan_answer(self, request: Rendered, options: RequestOptions) -> Planned:
        if AUDIO not in options.modalities:
            return Planned(flow=ForwardFlow(THINKER))
        aloud = request.data if isinstance(request.data, ReadAloud) else None
        prompt = request.prompt if aloud is None else aloud.prompt
        parts = self._parts(prompt)
        budget = self._budget(parts, options)
        if aloud is not None and len(aloud.reply) > budget:
            raise too_long(f"{len(aloud.reply)} tokens", budget)
        voice = self.speaker(options.fields.get(VOICE) or None)
        assert voice is not None, "it has been checked"
        speech = SpeechPlan(
            prompt=prompt,
            parts=parts,
            voice=voice,
            ids=self._ids,
            sample_rate=SAMPLE_RATE_HZ,
            positions=self._talker_positions(request, parts) if parts.multimodal else None,
            media=[_medium(feature) for feature in request.features],
            scope=request.scope,
        )
        text, frames = self._schedules(options)
        budgets = {TALKER: budget}
        if aloud is not None:
            return Planned(flow=ReadAloudFlow(speech, aloud.reply, frames=frames), budgets=budgets)
        return Planned(
            flow=SpeechFlow(speech, text=text, frames=frames, text_too=TEXT in options.modalities),
            budgets=budgets,
            frontend_args={EXPORT: [list(span) for span in parts.multimodal]} if parts.multimodal else {},
            skip_prefix_cache=bool(parts.multimodal),
        )

    def _frame_rate(self) -> float:
        """Return the number of codec frames in a second of sound."""
        vocoder = self._config.code2wav_config
        return SAMPLE_RATE_HZ / math.prod((*vocoder.upsampling_ratios, *vocoder.upsample_rates))

    def _budget(self, parts: PromptSegments, options: RequestOptions) -> int:
        """Return the largest number of frames that the talker may generate for a request.

        The limit is the room in the talker's context, or the number of frames that code2wav can decode.

        Raises:
            RequestError: the request's own `max_tokens` of the talker exceeds the frames that code2wav can decode.
            PromptTooLong: the prompt leaves no room in the talker's context.
        """
        most, groups = self.most_frames, self._config.talker_config.num_code_groups
        wanted = options.params.get(TALKER)
        if wanted is not None and wanted.max_tokens is not None and wanted.max_tokens > most:
            raise RequestError(
                f"talker.max_tokens: {wanted.max_tokens} frames of {groups} codes are {wanted.max_tokens * groups} "
                f"codes, and the code2wav stage takes {self._limits[CODE2WAV]}; use at most {most}",
                parameter="talker.max_tokens",
            )
        length = sum(stop - start for start, stop in parts.user) + TALKER_TAIL
        left = self._limits[TALKER] - length
        if left < 1:
            raise PromptTooLong(
                f"messages: the user turns and the header are {length} tokens for the talker, whose context holds "
                f'{self._limits[TALKER]}; shorten them, or ask for modalities ["text"]',
                parameter="messages",
            )
        return min(left, most)

    def _parts(self, prompt: Sequence[int]) -> PromptSegments:
        assert self._ids is not None
        parts = find_parts(prompt, self._ids)
        if parts is None:
            raise RequestError(
                "prompt: sound needs a chat prompt that ends in an assistant turn; use chat messages, or end the "
                "prompt with the assistant header of the chat template",
                parameter="prompt",
            )
        return parts

    def _talker_positions(self, request: Rendered, parts: PromptSegments) -> bytes:
        """Return the M-RoPE positions of the talker's prompt: the joined user segments, then the assistant header.

        The format is that of `TalkerPrompt.positions`.
        """
        from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration

        positions = self.thinker_positions(
            Qwen3OmniMoeThinkerForConditionalGeneration, request, before_images(request.features)
        )
        return join_segments(positions, parts.user, TALKER_TAIL)


def before_images(features: Sequence[Any]) -> list[Any]:
    """Return the videos with a sound track that an image follows; only their positions follow time in the talker.

    Transformers calls the talker's `get_rope_index` without `use_audio_in_video`. It then finds a video with a sound
    track only while an image is left in the prompt. Tokens of the other videos with a sound track have positions of
    text.
    """
    last = max((each.mm_position.offset for each in features if each.modality == "image"), default=-1)
    return [each for each in of_videos(features) if each.mm_position.offset < last]


def _medium(feature: Any) -> Medium:
    place = feature.mm_position
    return Medium(place.offset, place.length, feature.identifier)


def join_segments(positions: np.ndarray, segments: Sequence[tuple[int, int]], tail: int) -> bytes:
    """Return the M-RoPE positions of joined segments of a prompt, followed by text tokens.

    Args:
        positions: M-RoPE positions [3, prompt length] of the thinker's prompt.
        segments: ranges [start, stop) of that prompt which the talker's prompt joins.
        tail: number of text tokens after the segments.

    Returns:
        int32 [3, sum of lengths + tail], row-major.
    """
    pieces: list[np.ndarray] = []
    after = 0
    for start, stop in segments:
        piece = positions[:, start:stop] - positions[0, start] + after  # a segment starts with a text token
        pieces.append(piece)
        after = int(piece[:, -1].max()) + 1  # a video's width may exceed it
    pieces.append(np.broadcast_to(np.arange(after, after + tail), (3, tail)))
    return np.ascontiguousarray(np.concatenate(pieces, axis=1), dtype=np.int32).tobytes()
