"""Computes contexts (keys and values) from the segments of a prompt (`prompts.py`).

The branches of a request share the context of their common beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.context import EMPTY, Context
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.prompts import Segment, Segments, TextSegment, VaeSegment, VitSegment


class Prefill:
    """Computes and caches the contexts of one request's prompts.

    The latents of an input picture are sampled from the autoencoder's distribution, with noise from the request's
    generator. The order of the `context` calls therefore determines the noise.

    Attributes:
        generator: the request's generator.
    """

    def __init__(self, model: Bagel, generator: torch.Generator) -> None:
        self._model, self.generator = model, generator
        self._contexts: dict[Segments, Context] = {(): EMPTY}

    def context(self, segments: Segments) -> Context:
        """Return the context of a prompt with these segments; contexts of earlier calls are reused."""
        found = self._contexts.get(segments)
        if found is None:
            found = self._extended(self.context(segments[:-1]), segments[-1])
            self._contexts[segments] = found
        return found

    @torch.inference_mode()
    def _extended(self, context: Context, segment: Segment) -> Context:
        model, gen, positions = self._model, None, 1
        if isinstance(segment, TextSegment):
            und, positions = model.text_embeddings(segment.ids), segment.length
            layout = model.llm.text_layout([context], [segment.length])
        elif isinstance(segment, VitSegment):
            start, end = model.markers().split(1)
            seen = model.vision(segment.patches.to(model.device), segment.places.to(model.device))
            und = torch.cat((start, seen, end))
            layout = model.llm.block_layout([context], [segment.length], latents=False)
        else:
            und, gen = model.markers(), self._latent_embeddings(segment)
            layout = model.llm.block_layout([context], [segment.length], latents=True)
        out = model.llm(und, gen, layout, [context], hidden=None, keep=True)
        return context.extended(out.layers, positions)

    def _latent_embeddings(self, segment: VaeSegment) -> Tensor:
        model, rows, columns = self._model, segment.rows, segment.columns
        patch = model.sizes.latent_patch
        cut = self.draw_latents(segment.pixels)[:, : rows * patch, : columns * patch]
        places = images.places(rows, columns, model.sizes.latent_side).to(model.device)
        time = model.latents.times(torch.zeros(1, device=model.device))
        return model.latents.embed(images.to_patches(cut, patch), time, places)

    @torch.inference_mode()
    def draw_latents(self, pixels: Tensor) -> Tensor:
        """Sample the latents of a picture.

        Args:
            pixels: `[3, height, width]` from -1 to 1.

        Returns:
            Latents `[channels, height / downsample, width / downsample]` float32.
        """
        vae = self._model.vae
        shape = (1, vae.sizes.channels, *(side // vae.sizes.downsample for side in pixels.shape[1:]))
        noise = torch.randn(shape, generator=self.generator)
        device = self._model.device
        return vae.encode(pixels[None].to(device), noise.to(device))[0]
