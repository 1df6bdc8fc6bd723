"""Checks Qwen2.5-Omni requests and creates their flows."""

from __future__ import annotations

import math
import secrets

import msgspec
import numpy as np

from vllm_omni_ext.errors import ConfigError, PromptTooLong, RequestError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.model_plugins.qwen2_5_omni.facts import EVALUATIONS
from vllm_omni_ext.model_plugins.qwen2_5_omni.flow import (
    HEADER,
    TALKER,
    THINKER,
    CodecIds,
    ReadAloudFlow,
    SpeechFlow,
    SpeechPlan,
)
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Token2WavParams, Utterance
from vllm_omni_ext.model_plugins.qwen2_5_omni.solver import STAGES
from vllm_omni_ext.model_plugins.qwen2_5_omni.speakers import speakers_of
from vllm_omni_ext.model_plugins.qwen2_5_omni.voice import TOKEN2WAV
from vllm_omni_ext.model_plugins.qwen_omni.requests import (
    SAMPLE_RATE_HZ,
    VOICE,
    ReadAloud,
    SpeakingRuntime,
    too_long,
)
from vllm_omni_ext.plugins.flow import ForwardFlow
from vllm_omni_ext.plugins.runtime import Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.stage_input import EXPORT, EXPORTED, OPEN_END

OPENAI_VOICES = {
    **dict.fromkeys(("alloy", "ballad", "coral", "fable", "marin", "nova", "sage", "shimmer"), "chelsie"),
    **dict.fromkeys(("ash", "cedar", "echo", "onyx", "verse"), "ethan"),
}


