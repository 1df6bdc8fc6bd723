"""The model: each token is a tone of 20 ms, and the wave goes on without a jump from one tone to the next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from plain_tts.payloads import SAMPLE_RATE, TONE, ToneParams, Tones
from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest


@dataclass
class Speaking:
    """One part of a stream, and how many of its tokens have been spoken."""

    stream: str
    tokens: list[int]
    pitch: float
    volume: float
    last: bool
    done: int = 0


class Voicebox(PlainModel):
    """Keeps the phase of each stream between its parts."""

    payloads = Tones
    params = ToneParams

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.empty(vllm_config.model_config.hf_config.vocab_size))
        self.parts: dict[str, Speaking] = {}
        self.phases: dict[str, float] = {}

    def open(self, request: PlainRequest) -> None:
        """Begin a part; the first part of a stream begins with phase 0."""
        part, tokens = request.part, list(request.prompt)
        if part is None:
            raise ValueError("the voicebox takes parts of streams only")
        if any(token >= len(self.frequencies) for token in tokens):
            raise ValueError("the model does not know some of the tokens")
        if part.part == 0:
            self.phases[part.stream] = 0.0
        elif part.stream not in self.phases:
            raise ValueError("an earlier part of the stream is missing")
        pitch, volume = request.payload.pitch, request.params.volume
        self.parts[request.req_id] = Speaking(part.stream, tokens, pitch, volume, part.last)

    def step(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        """Speak one token of each part."""
        return {req_id: self._step(self.parts[req_id]) for req_id in req_ids}

    def _step(self, part: Speaking) -> Answer:
        wave = torch.zeros(0)
        if part.done < len(part.tokens):
            per_sample = 2 * math.pi * part.pitch * float(self.frequencies[part.tokens[part.done]]) / SAMPLE_RATE
            phases = self.phases[part.stream] + per_sample * torch.arange(TONE, dtype=torch.float64)
            wave = (part.volume * torch.sin(phases)).float()
            self.phases[part.stream] += per_sample * TONE
            part.done += 1
        return Answer(wave, last=part.done == len(part.tokens))

    def close(self, req_id: str) -> None:
        """Forget a part, and its stream if it was the last one."""
        part = self.parts.pop(req_id, None)
        if part is not None and part.last:
            self.phases.pop(part.stream, None)

    def forget(self, stream: str) -> None:
        """Forget a stream."""
        self.phases.pop(stream, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the checkpoint's frequencies, in Hz by token id."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded
