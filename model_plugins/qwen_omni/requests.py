"""Request fields and the base class of the runtime (`plugins.runtime.ModelRuntime`) of Qwen3-Omni and Qwen2.5-Omni."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_omni_ext.config.checks import ADAPTIVE
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import ConfigError, RequestError
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import (
    OPTION,
    Clock,
    Features,
    cache_in_pairs,
    positions_by_time,
)
from vllm_omni_ext.plugins.runtime import Capabilities, Rendered, RequestOptions, RuntimeContext

SAMPLE_RATE_HZ = 24_000  # of the sound; the public configs have no field for it

MOST_SPEECH_TOKENS = "max_speech_tokens"
"""Key in `Capabilities.card`, i.e. in the model's object of `/v1/models`: length in tokens of the longest text that
`/v1/audio/speech` accepts."""

VOICE = "voice"

FRAMES = "frames"
"""Name of the edge from the talker to the last stage, and key of its chunk sizes."""


@dataclass(frozen=True, kw_only=True)
class ReadAloud:
    """The text of a `/v1/audio/speech` request. `SpeakingHttp.speech` stores it in `Rendered.data` for `plan`.

    Attributes:
        prompt: token ids of the conversation before the text, up to the assistant header.
        reply: token ids of the text that the talker reads out.
    """

    prompt: list[int]
    reply: list[int]


class Fields(BaseModel):
    """Fields of HTTP bodies and of `LLM.generate` that these families add to vLLM's (`ModelRuntime.fields`)."""

    model_config = ConfigDict(extra="forbid")

    voice: str | None = Field(None, validation_alias=AliasChoices(VOICE, "speaker"))
    """Name of the speaker; None: the checkpoint's default speaker."""