class Qwen2_5OmniRuntime(SpeakingRuntime):
    """`plugins.runtime.ModelRuntime` of Qwen2.5-Omni: checks requests in an API server, and creates their flows.

    Raises:
        ConfigError: token2wav has no memory for the configured `num_steps`; or see `SpeakingRuntime`.
    """

    text_stages = frozenset({THINKER})
    spoken_stages = SpeechFlow.stages
    aloud_stages = ReadAloudFlow.stages
    preferred_voice = "Chelsie"  # Transformers' default speaker
    openai_voices = OPENAI_VOICES
    own_marks = False

    def __init__(self, context: RuntimeContext) -> None:
        config = context.hf_config
        self._token2wav = msgspec.convert(dict(context.defaults.get(TOKEN2WAV, {})), Token2WavParams)
        self._utterances = context.max_num_seqs.get(TOKEN2WAV, 1)
        if (problem := self._no_room(self._token2wav)) is not None:
            raise ConfigError(f"stages.token2wav.params.num_steps: {problem}")
        self._speakers: dict[str, int] = {}
        if config.enable_audio_output:
            model = context.model_config
            found = speakers_of(model.model, model.revision)
            self._speakers = {name: int(speaker["bos_token"]) for name, speaker in found.items()}
            self._ids = CodecIds.of(config)
        thinker = config.thinker_config
        self._media = frozenset((thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index))
        super().__init__(context, self._speakers)

    @property
    def most_codes(self) -> int:
        """Largest number of codes that token2wav can decode for one request."""
        dit = self._config.token2wav_config.dit_config
        return min(self._limits[TOKEN2WAV], int(dit.max_position_embeddings) // int(dit.repeats))

    @property
    def most_speech_tokens(self) -> int:
        """Largest number of tokens of a text that is read out: the thinker reads it, and each takes a code at least."""
        return min(self._limits[THINKER], self.most_codes)

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Return the flow and the token limits of a request.

        The thinker exports hidden states of all positions, unless the answer is text alone.

        Raises:
            RequestError: the prompt, or the request's text or `max_tokens`, exceed the context of a stage.
        """
        if AUDIO not in options.modalities:
            return Planned(flow=ForwardFlow(THINKER))
        aloud = request.data if isinstance(request.data, ReadAloud) else None
        prompt = list(request.prompt if aloud is None else aloud.prompt)
        budget = self._budget(len(prompt), options)
        text, frames = self._schedules(options)
        speech = self._speech(prompt, request, options)
        if aloud is not None:
            room = min(self._limits[THINKER] - len(prompt) - 1, budget)
            if len(aloud.reply) > room:
                raise too_long(f"{len(aloud.reply)} tokens", room)
            flow = ReadAloudFlow(speech, aloud.reply, text=text, frames=frames)
            return Planned(flow=flow, budgets={TALKER: budget, THINKER: 1})
        return Planned(
            flow=SpeechFlow(speech, text=text, frames=frames, text_too=TEXT in options.modalities),
            budgets={TALKER: budget},
            frontend_args={EXPORT: [[0, OPEN_END]], EXPORTED: 0},
            skip_prefix_cache=True,
        )

    def _speech(self, prompt: list[int], request: Rendered, options: RequestOptions) -> SpeechPlan:
        voice = self.speaker(options.fields.get(VOICE) or None)
        assert voice is not None, "it has been checked"
        params = options.params.get(TOKEN2WAV) or self._token2wav
        if (problem := self._no_room(params)) is not None:
            raise RequestError(f"token2wav.num_steps: {problem}", parameter="token2wav.num_steps")
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        return SpeechPlan(
            prompt=prompt,
            media=self._media,
            voice=self._speakers[voice],
            ids=self._ids,
            utterance=Utterance(speaker=voice, params=params),
            delay=self._delay(params),
            sample_rate=SAMPLE_RATE_HZ,
            positions=self._talker_positions(request) if request.features else None,
        )

    def _no_room(self, params: Token2WavParams) -> str | None:
        """Return an error text if token2wav has no memory for an utterance with these parameters, also alone."""
        most = 1 + self._utterances * EVALUATIONS // STAGES
        if params.num_steps <= most:
            return None
        return f"{params.num_steps} need more memory than token2wav has; use at most {most}, or more max_num_seqs there"

    def _delay(self, params: Token2WavParams) -> int:
        """Return about how many codes must follow a code before its sound is final (see `dit.py`)."""
        dit = self._config.token2wav_config.dit_config
        blocks = 1 + STAGES * (params.num_steps - 1) * len(dit.look_ahead_layers)
        return int(blocks * dit.block_size // dit.repeats)

    def _frame_rate(self) -> float:
        """Return the number of codes in a second of sound."""
        token2wav = self._config.token2wav_config
        return SAMPLE_RATE_HZ / (math.prod(token2wav.bigvgan_config.upsample_rates) * token2wav.dit_config.repeats)

    def _budget(self, length: int, options: RequestOptions) -> int:
        """Return the largest number of codes that the talker may generate for a request.

        The limit is the room in the talker's context, or the number of codes that token2wav can decode.

        Args:
            length: number of tokens in the thinker's prompt.

        Raises:
            RequestError: the request's own `max_tokens` of the talker exceeds the codes that token2wav can decode.
            PromptTooLong: the prompt leaves no room in the talker's context.
        """
        most, wanted = self.most_codes, options.params.get(TALKER)
        if wanted is not None and wanted.max_tokens is not None and wanted.max_tokens > most:
            raise RequestError(
                f"talker.max_tokens: {wanted.max_tokens} codes are more than token2wav takes; use at most {most}",
                parameter="talker.max_tokens",
            )
        left = self._limits[TALKER] - length - HEADER
        if left < 1:
            raise PromptTooLong(
                f"messages: the prompt has {length} tokens, and with {HEADER} more it fills the talker's context of "
                f'{self._limits[TALKER]}; shorten it, or ask for modalities ["text"]',
                parameter="messages",
            )
        return min(left, most)

    def _talker_positions(self, request: Rendered) -> bytes:
        """Return the M-RoPE positions of the talker's prompt: those of the thinker's prompt, then two text positions.

        The format is that of `TalkerPrompt.positions`.
        """
        from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration

        thinker = self.thinker_positions(Qwen2_5OmniThinkerForConditionalGeneration, request)
        after = int(thinker[:, -1].max()) + 1  # a video's width may exceed it
        header = np.broadcast_to(np.arange(after, after + HEADER), (3, HEADER))
        return np.ascontiguousarray(np.concatenate([thinker, header], axis=1), dtype=np.int32).tobytes()
