"""What a Qwen3-Omni request may ask for, and the flow that serves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_omni_ext.config.checks import ADAPTIVE, BOOLEAN, CHUNK_SIZES
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.flow import TALKER, THINKER, Speech, SpeechFlow
from vllm_omni_ext.model_plugins.qwen3_omni.pipeline import QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import HEADER, PADS, SpecialIds, Spoken, find_parts
from vllm_omni_ext.model_plugins.qwen3_omni.voice import CODE2WAV
from vllm_omni_ext.orchestrator.requests import OmniOptions, TextRequest
from vllm_omni_ext.wire.handoff import EXPORT
from vllm_omni_ext.wire.parts import refused
from vllm_omni_ext.wire.rows import Notice

SAMPLE_RATE_HZ = 24_000  # the vocoder's output rate; the public config has no field for it
PREFERRED_VOICE = "ethan"  # Transformers' default speaker
TALKER_TAIL = HEADER + PADS + 2  # talker prompt positions after the user segments


class Qwen3OmniRequests:
    """Plans requests of one checkpoint.

    Args:
        config: its `Qwen3OmniMoeConfig`.
        chunks: sizes of successive chunks by hand-over, and whether they adapt; what is missing is the pipeline's.
    """

    sample_rate = SAMPLE_RATE_HZ
    # The talker was trained on conversations: an empty user turn keeps their form and adds no words of ours.
    recital_prompt = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"

    def __init__(self, config: Any, chunks: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._chunks: dict[str, Any] = {**QWEN3_OMNI.chunks(), ADAPTIVE: True, **(chunks or {})}
        self._speaks = bool(config.enable_audio_output)
        self._ids = SpecialIds.of(config) if self._speaks else None
        self._positions: Any = None

    @property
    def output_modalities(self) -> tuple[str, ...]:
        """What the checkpoint can answer with."""
        return ("text", "audio") if self._speaks else ("text",)

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the speakers, sorted."""
        return tuple(sorted(self._ids.speakers)) if self._ids else ()

    @property
    def default_voice(self) -> str:
        """The speaker used when none is asked for."""
        return PREFERRED_VOICE if PREFERRED_VOICE in self.voices else self.voices[0]

    def check(self, options: OmniOptions) -> None:
        """Raise RequestError if the checkpoint cannot do what is asked for."""
        for modality in options.modalities:
            if modality not in self.output_modalities:
                allowed = ", ".join(self.output_modalities)
                raise RequestError(f"modalities: '{modality}' is not available; use {allowed}", parameter="modalities")
        if not options.modalities:
            raise RequestError("modalities: name at least one", parameter="modalities")
        if options.voice is not None and options.voice.lower() not in self.voices:
            allowed = ", ".join(self.voices)
            raise RequestError(f"voice: '{options.voice}' is unknown; use one of {allowed}", parameter="voice")
        for key, value in options.chunks.items():
            self._check_chunks(f"chunks.{key}", key, value)

    def _check_chunks(self, name: str, key: str, value: Any) -> None:
        if key not in self._chunks:
            raise RequestError(f"{name}: is unknown; use one of {', '.join(self._chunks)}", parameter=name)
        rule = BOOLEAN if key == ADAPTIVE else CHUNK_SIZES
        if not rule.accepts(value):
            raise RequestError(f"{name}: must be {rule.expected}, got {value!r:.100}", parameter=name)

    def open(self, request: TextRequest, options: OmniOptions) -> SpeechFlow:
        """Plan a request that wants sound.

        Sets what the thinker must export in `request.extra_args`; text-only prompts export nothing.

        Raises:
            RequestError: the prompt does not end in an assistant turn, so there is nobody to speak.
        """
        parts = self._parts(request.prompt)
        positions = None
        if parts.rows:
            request.extra_args[EXPORT] = [list(span) for span in parts.rows]
            request.skip_prefix_cache = True
            positions = self._talker_positions(request, parts)
        speech = Speech(
            prompt=request.prompt,
            parts=parts,
            voice=(options.voice or self.default_voice).lower(),
            ids=self._ids,
            sample_rate=SAMPLE_RATE_HZ,
            positions=positions,
        )
        sizes = {**self._chunks, **options.chunks}
        rate = self._frame_rate() if sizes[ADAPTIVE] else 0.0
        return SpeechFlow(speech, text=ChunkSchedule.of(sizes["text"]), frames=ChunkSchedule.of(sizes["frames"], rate))

    def _frame_rate(self) -> float:
        """Frames in a second of sound."""
        vocoder = self._config.code2wav_config
        return SAMPLE_RATE_HZ / math.prod((*vocoder.upsampling_ratios, *vocoder.upsample_rates))

    def room(self, prompt: Sequence[int], options: OmniOptions, limits: Mapping[str, int]) -> Mapping[str, int]:
        """Most tokens the talker may make: what its context holds and code2wav can decode.

        Raises:
            RequestError: nobody speaks in this prompt, it fills the talker, or more frames are asked for than code2wav
                can decode.
        """
        groups = self._config.talker_config.num_code_groups
        most = limits[CODE2WAV] // groups
        wanted = options.sampling.get(TALKER)
        if wanted is not None and wanted.max_tokens is not None and wanted.max_tokens > most:
            raise RequestError(
                f"talker.max_tokens: {wanted.max_tokens} frames of {groups} codes are {wanted.max_tokens * groups} "
                f"codes, and the code2wav stage takes {limits[CODE2WAV]}; use at most {most}",
                parameter="talker.max_tokens",
            )
        length = sum(stop - start for start, stop in self._parts(prompt).user) + TALKER_TAIL
        left = limits[TALKER] - length
        if left < 1:
            raise RequestError(
                f"messages: the user turns and the header are {length} tokens for the talker, whose context holds "
                f'{limits[TALKER]}; shorten them, or ask for modalities ["text"]',
                parameter="messages",
            )
        return {TALKER: min(left, most)}

    def _parts(self, prompt: Sequence[int]) -> Spoken:
        assert self._ids is not None
        parts = find_parts(prompt, self._ids)
        if parts is None:
            raise RequestError(
                "prompt: sound needs a chat prompt that ends in an assistant turn; use chat messages, or end the "
                "prompt with the assistant header of the chat template",
                parameter="prompt",
            )
        return parts

    def decode(self, stage: str, tensor: Any) -> Any:
        """Read a stage's output tensor: a notice of the thinker's rows, frames of the talker, sound of code2wav.

        A refusal of talker or code2wav becomes its text.
        """
        if stage == THINKER:
            return Notice.of(tensor)
        why = refused(tensor)
        return tensor if why is None else why

    def _talker_positions(self, request: TextRequest, parts: Spoken) -> bytes:
        """The talker counts M-RoPE positions over its own prompt: the user segments, moved together."""
        if self._positions is None:
            self._positions = _position_model(self._config)
        thinker, _ = self._positions.get_mrope_input_positions(list(request.prompt), request.features)
        return join_segments(thinker.numpy(), parts.user, TALKER_TAIL)


def join_segments(positions: np.ndarray, segments: Sequence[tuple[int, int]], tail: int) -> bytes:
    """Positions of the segments one after the other, then `tail` text positions; int32 [3, n], row-major."""
    pieces: list[np.ndarray] = []
    after = 0
    for start, stop in segments:
        piece = positions[:, start:stop] - positions[0, start] + after  # a segment starts with a text token
        pieces.append(piece)
        after = int(piece.max()) + 1
    pieces.append(np.broadcast_to(np.arange(after, after + tail), (3, tail)))
    return np.ascontiguousarray(np.concatenate(pieces, axis=1), dtype=np.int32).tobytes()


def _position_model(config: Any) -> Any:
    """vLLM's thinker class without its layers: only its M-RoPE arithmetic is used, which reads nothing but config."""
    from torch import nn
    from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration

    model = Qwen3OmniMoeThinkerForConditionalGeneration.__new__(Qwen3OmniMoeThinkerForConditionalGeneration)
    nn.Module.__init__(model)
    model.config = config.thinker_config
    return model
