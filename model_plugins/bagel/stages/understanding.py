"""The stage `ar`: vLLM's BAGEL, changed so that it reads pictures as the reference does.

Differences of vLLM's class from the reference, each with its correction here:

* vLLM's class resizes pictures to a square, and adds no markers around them. `processor.py` resizes pictures and adds
  markers as in the reference.
* In vLLM's class, each token of a picture has its own position. `get_mrope_input_positions` returns one position for
  all tokens of a picture.
* vLLM's class computes the connector's table of positions. `BagelUnderstanding` loads the table.
* vLLM's class reads the number of ViT layers from a config that is wrong in the release. `BagelUnderstanding` uses the
  number of layers in the weights.
* On a CPU, attention in pictures is causal. `picture_attention.py` makes it full.

For text, vLLM's class equals the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.bagel import BagelForConditionalGeneration
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMRoPE
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_omni_ext.model_plugins.bagel.checkpoint import differences, model_sources
from vllm_omni_ext.model_plugins.bagel.images import bytes_to_pixels, places
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes, CheckpointError
from vllm_omni_ext.model_plugins.bagel.stages.files import checkpoint_directory, model_sizes
from vllm_omni_ext.model_plugins.bagel.stages.picture_attention import PictureAttention
from vllm_omni_ext.model_plugins.bagel.stages.processor import VIT, PictureDummies, PictureInfo, PictureProcessor
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

_AUTOENCODER = ("encoder.", "decoder.")
"""Prefixes of the tensor names in `ae.safetensors`."""


@MULTIMODAL_REGISTRY.register_processor(PictureProcessor, info=PictureInfo, dummy_inputs=PictureDummies)
class BagelUnderstanding(BagelForConditionalGeneration, SupportsMRoPE):
    """vLLM model of the stage `ar`, which generates text from texts and pictures."""

    hf_to_vllm_mapper = WeightsMapper()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        sizes = model_sizes(model_config)
        _correct(model_config.hf_config, sizes)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.sizes = sizes
        self.vit_pos_embed = nn.Module()  # the connector's position embeddings
        table = torch.empty(sizes.vit.side**2, sizes.llm.hidden)
        self.vit_pos_embed.pos_embed = nn.Parameter(table, requires_grad=False)
        tokens = Tokens.from_directory(checkpoint_directory(model_config))
        self._markers = [tokens.image_start, tokens.image_end]
        _attend_inside_pictures(self.language_model.model.layers)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Return M-RoPE positions in which each picture has one position.

        Returns:
            Positions `[3, tokens]` int64 with equal rows, and the delta: the next position less the number of tokens.
        """
        lengths = {feature.mm_position.offset: feature.mm_position.length for feature in mm_features}
        positions: list[int] = []
        position = 0
        while len(positions) < len(input_tokens):
            positions += [position] * lengths.get(len(positions), 1)
            position += 1
        return torch.tensor(positions).expand(3, -1), position - len(input_tokens)

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Return the embeddings of each picture, `[tokens, hidden]`, including its markers."""
        pictures: Any = kwargs.get(VIT)
        return [] if pictures is None else [self._embed(picture) for picture in pictures]

    def _embed(self, picture: Tensor) -> Tensor:
        """Return the embeddings `[tokens, hidden]` of a picture, uint8 `[height, width, 3]`."""
        vit = self.vit_model.vision_model
        table = self.vit_pos_embed.pos_embed
        rows, columns = (side // self.sizes.vit.patch for side in picture.shape[:2])
        where = places(rows, columns, self.sizes.vit.side).to(table.device)
        pixels = bytes_to_pixels(picture.to(table.device)).to(table.dtype)
        patches = vit.embeddings.patch_embedding(pixels[None]).flatten(2).transpose(1, 2)
        encoded = vit.encoder(patches + vit.embeddings.position_embedding(where), return_all_hidden_states=False)
        seen = self.connector(vit.post_layernorm(encoded))[0] + table[where]
        markers = torch.tensor(self._markers, device=table.device)
        start, end = self.language_model.model.embed_input_ids(markers).split(1)
        return torch.cat((start, seen.to(start.dtype), end))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights that read texts and pictures.

        The weights that generate pictures, and the autoencoder, are in the same files and are not loaded.

        Raises:
            CheckpointError: a tensor is missing or unknown.
        """
        return super().load_weights(checked(weights, self.sizes))


def checked(weights: Iterable[tuple[str, Tensor]], sizes: BagelSizes) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for texts and input pictures; leave out those that generate pictures, and the autoencoder.

    Args:
        weights: names and tensors of the checkpoint's files.
        sizes: sizes of the checkpoint.

    Raises:
        CheckpointError: a tensor is missing or unknown; raised after the last tensor.
    """
    sources = model_sources(sizes)
    known = {name for names in sources.values() for name in names}
    missing = {
        name
        for ours, names in sources.items()
        if not ours.startswith("latents.") and ".gen." not in ours
        for name in names
    }
    read, unknown = set(missing), set[str]()
    for name, tensor in weights:
        if name in read:
            missing.discard(name)
            yield name, tensor
        elif name not in known and not name.startswith(_AUTOENCODER):
            unknown.add(name)
    if missing or unknown:
        raise CheckpointError(f"the checkpoint's files: {differences(missing, unknown)}")


def _correct(config: Any, sizes: BagelSizes) -> None:
    """Replace sizes in the config by the weights' sizes, in place, and turn on the ViT, which reads pictures."""
    config.visual_und = True
    config.vit_max_num_patch_per_side = sizes.vit.side
    config.vit_config.num_hidden_layers = sizes.vit.layers
    config.vit_config.image_size = sizes.vit.side * sizes.vit.patch


def _attend_inside_pictures(layers: Sequence[nn.Module]) -> None:
    """Set a backend with full attention inside pictures in layers for which vLLM has chosen its CPU backend."""
    for layer in layers:
        attention: Any = None if isinstance(layer, PPMissingLayer) else layer.self_attn.attn
        if attention is not None and attention.attn_backend is CPUAttentionBackend:
            attention.attn_backend = PictureAttention
