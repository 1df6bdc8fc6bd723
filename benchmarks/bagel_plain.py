"""BAGEL as a plain loop in torch: one request and one guidance branch at a time, copied contexts, weights in float32.

The code follows the reference implementation, without optimizations. `bagel_steps.py` compares its speed with the
package's model. Tests use it for the expected results of branches, thoughts and guidance.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters
from vllm_omni_ext.model_plugins.bagel.prompts import THINK_THEN_DRAW, Part, Prompts


@dataclass
class Cache:
    """KV cache of one sequence: keys and values by layer (None: empty), and the next RoPE position."""

    keys: list[Tensor | None]
    values: list[Tensor | None]
    position: int = 0


@dataclass
class Trace:
    """Intermediate results of a run.

    Attributes:
        x: the latent before each denoise step.
        v: the velocity of each denoise step, after guidance.
        latent: the final latent.
        thought: the text that the model has generated before the picture; None without thinking.
        cond: cache of the conditional branch.
    """

    x: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    latent: Tensor | None = None
    thought: str | None = None
    cond: Cache | None = None


class Plain:
    """The plain model.

    Args:
        directory: the checkpoint.
        bagel: the package's model of the same checkpoint, whose autoencoder, tokenizer and ViT are used here.
    """

    def __init__(self, directory: Path, bagel: Bagel) -> None:
        self.w = {name: tensor.float() for name, tensor in load_file(directory / "ema.safetensors").items()}
        self.llm = json.loads((directory / "llm_config.json").read_text())
        self.bagel = bagel
        self.prompts = Prompts(bagel.tokens, bagel.sizes)
        self.layers = self.llm["num_hidden_layers"]

    def cache(self) -> Cache:
        return Cache([None] * self.layers, [None] * self.layers)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.llm["rms_norm_eps"])
        return self.w[f"{name}.weight"] * (x * scale)

    def routed(self, x: Tensor, gen: Tensor, what: Any, name: str) -> Tensor:
        """Apply a layer with the `_moe_gen` weights to latent tokens, and with the plain weights to all other tokens.

        Args:
            gen: [n], bool, True for latent tokens.
            what: the layer: `linear` or `norm`.
            name: prefix of the weights' names, with `{}` in place of `_moe_gen`.
        """
        out = what(x, name.format(""))
        if gen.any():
            out = out.clone()
            out[gen] = what(x[gen], name.format("_moe_gen"))
        return out

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        size = x.shape[-1]
        rates = 1.0 / self.llm["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        angles = (positions.float()[:, None] * rates).repeat(1, 2)[:, None]
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return x * angles.cos() + turned * angles.sin()

    @torch.inference_mode()
    def forward(self, x: Tensor, gen: Tensor, positions: Tensor, cache: Cache, *, causal: bool, keep: bool) -> Tensor:
        """Compute `x` [n, hidden] after the tokens in the cache; return the last hidden states [n, hidden].

        Args:
            gen: [n], bool, True for latent tokens (see `routed`).
            positions: RoPE positions [n].
            causal: whether a token attends only to earlier ones among `x`.
            keep: append keys and values to the cache.
        """
        for at in range(self.layers):
            layer = f"language_model.model.layers.{at}"
            h = self.routed(x, gen, self.norm, layer + ".input_layernorm{}")
            q, k, v = (self.routed(h, gen, self.linear, f"{layer}.self_attn.{part}_proj{{}}") for part in "qkv")
            heads = [part.unflatten(-1, (-1, self.bagel.sizes.llm.head_dim)) for part in (q, k, v)]
            q = self.rope(self.routed(heads[0], gen, self.norm, layer + ".self_attn.q_norm{}"), positions)
            k = self.rope(self.routed(heads[1], gen, self.norm, layer + ".self_attn.k_norm{}"), positions)
            v = heads[2]
            before_k, before_v = cache.keys[at], cache.values[at]
            if before_k is not None and before_v is not None:
                k, v = torch.cat((before_k, k)), torch.cat((before_v, v))
            if keep:
                cache.keys[at], cache.values[at] = k, v
            x = x + self.routed(self.attend(q, k, v, causal), gen, self.linear, layer + ".self_attn.o_proj{}")
            h = self.routed(x, gen, self.norm, layer + ".post_attention_layernorm{}")
            gate = self.routed(h, gen, self.linear, layer + ".mlp{}.gate_proj")
            up = self.routed(h, gen, self.linear, layer + ".mlp{}.up_proj")
            x = x + self.routed(F.silu(gate) * up, gen, self.linear, layer + ".mlp{}.down_proj")
        return self.routed(x, gen, self.norm, "language_model.model.norm{}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        shared = q.shape[1] // k.shape[1]
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
        mask = mask.tril(k.shape[0] - q.shape[0]) if causal else mask
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        out = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)), attn_mask=mask)
        return out.transpose(0, 1).flatten(1)

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.w["language_model.model.embed_tokens.weight"][list(ids)]

    def add_text(self, cache: Cache, text: str) -> None:
        ids = self.prompts.text(text).ids
        positions = torch.arange(cache.position, cache.position + len(ids))
        self.forward(self.embed(ids), torch.zeros(len(ids)).bool(), positions, cache, causal=True, keep=True)
        cache.position += len(ids)

    def block(self, inside: Tensor, cache: Cache, *, latents: bool, keep: bool) -> Tensor:
        """Compute the tokens `inside` [n, hidden] of a picture between two markers, all at one RoPE position.

        Args:
            latents: whether `inside` are latent tokens.
            keep: append keys and values to the cache.
        """
        tokens = self.bagel.tokens
        x = torch.cat((self.embed([tokens.image_start]), inside, self.embed([tokens.image_end])))
        gen = torch.full((len(x),), latents)
        gen[0] = gen[-1] = False
        return self.forward(x, gen, torch.full((len(x),), cache.position), cache, causal=False, keep=keep)

    def add_picture(self, cache: Cache, picture: Image.Image, generator: torch.Generator) -> tuple[int, int]:
        picture = images.resize(images.to_rgb(picture), self.bagel.sizes.vae_resize)
        pixels = images.to_pixels(picture)
        noise = torch.randn(1, 16, pixels.shape[1] // 8, pixels.shape[2] // 8, generator=generator)
        with torch.inference_mode():
            latents = self.bagel.vae.encode(pixels[None], noise)[0]
        rows, columns = latents.shape[1] // 2, latents.shape[2] // 2
        tokens = torch.einsum("chpwq->hwpqc", latents.reshape(16, rows, 2, columns, 2)).reshape(rows * columns, 64)
        self.block(self.latent(tokens, 0.0, rows, columns), cache, latents=True, keep=True)
        cache.position += 1
        segment = self.prompts.patches(picture)
        with torch.inference_mode():
            self.block(self.bagel.vision(segment.patches, segment.places), cache, latents=False, keep=True)
        cache.position += 1
        return picture.height, picture.width

    def latent(self, x: Tensor, time: float, rows: int, columns: int) -> Tensor:
        table = self.w["latent_pos_embed.pos_embed"]
        side = math.isqrt(table.shape[0])
        places = torch.tensor([row * side + column for row in range(rows) for column in range(columns)])
        rates = torch.exp(-math.log(10000) * torch.arange(128).float() / 128)
        waves = torch.cat((torch.cos(time * rates), torch.sin(time * rates)))[None]
        embedded = self.linear(F.silu(self.linear(waves, "time_embedder.mlp.0")), "time_embedder.mlp.2")
        return self.linear(x, "vae2llm") + embedded + table[places]

    def think(self, cache: Cache, limit: int) -> str:
        cache, ids = copy.deepcopy(cache), [self.bagel.tokens.start]
        while True:
            position = torch.tensor([cache.position])
            x = self.forward(self.embed(ids[-1:]), torch.zeros(1).bool(), position, cache, causal=True, keep=True)
            cache.position += 1
            next_id = int((x @ self.w["language_model.lm_head.weight"].T).argmax())
            if next_id == self.bagel.tokens.end or len(ids) == limit:
                return self.bagel.tokens.reply(ids)
            ids.append(next_id)

    def velocity(self, x: Tensor, time: float, grid: tuple[int, int], cache: Cache) -> Tensor:
        h = self.block(self.latent(x, time, *grid), cache, latents=True, keep=False)
        return self.linear(h[1:-1], "llm2vae")

    def run(self, parts: Sequence[Part], p: ImageParameters) -> Trace:
        """Compute an image up to its latent; return all intermediate results.

        Args:
            parts: texts and pictures of the prompt, in order.
            p: the request's parameters.
        """
        trace, generator = Trace(), torch.Generator("cpu").manual_seed(p.seed)
        cond = self.cache()
        img = self.cache()
        if p.think:
            self.add_text(cond, THINK_THEN_DRAW)
            self.add_text(img, THINK_THEN_DRAW)
        text, size = self.cache(), None
        for part in parts:
            if isinstance(part, str):
                text = copy.deepcopy(cond)
                self.add_text(cond, part)
                self.add_text(img, part)
            else:
                size = self.add_picture(cond, part, generator)
                text = copy.deepcopy(cond)
        if p.think:
            trace.thought = self.think(cond, p.max_think_token_n)
            self.add_text(cond, trace.thought)
        trace.cond = cond
        height, width = p.image_size(self.bagel.sizes, size)
        self.denoise(trace, p, (height // 16, width // 16), generator, cond, text, img)
        return trace

    def denoise(
        self,
        trace: Trace,
        p: ImageParameters,
        grid: tuple[int, int],
        generator: torch.Generator,
        cond: Cache,
        text: Cache,
        img: Cache,
    ) -> None:
        x = torch.randn(grid[0] * grid[1], 64, generator=generator)
        points = torch.linspace(1, 0, p.num_timesteps)
        points = p.timestep_shift * points / (1 + (p.timestep_shift - 1) * points)
        for t, after in itertools.pairwise(points):
            trace.x.append(x)
            v = self.velocity(x, float(t), grid, cond)
            if p.cfg_text_scale > 1 and t > p.cfg_interval[0] and t <= p.cfg_interval[1]:
                v = self.guided(p, v, x, float(t), grid, text, img)
            trace.v.append(v)
            x = x - v * (t - after)
        trace.latent = x

    def guided(
        self, p: ImageParameters, v: Tensor, x: Tensor, t: float, grid: tuple[int, int], text: Cache, img: Cache
    ) -> Tensor:
        v_text = self.velocity(x, t, grid, text)
        g = v_text + p.cfg_text_scale * (v - v_text)
        if p.cfg_renorm_type == "text_channel":
            g = g * (v.norm(dim=-1, keepdim=True) / (g.norm(dim=-1, keepdim=True) + 1e-8)).clamp(p.cfg_renorm_min, 1.0)
        if p.cfg_img_scale > 1:
            v_img = self.velocity(x, t, grid, img)
            g = v_img + p.cfg_img_scale * (g - v_img)
        if p.cfg_renorm_type == "global":
            g = g * (v.norm() / (g.norm() + 1e-8)).clamp(p.cfg_renorm_min, 1.0)
        if p.cfg_renorm_type == "channel":
            g = g * (v.norm(dim=-1, keepdim=True) / (g.norm(dim=-1, keepdim=True) + 1e-8)).clamp(p.cfg_renorm_min, 1.0)
        return g
