"""Requests of a family that speaks: their own fields, and checks that do not depend on the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from vllm_omni_ext.config.checks import ADAPTIVE
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.plugins.runtime import Capabilities, RequestOptions

SAMPLE_RATE_HZ = 24_000  # of the sound; the public configs have no field for it

MOST_SPEECH_TOKENS = "max_speech_tokens"
"""Key of the model card: length in tokens of the longest text that can be read out."""

VOICE = "voice"


@dataclass(frozen=True, kw_only=True)
class ReadAloud:
    """Request to read a text out, in `Rendered.data`.

    Attributes:
        prompt: token ids of a conversation up to the assistant header.
        reply: token ids of the text.
    """

    prompt: list[int]
    reply: list[int]


class Fields(BaseModel):
    """Request fields of a family that speaks."""

    model_config = ConfigDict(extra="forbid")

    voice: str | None = Field(None, validation_alias=AliasChoices(VOICE, "speaker"))
    """Name of the speaker; None: the checkpoint's default speaker."""


class SpeakingRuntime:
    """The part of a `ModelRuntime` that checks the options of a request.

    Attributes:
        preferred_voice: the default speaker, if the checkpoint has it.
        voices: names of the speakers, sorted.
    """

    fields = Fields
    preferred_voice: str
    voices: Any
    _chunks: dict[str, Any]

    @property
    def default_voice(self) -> str:
        """Name of the speaker for requests without a voice."""
        return self.preferred_voice if self.preferred_voice in self.voices else self.voices[0]

    def capabilities(self) -> Capabilities:
        """Return the output modalities of the checkpoint."""
        raise NotImplementedError

    def speaker(self, voice: str | None) -> str | None:
        """Return the speaker for a request's voice; None if unknown."""
        raise NotImplementedError

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
        """Return the chunk schedules of text and frames."""
        sizes = {**self._chunks, **options.chunks}
        rate = self._frame_rate() if sizes[ADAPTIVE] else 0.0
        return ChunkSchedule.of(sizes["text"]), ChunkSchedule.of(sizes["frames"], rate)

    def _frame_rate(self) -> float:
        """Return the number of frames in a second of sound."""
        raise NotImplementedError


def position_model(thinker: Any, config: Any) -> Any:
    """Return an instance of vLLM's thinker class without layers: only its M-RoPE arithmetic, on the config, is used."""
    from torch import nn

    model = thinker.__new__(thinker)
    nn.Module.__init__(model)
    model.config = config.thinker_config
    return model


def too_long(length: str, frames: int) -> RequestError:
    """Return the error for a text of this length, when at most `frames` frames can be decoded."""
    return RequestError(
        f"input: {length} are too many: every token takes a frame at least, and there is room for {frames}; "
        "send the text in several requests",
        parameter="input",
    )
