"""The part of the family in an API server."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from plain_tts.family import VOICEBOX
from plain_tts.payloads import SAMPLE_RATE, Tones
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import AUDIO
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.flow import Action, Emit, Fail, Finished, Produced, Submit
from vllm_omni_ext.plugins.http import SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import StageError

VOICES = {"tenor": 1.0, "bass": 0.5}
"""Factors of all frequencies."""

PART_TOKENS = 8
"""Most tokens of a part."""


class Fields(BaseModel):
    """Fields of a request."""

    model_config = ConfigDict(extra="forbid")

    voice: str | None = None


class SpeechFlow:
    """Sends the text in parts, each when the one before it has been answered."""

    stages = frozenset((VOICEBOX,))
    outputs = frozenset((AUDIO,))

    def __init__(self, tokens: list[int], tones: Tones) -> None:
        self._tokens = tokens
        self._tones = tones
        self._part = self._sent = 0
        self._emitted = self._again = 0

    def begin(self) -> list[Action]:
        """Send the first part."""
        return [self._submit(self._tokens[:PART_TOKENS])]

    def handle(self, event: Produced) -> list[Action]:
        """Send new samples to the client, and the next part at the end of one."""
        if isinstance(event.payload, StageError):
            return [Fail(event.payload.reason)]
        samples = event.payload
        known = min(self._again, len(samples))
        self._again -= known
        new = samples[known:]
        self._emitted += len(new)
        ended = event.finish is not None and self._sent == len(self._tokens)
        actions: list[Action] = []
        if len(new) or ended:
            actions.append(Emit(AudioChunk(samples=new, sample_rate=SAMPLE_RATE, last=ended)))
        if ended:
            return [*actions, Finished()]
        if event.finish is not None:
            self._part += 1
            actions.append(self._submit(self._tokens[self._sent : self._sent + PART_TOKENS]))
        return actions

    def replay(self, stage: str) -> list[Action]:
        """Send everything sent so far as one part, and leave out the samples that the client has."""
        sent, self._sent, self._part, self._again = self._sent, 0, 0, self._emitted
        return [self._submit(self._tokens[:sent])]

    def _submit(self, tokens: list[int]) -> Submit:
        self._sent += len(tokens)
        last = self._sent == len(self._tokens)
        return Submit(stage=VOICEBOX, part=self._part, prompt=tokens, payload=self._tones, last=last)


class Runtime:
    """Plans speech."""

    fields = Fields

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    def capabilities(self) -> Capabilities:
        """Sound only."""
        return Capabilities(
            modalities=(AUDIO,),
            default_modalities=(AUDIO,),
            routes={AUDIO: frozenset((VOICEBOX,))},
            card={"voices": sorted(VOICES)},
        )

    def validate(self, options: RequestOptions) -> None:
        """Check the voice."""
        voice = options.fields.get("voice") or "tenor"
        if voice not in VOICES:
            known = ", ".join(sorted(VOICES))
            raise RequestError(f"voice: there is no '{voice}'; use one of {known}", parameter="voice")

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Plan one utterance."""
        if not request.prompt:
            raise RequestError("input: must not be empty", parameter="input")
        tones = Tones(pitch=VOICES[options.fields.get("voice") or "tenor"])
        return Planned(flow=SpeechFlow(list(request.prompt), tones))

    def decode(self, stage: str, tensor: Any) -> Any:
        """Samples as a numpy array."""
        return tensor.numpy()


class Http(HttpSurface):
    """Chat, and the API of speech."""

    apis = (SPEECH,)

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Read a body of `/v1/audio/speech`."""
        return Rendered(prompt=await server.tokenize(body.input, special=False))
