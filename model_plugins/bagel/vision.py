"""The ViT (SigLIP, for any number of rows and columns of patches) and the connector to the language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_omni_ext.model_plugins.bagel.sizes import VitSizes


class VitLayer(nn.Module):
    """One encoder layer; every patch attends to every patch of its picture."""

    def __init__(self, sizes: VitSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.hidden)
        self.mlp_norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Encode `[patches, hidden]` of one picture; the shape stays the same."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(1, 2, 0, 3)[None].unbind(1)
        attended = F.scaled_dot_product_attention(query, key, value)[0]
        x = x + self.output(attended.transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class VisionModel(nn.Module):
    """Computes the embeddings of a picture for the language model from its patches."""

    def __init__(self, sizes: VitSizes, hidden: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.patches = nn.Linear(3 * sizes.patch**2, sizes.hidden)
        self.positions = nn.Embedding(sizes.side**2, sizes.hidden)
        self.layers = nn.ModuleList(VitLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.connector_up = nn.Linear(sizes.hidden, hidden)
        self.connector_down = nn.Linear(hidden, hidden)
        self.table = nn.Parameter(torch.empty(sizes.side**2, hidden), requires_grad=False)

    def connect(self, patches: Tensor, places: Tensor) -> Tensor:
        """Return the connector's output for the patches of a picture.

        Args:
            patches: `[n, patch * patch * 3]` in (row, column, channel) order, from -1 to 1.
            places: `[n]` int64, row * side + column of each patch.

        Returns:
            `[n, hidden of the language model]`, without the connector's position embeddings.
        """
        x = self.patches(patches.to(self.patches.weight.dtype)) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.connector_down(F.gelu(self.connector_up(self.norm(x)), approximate="tanh"))

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """Return the embeddings between a picture's markers: the result of `connect` plus position embeddings."""
        return self.connect(patches, places) + self.table[places]
