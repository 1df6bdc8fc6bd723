"""Facts about a checkpoint's stages: lengths, cache sizes, weights. Pure data: no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Weights of a stage that are treated alike.

    Attributes:
        elements: number of elements that the engine holds in its own dtype, regardless of the checkpoint's dtype.
        stored_bytes: size of tensors that keep the checkpoint's dtype, such as quantized weights.
        split: tensor parallelism divides these weights; otherwise every device of a replica holds all of them.
        quantizable: the engine argument `quantization` makes them smaller.
    """

    name: str
    elements: int
    stored_bytes: int = 0
    split: bool = True
    quantizable: bool = False


@dataclass(frozen=True, kw_only=True)
class EncoderMemory:
    """Memory of vLLM's profile run with the largest picture or video.

    Attributes:
        image_tokens: tokens of the largest picture.
        most_images: tokens of the largest video, in units of the largest picture, if a sequence may be that long.
        token_bytes: activations for each of these tokens that every device of a replica holds.
        split_token_bytes: activations for each token that tensor parallelism divides.
        output_elements: elements of the encoder's output for one token.
    """

    image_tokens: int
    most_images: int
    token_bytes: int
    split_token_bytes: int
    output_elements: int


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Needs of one replica of a stage on a CUDA device, as sizes that do not depend on engine arguments.

    Attributes:
        kv_layers, kv_heads, kv_head_dim: shape of the KV cache of one token; 0 layers = no KV cache.
        step_elements: activations for each token of a step that every device of a replica holds.
        split_step_elements: activations for each token of a step that tensor parallelism divides.
        pass_elements: activations of a step, independent of the number of its tokens.
        vocabulary: columns of the logits; 0 = no logits.
        sequence_elements: buffers for each of `max_num_seqs` sequences.
        graph_layers: layers that vLLM captures in CUDA graphs.
        recorded_bytes: CUDA graphs that the model records itself.
        library_bytes: kernels and workspaces of libraries beyond those of any stage.
    """

    weights: tuple[WeightPart, ...]
    kv_layers: int = 0
    kv_heads: int = 0
    kv_head_dim: int = 0
    step_elements: int = 0
    split_step_elements: int = 0
    pass_elements: int = 0
    vocabulary: int = 0
    sequence_elements: int = 0
    graph_layers: int = 0
    recorded_bytes: int = 0
    library_bytes: int = 0
    encoder: EncoderMemory | None = None


StoredTensors = Mapping[str, tuple[str, int, int]]
"""Tensors of a checkpoint by name: dtype as safetensors writes it, number of elements, bytes."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts from a checkpoint's config, by stage name. A missing stage is unknown.

    Attributes:
        max_model_len: longest sequence in tokens. For a stage that accepts parts and takes each in one
            step, it also becomes the engine's `max_model_len` and `max_num_batched_tokens`.
        kv_bytes_per_token: KV cache of one token in float32.
        memory: a replica's needs on a CUDA device.
    """

    max_model_len: Mapping[str, int] = field(default_factory=dict)
    kv_bytes_per_token: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, StageMemory] = field(default_factory=dict)
