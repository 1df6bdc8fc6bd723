"""Computes contexts from segments. Branches of a request share their common prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.context import EMPTY, Context
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Segment, Segments, TextSegment, VitSegment


class Prefill:
    """Contexts of one request.

    The latents of a picture are sampled: their noise comes from the request's generator, in the order of first use.

    Attributes:
        generator: the request's generator.
    """

    def __init__(self, model: Bagel, generator: torch.Generator) -> None:
        self._model, self.generator = model, generator
        self._contexts: dict[Segments, Context] = {(): EMPTY}

    def context(self, segments: Segments) -> Context:
        """Return the context after these segments; uses the results of earlier calls again."""
        found = self._contexts.get(segments)
        if found is None:
            found = self._extended(self.context(segments[:-1]), segments[-1])
            self._contexts[segments] = found
        return found

    @torch.inference_mode()
    def _extended(self, context: Context, segment: Segment) -> Context:
        if isinstance(segment, TextSegment):
            return self._with_text(context, segment)
        if isinstance(segment, VitSegment):
            return self._with_patches(context, segment)
        return self._with_latents(context, self.draw_latents(segment.pixels), segment.rows, segment.columns)

    def _with_text(self, context: Context, segment: TextSegment) -> Context:
        model = self._model
        layout = model.llm.text_layout([context], [segment.length])
        out = model.llm(model.text_embeddings(segment.ids), None, layout, [context], hidden=None, keep=True)
        return context.extended(out.layers, segment.length)

    def _with_patches(self, context: Context, segment: VitSegment) -> Context:
        model = self._model
        start, end = model.markers().split(1)
        seen = model.vision(segment.patches.to(model.device), segment.places.to(model.device))
        layout = model.llm.block_layout([context], [segment.length], latents=False)
        out = model.llm(torch.cat((start, seen, end)), None, layout, [context], hidden=None, keep=True)
        return context.extended(out.layers, 1)

    def _with_latents(self, context: Context, latents: Tensor, rows: int, columns: int) -> Context:
        model = self._model
        patch = model.sizes.latent_patch
        cut = latents[:, : rows * patch, : columns * patch]
        places = images.places(rows, columns, model.sizes.latent_side).to(model.device)
        time = model.latents.times(torch.zeros(1, device=model.device))
        gen = model.latents.embed(images.to_tokens(cut, patch), time, places)
        layout = model.llm.block_layout([context], [gen.shape[0] + 2], latents=True)
        out = model.llm(model.markers(), gen, layout, [context], hidden=None, keep=True)
        return context.extended(out.layers, 1)

    @torch.inference_mode()
    def draw_latents(self, pixels: Tensor) -> Tensor:
        """Sample latents of `[3, height, width]`: `[channels, height / downsample, width / downsample]` float32."""
        vae = self._model.vae
        shape = (1, vae.sizes.channels, *(side // vae.sizes.downsample for side in pixels.shape[1:]))
        noise = torch.randn(shape, generator=self.generator)
        device = self._model.device
        return vae.encode(pixels[None].to(device), noise.to(device))[0]
