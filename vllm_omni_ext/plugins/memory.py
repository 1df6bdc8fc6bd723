"""Facts about a checkpoint's stages: lengths, weights, caches, activations. Pure data: no vLLM, no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

StoredTensors = Mapping[str, tuple[str, int, int]]
"""Tensors of a checkpoint by name: dtype as safetensors writes it, number of elements, bytes."""

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that vLLM converts to the engine's dtype when it loads; tensors of other types keep theirs."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Weights of a stage that are treated alike.

    Attributes:
        names: regular expression for the beginning of the names of its tensors in a checkpoint.
        elements: number of elements that the engine holds in its own dtype, regardless of the checkpoint's dtype.
        stored_bytes: size of tensors that have a dtype of their own, such as quantized weights.
        split: tensor parallelism divides these weights; otherwise every device of a replica holds all of them.
        quantizable: the engine argument `quantization` makes them smaller.
        float32: the engine holds them in float32, regardless of its dtype.
    """

    names: str = ""
    elements: int = 0
    stored_bytes: int = 0
    split: bool = True
    quantizable: bool = False
    float32: bool = False


def measured(parts: Sequence[WeightPart], tensors: StoredTensors) -> tuple[WeightPart, ...]:
    """The same parts with the sizes of these tensors. A tensor counts for the first part that matches its name."""
    names = [re.compile(part.names) for part in parts]
    elements, stored = [0] * len(parts), [0] * len(parts)
    for name, (dtype, count, size) in tensors.items():
        at = next((number for number, pattern in enumerate(names) if pattern.match(name)), None)
        if at is None:
            continue
        if dtype not in _PLAIN_DTYPES:
            stored[at] += size
        elif parts[at].float32:
            stored[at] += 4 * count
        else:
            elements[at] += count
    return tuple(
        replace(part, elements=count, stored_bytes=size)
        for part, count, size in zip(parts, elements, stored, strict=True)
    )


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
class StageFacts:
    """One stage of a checkpoint, as sizes that do not depend on engine arguments.

    Attributes:
        max_model_len: longest sequence in tokens; 0 = not known. For a stage that accepts parts and takes each in one
            step, it also becomes the engine's `max_model_len` and `max_num_batched_tokens`.
        weights: empty = the sizes of the stage are not known.
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

    max_model_len: int = 0
    weights: tuple[WeightPart, ...] = ()
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


ModelFacts = Mapping[str, StageFacts]
"""Facts from a checkpoint, by the name of the stage in the model's flow."""
