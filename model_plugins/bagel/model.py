"""The whole model: language model, ViT, autoencoder, and the projections between latents and the language model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.bagel.llm import LanguageModel
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens
from vllm_omni_ext.model_plugins.bagel.vae import Autoencoder
from vllm_omni_ext.model_plugins.bagel.vision import VisionModel

TIME_CHANNELS = 256
_LONGEST_PERIOD = 10000.0


class LatentProjections(nn.Module):
    """Projections of latent tokens into and out of the language model."""

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        hidden = sizes.llm.hidden
        self.enter = nn.Linear(sizes.token_channels, hidden)
        self.leave = nn.Linear(hidden, sizes.token_channels)
        self.time_up = nn.Linear(TIME_CHANNELS, hidden)
        self.time_down = nn.Linear(hidden, hidden)
        self.table = nn.Parameter(torch.empty(sizes.latent_side**2, hidden), requires_grad=False)

    def times(self, times: Tensor) -> Tensor:
        """Return the embeddings `[n, hidden]` of times `[n]` float32 from 0 (image) to 1 (noise)."""
        half = torch.arange(TIME_CHANNELS // 2, dtype=torch.float32, device=times.device)
        angles = times[:, None] * torch.exp(-math.log(_LONGEST_PERIOD) / (TIME_CHANNELS // 2) * half)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.time_up.weight.dtype)
        return self.time_down(F.silu(self.time_up(waves)))

    def embed(self, tokens: Tensor, times: Tensor, places: Tensor) -> Tensor:
        """Return the embeddings `[n, hidden]` of an image's latent tokens, without the two marker tokens around them.

        Args:
            tokens: latent tokens, `[n, token_channels]` float32.
            times: embedded times, `[n, hidden]`, or `[1, hidden]` for all tokens.
            places: indices in the table of latent positions, `[n]` int64.
        """
        return self.enter(tokens.to(self.enter.weight.dtype)) + times + self.table[places]


class Bagel(nn.Module):
    """The whole model, without any request state. The autoencoder is float32; all other parts share one dtype.

    Attributes:
        tokens: the tokenizer; set by the loader of the weights.
    """

    tokens: Tokens

    def __init__(self, sizes: BagelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.llm = LanguageModel(sizes.llm)
        self.vision = VisionModel(sizes.vit, sizes.llm.hidden)
        self.latents = LatentProjections(sizes)
        self.vae = Autoencoder(sizes.vae)

    @property
    def device(self) -> torch.device:
        return self.llm.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all parts except the autoencoder."""
        return self.llm.embed.weight.dtype

    def text_embeddings(self, ids: list[int] | tuple[int, ...]) -> Tensor:
        """Return the embeddings `[n, hidden]` of token ids."""
        return self.llm.embed(torch.tensor(ids, device=self.device))

    def markers(self) -> Tensor:
        """Return the embeddings of the two marker tokens (start, end) around every image, `[2, hidden]`."""
        return self.text_embeddings((self.tokens.image_start, self.tokens.image_end))
