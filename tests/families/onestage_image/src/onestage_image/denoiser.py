"""The model: noise becomes a picture in some steps, guided by the mean embedding of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from onestage_image.payloads import DenoiseParams, Paint
from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest
from vllm_omni_ext.wire.envelope import StageProgress

CHANNELS = 3


@dataclass
class Picture:
    """A picture on its way: `noisy` is float32 [height, width, 3]."""

    noisy: Tensor
    condition: Tensor
    steps: int
    previews: frozenset[int]
    done: int = 0


class Denoiser(PlainModel):
    """Holds the running pictures by the name of their request."""

    payloads = Paint
    params = DenoiseParams

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        size = config.hidden_size
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, size))
        self.inward = nn.Parameter(torch.empty(CHANNELS, size))
        self.outward = nn.Parameter(torch.empty(size, CHANNELS))
        self.time = nn.Parameter(torch.empty(size))
        self.pictures: dict[str, Picture] = {}

    def open(self, request: PlainRequest) -> None:
        """Draw the noise."""
        paint, steps = request.payload, request.params.steps
        if not paint.tokens or max(paint.tokens) >= len(self.embedding):
            raise ValueError("the prompt has no tokens, or some that the model does not know")
        generator = torch.Generator().manual_seed(paint.seed)
        noise = torch.randn(paint.height, paint.width, CHANNELS, generator=generator)
        previews = frozenset((i + 1) * steps // (paint.previews + 1) for i in range(paint.previews))
        condition = self.embedding[paint.tokens].mean(0)
        self.pictures[request.req_id] = Picture(noise.to(condition), condition, steps, previews)

    def step(self, req_ids: Sequence[str]) -> dict[str, Answer]:
        """Take a little noise out of each picture."""
        return {req_id: self._step(self.pictures[req_id]) for req_id in req_ids}

    def _step(self, picture: Picture) -> Answer:
        picture.done += 1
        part = picture.done / picture.steps
        inner = torch.tanh(picture.noisy @ self.inward + picture.condition + self.time * part)
        picture.noisy = picture.noisy + inner @ self.outward / picture.steps
        if picture.done == picture.steps:
            return Answer(_pixels(picture.noisy), last=True)
        if picture.done in picture.previews:
            return Answer(_pixels(picture.noisy))
        return Answer(StageProgress(picture.done, picture.steps))

    def close(self, req_id: str) -> None:
        """Forget a picture."""
        self.pictures.pop(req_id, None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the checkpoint's tensors."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def _pixels(picture: Tensor) -> Tensor:
    return ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
