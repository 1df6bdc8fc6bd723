"""The codec: Transformers' Mimi. It encodes a reference sound, and decodes the frames of a stream in several parts."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, MimiModel
from vllm.config import VllmConfig

from csm.payloads import CodecParams, Encode
from vllm_omni_ext.config.schema import STREAM_IDLE_TIMEOUT_S
from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest, StreamLost

CONTEXT = 32
"""Positions before a part whose transformer output is kept for the convolutions; Mimi's convolutions need 9."""
PREFIX = "codec_model."


@dataclass
class Stream:
    """State between two parts of a stream: the transformer's cache, the embedding of the last frame (`last`), the last
    `CONTEXT` outputs of the transformer (`context`), the number of parts so far, and the time of the last part."""

    cache: DynamicCache
    last: Tensor
    context: Tensor
    parts: int = 0
    used: float = 0.0


@dataclass
class Job:
    """One request: a sound to encode, [samples], or frames of a stream to decode, [frames, codebooks]."""

    input: Tensor
    stream: str = ""
    last: bool = field(default=True)


class CsmCodec(PlainModel):
    """Decodes each part of a stream, or encodes a reference sound, in one step."""

    payloads = Encode
    params = CodecParams

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.codec_model = MimiModel(self.config)
        self.streams: dict[str, Stream] = {}
        self.jobs: dict[str, Job] = {}
        self.idle_s: float = vllm_config.additional_config[STREAM_IDLE_TIMEOUT_S]

    def open(self, request: PlainRequest) -> None:
        part, codebooks, now = request.part, self.config.codebooks, time.monotonic()
        # An API server that is killed sends no end of its streams. A stream that goes on later is sent again.
        self.streams = {name: each for name, each in self.streams.items() if now - each.used <= self.idle_s}
        if request.payload is not None:
            self.jobs[request.req_id] = Job(torch.from_numpy(np.frombuffer(request.payload.samples, np.float32).copy()))
            return
        codes = torch.tensor(request.prompt, dtype=torch.int64).view(-1, codebooks)
        if codes.numel() and not 0 <= codes.min() <= codes.max() < self.config.codebook_size:
            raise ValueError(f"the backbone has made a code that the codec does not have: {int(codes.max())}")
        if part.part == 0:
            empty = next(self.codec_model.parameters()).new_zeros(1, self.config.hidden_size, 0)
            self.streams[part.stream] = Stream(DynamicCache(config=self.config), empty, empty, used=now)
        if (stream := self.streams.get(part.stream)) is None:
            raise StreamLost(f"part {part.part} came for a stream that is not open")
        if stream.parts != part.part:
            raise ValueError(f"part {part.part} of a stream came out of order")
        stream.parts, stream.used = stream.parts + 1, now
        self.jobs[request.req_id] = Job(codes, part.stream, part.last)

    def step(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        return {req_id: Answer(self._answer(self.jobs[req_id]), last=True) for req_id in req_ids}

    def _answer(self, job: Job) -> Tensor:
        device = next(self.codec_model.parameters()).device
        if not job.stream:
            codes = self.codec_model.encode(job.input[None, None].to(device)).audio_codes[0, : self.config.codebooks]
            return codes.T.to("cpu", torch.int32).contiguous()
        return self.decode(job.input.to(device), self.streams[job.stream]).cpu() if len(job.input) else torch.empty(0)

    def decode(self, frames: Tensor, stream: Stream) -> Tensor:
        """Return the samples [n * frame size] of the next frames [n, codebooks] of a stream."""
        codec, hop = self.codec_model, math.prod(self.config.upsampling_ratios)
        embedded = codec.quantizer.decode(frames.T[None])
        both = torch.cat([stream.last, embedded], dim=-1)
        rows = codec.upsample(both)[..., 2 * stream.last.shape[-1] :]
        out = codec.decoder_transformer(rows.transpose(1, 2), past_key_values=stream.cache, use_cache=True)
        context = torch.cat([stream.context, out.last_hidden_state.transpose(1, 2)], dim=-1)
        wave = codec.decoder(context)[0, 0, hop * stream.context.shape[-1] :]
        stream.last, stream.context = embedded[..., -1:], context[..., -CONTEXT:]
        return wave

    def close(self, req_id: str) -> None:
        job = self.jobs.pop(req_id, None)
        if job is not None and job.last:
            self.forget(job.stream)

    def forget(self, stream: str) -> None:
        self.streams.pop(stream, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = {name.removeprefix(PREFIX): tensor for name, tensor in weights if name.startswith(PREFIX)}
        self.codec_model.load_state_dict(own)
        return {name for name, _ in self.named_parameters()}
