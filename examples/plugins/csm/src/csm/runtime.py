"""The family's code in an API server: the flow of an utterance, and the conversion of requests to utterances."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from csm.payloads import BACKBONE, CODEC, FRAME, Encode, Prompt
from vllm_omni_ext.config.checks import ADAPTIVE
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import CodecError, CodecStream
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.flow import Action, Emit, Fail, Finished, Open, Produced, Submit
from vllm_omni_ext.plugins.http import SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import StageError

MARKS = "<|begin_of_text|>", "<|end_of_text|>"
REFERENCE = "reference"
"""Name of the codec's stream that encodes the reference sound."""


class Fields(BaseModel):
    """Fields of a request."""

    model_config = ConfigDict(extra="forbid")

    voice: str | None = Field(
        None, pattern="^[0-9]$", validation_alias=AliasChoices("voice", "speaker"), description="number of the speaker"
    )


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """The text to speak, as ids, and an optional reference sound (float32 [samples]) with the ids of its text."""

    text: list[int]
    reference: np.ndarray | None = None
    reference_text: tuple[int, ...] = ()


class CsmFlow:
    """Flow of an utterance: [reference sound -> codec ->] text -> backbone -> frames -> codec -> sound."""

    stages = frozenset((BACKBONE, CODEC))
    outputs = frozenset(("audio",))

    def __init__(self, utterance: Utterance, frames: ChunkSchedule, *, sample_rate: int, end: list[int]) -> None:
        self._utterance, self._end, self._rate = utterance, end, sample_rate
        self._audio: list[list[int]] = []
        self._sound = CodecStream(CODEC, frames, sample_rate)

    def begin(self) -> list[Action]:
        if self._utterance.reference is None:
            return [self._open()]
        samples = np.ascontiguousarray(self._utterance.reference, np.float32).tobytes()
        return [Submit(stage=CODEC, stream=REFERENCE, payload=Encode(samples=samples))]

    def _open(self) -> Open:
        made = self._sound.frames.between(0, self._sound.frames.count).tolist()
        text = [*self._utterance.reference_text, *[FRAME] * len(self._audio), *self._utterance.text]
        return Open(
            stage=BACKBONE,
            prompt=[0] * len(text) + [frame[0] for frame in made],
            payload=Prompt(text=text, audio=self._audio, frames=made),
            done=len(made),
            **self._sound.joined,
        )

    def handle(self, event: Produced) -> list[Action]:
        reference = event.stream == REFERENCE
        if isinstance(event.payload, StageError):
            reason = event.payload.reason
            return [Fail(reason, status=400, parameter="ref_audio") if reference else Fail(reason)]
        if event.finish in ("abort", "error"):
            return [Fail(f"stage '{event.stage}' has ended the request: {event.finish}")]
        if reference:
            self._audio = [*event.payload.tolist(), self._end]
            return [self._open()]
        return self._on_backbone(event) if event.stage == BACKBONE else self._on_codec(event)

    def _on_backbone(self, event: Produced) -> list[Action]:
        last = event.finish is not None
        part = self._sound.take(event.payload, last=last, at=event.at, load=event.load)
        if last and not self._sound.frames.count:
            empty = np.zeros(0, np.float32)
            return [Emit(AudioChunk(samples=empty, sample_rate=self._rate, note="the model made no frame")), Finished()]
        return [] if part is None else [part]

    def _on_codec(self, event: Produced) -> list[Action]:
        try:
            piece = self._sound.receive(event)
        except CodecError as error:
            return [Fail(str(error))]
        if piece is None:  # after a loss: the client has these samples
            return []
        frames = self._sound.frames.between(0, piece.frames)
        sound = AudioChunk(samples=piece.samples, sample_rate=self._rate, frames=frames, last=piece.last)
        return [Emit(sound), Finished()] if piece.last else [Emit(sound)]

    def replay(self, stage: str) -> list[Action]:
        return [self._open() if stage == BACKBONE else self._sound.again()]

    def replay_stream(self, stage: str, stream: str) -> list[Action]:
        return self.begin()


class Runtime:
    """The family's `ModelRuntime`: plans a `CsmFlow` for each request."""

    fields = Fields

    def __init__(self, context: RuntimeContext) -> None:
        self.config = context.hf_config
        self._chunks = {**context.chunks, ADAPTIVE: context.chunks.get(ADAPTIVE, True)}
        self._most = context.limits.get(BACKBONE, 0)

    def capabilities(self) -> Capabilities:
        card = {"voices": [str(number) for number in range(10)], "default_voice": "0"}
        routes = {"audio": CsmFlow.stages}
        return Capabilities(modalities=("audio",), default_modalities=("audio",), routes=routes, card=card)

    def validate(self, options: RequestOptions) -> None:
        pass

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        utterance = request.data or Utterance(text=list(request.prompt))
        sizes, codec = {**self._chunks, **options.chunks}, self.config.codec_config
        rate = codec.frame_rate if sizes[ADAPTIVE] else 0.0
        frames = ChunkSchedule.of(sizes["frames"], rate, streamed=options.streamed or bool(options.chunks))
        end = [self.config.codebook_eos_token_id] * self.config.num_codebooks
        flow = CsmFlow(utterance, frames, sample_rate=codec.sampling_rate, end=end)
        return Planned(flow=flow)

    def decode(self, stage: str, tensor: Any) -> Any:
        return tensor.numpy()


class Http(HttpSurface):
    """Chat, which speaks the last message, and `/v1/audio/speech` with a reference sound."""

    apis = (SPEECH,)
    speech_stage = BACKBONE
    speech_fields = ("ref_audio", "ref_text")

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        body.chat_template_kwargs = {**(body.chat_template_kwargs or {}), "speaker": options.fields.get("voice") or "0"}
        return replace(options, modalities=("audio",))

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        if not body.input.strip():
            raise RequestError("input: there is nothing to speak", parameter="input")
        if (body.ref_audio is None) != (body.ref_text is None):
            raise RequestError("ref_text: ref_audio and ref_text need each other", parameter="ref_text")
        config, speaker = server.runtime.config, options.fields.get("voice") or "0"
        text = await self._ids(f"[{speaker}]{body.input}", server)
        if body.ref_audio is None:
            return Rendered(data=Utterance(text=text), input_tokens=len(text))
        sound = await server.sound(body.ref_audio, rate=config.codec_config.sampling_rate, field="ref_audio")
        before = await self._ids(f"[{speaker}]{body.ref_text}", server)
        return Rendered(
            data=Utterance(text=text, reference=sound, reference_text=tuple(before)),
            input_tokens=len(before) + len(text),
        )

    async def _ids(self, text: str, server: OmniServer) -> list[int]:
        begin, end = [await server.tokenize(mark) for mark in MARKS]
        return [*begin, *await server.tokenize(text, special=False), *end]