class SpeakingRuntime:
    """Base class of both families' `ModelRuntime`: checks the options of requests; a subclass defines `plan`.

    Attributes:
        text_stages, spoken_stages, aloud_stages: the stages that a request for text, a chat with sound, and a request
            of `/v1/audio/speech` need.
        preferred_voice: the default speaker, if the checkpoint has it.
        openai_voices: OpenAI voice name -> speaker of the released checkpoint, for clients that send only OpenAI's
            names.
        own_marks: see `own_sounds.Clock`.

    Args:
        voices: names of the checkpoint's speakers; empty if the checkpoint has no talker.

    Raises:
        ConfigError: the server's `mm_processor_kwargs` have `use_audio_in_video`, which vLLM reads from requests only.
    """

    fields = Fields
    text_stages: frozenset[str]
    spoken_stages: frozenset[str]
    aloud_stages: frozenset[str]
    preferred_voice: str
    openai_voices: Mapping[str, str]
    own_marks: bool

    def __init__(self, context: RuntimeContext, voices: Iterable[str]) -> None:
        if context.processor is not None:
            if context.processor.info.ctx.get_merged_mm_kwargs({}).get(OPTION):
                raise ConfigError(f"mm_processor_kwargs: {OPTION} is an option of single requests; send it with those")
            cache_in_pairs(context.processor)
        self._config = context.hf_config
        self._chunks: dict[str, Any] = {**context.chunks, ADAPTIVE: context.chunks.get(ADAPTIVE, True)}
        self._limits = context.limits
        self._speaks = bool(self._config.enable_audio_output)
        self._names = {name.lower(): name for name in voices}
        self._position_model: Any = None

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the speakers, sorted."""
        return tuple(sorted(self._names.values()))

    @property
    def default_voice(self) -> str:
        """Name of the speaker for requests without a voice."""
        return self.preferred_voice if self.preferred_voice in self.voices else self.voices[0]

    @property
    def most_speech_tokens(self) -> int:
        """Length in tokens of the longest text that `/v1/audio/speech` accepts."""
        raise NotImplementedError

    def speaker(self, voice: str | None) -> str | None:
        """Return the name of the speaker that a request's `voice` selects; None if the voice is unknown.

        Args:
            voice: name of a speaker or key of `openai_voices`, in upper or lower case. The default speaker is selected
                by None, and by an OpenAI name whose speaker the checkpoint lacks.
        """
        name = (self.default_voice if voice is None else voice).lower()
        if name in self._names or not self._names:
            return self._names.get(name)
        return self._names.get(self.openai_voices[name], self.default_voice) if name in self.openai_voices else None

    def capabilities(self) -> Capabilities:
        """Return the modalities and routes of answers: text, and sound with voices if the checkpoint has a talker."""
        if not self._speaks:
            return Capabilities(modalities=(TEXT,), default_modalities=(TEXT,), routes={TEXT: self.text_stages})
        return Capabilities(
            modalities=(TEXT, AUDIO),
            default_modalities=(TEXT, AUDIO),
            routes={TEXT: self.text_stages, AUDIO: self.spoken_stages, "speech": self.aloud_stages},
            card={
                "voices": list(self.voices),
                "default_voice": self.default_voice,
                MOST_SPEECH_TOKENS: self.most_speech_tokens,
            },
        )

    def decode(self, stage: str, tensor: Any) -> Any:
        """Return a stage's output tensor unchanged: the talker's codes, or the samples of the last stage."""
        return tensor

    def thinker_positions(self, thinker: type[Any], request: Rendered, videos: Features | None = None) -> np.ndarray:
        """Return the M-RoPE positions [3, prompt length] of a prompt in the thinker, as Transformers computes them.

        Args:
            thinker: vLLM's class of the thinker.
            request: the rendered prompt.
            videos: the videos with a sound track whose positions follow time (see `own_sounds.positions_by_time`).
        """
        if self._position_model is None:
            self._position_model = position_model(thinker, self._config)
        compute = self._position_model.get_mrope_input_positions
        clock = Clock.of(self._config.thinker_config, own_marks=self.own_marks)
        positions, _ = positions_by_time(compute, request.prompt, request.features, clock, videos)
        found: np.ndarray = positions.numpy()
        return found

    def validate(self, options: RequestOptions) -> None:
        """Raise RequestError if the checkpoint does not support the options."""
        available = self.capabilities().modalities
        for modality in options.modalities:
            if modality not in available:
                allowed = ", ".join(available)
                raise RequestError(f"modalities: '{modality}' is not available; use {allowed}", parameter="modalities")
        if not options.modalities:
            raise RequestError("modalities: name at least one", parameter="modalities")
        voice = options.fields.get(VOICE)
        if voice is not None and self.speaker(voice) is None:
            allowed = ", ".join(self.voices)
            raise RequestError(f"voice: '{voice}' is unknown; use one of {allowed}", parameter=VOICE)

    def _schedules(self, options: RequestOptions) -> tuple[ChunkSchedule, ChunkSchedule]:
        """Return the chunk schedules of text (tokens for the talker) and frames (codec frames for the last stage).

        Sizes of the request replace those of the stage config. Without them, all chunks of frames of an answer that is
        not streamed have the last size.
        """
        sizes = {**self._chunks, **options.chunks}
        rate = self._frame_rate() if sizes[ADAPTIVE] else 0.0
        streamed = options.streamed or not options.chunks.keys().isdisjoint((FRAMES, ADAPTIVE))
        return ChunkSchedule.of(sizes["text"]), ChunkSchedule.of(sizes[FRAMES], rate, streamed=streamed)

    def _frame_rate(self) -> float:
        """Return the number of codec frames in a second of sound."""
        raise NotImplementedError


def position_model(thinker: Any, config: Any) -> Any:
    """Return an instance of vLLM's thinker class without layers, for `get_mrope_input_positions`.

    That method reads only the config.

    Args:
        thinker: vLLM's class of the thinker.
        config: the checkpoint's Hugging Face config.
    """
    from torch import nn

    model = thinker.__new__(thinker)
    nn.Module.__init__(model)
    model.config = config.thinker_config
    return model


def too_long(length: str, frames: int) -> RequestError:
    """Return the error for a text of `/v1/audio/speech` that is too long.

    Args:
        length: length of the text with its unit, e.g. "9000 tokens".
        frames: largest number of tokens that is accepted; the message calls them frames.
    """
    return RequestError(
        f"input: {length} are too many: every token takes a frame at least, and there is room for {frames}; "
        "send the text in several requests",
        parameter="input",
    )
