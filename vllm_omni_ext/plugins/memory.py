"""Sizes of a checkpoint's stages. The planner (`topology.planner`) computes a deployment's memory from them.

Pure data: no vLLM, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

StoredTensors = Mapping[str, tuple[str, int, int]]
"""Tensors of a checkpoint by name: dtype as safetensors writes it, number of elements, bytes."""

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that vLLM converts to the engine's dtype when it loads a tensor; other dtypes stay as they are."""

LIBRARY_BYTES = 512 << 20
"""Workspaces of libraries in each process: 394 MiB for FlashInfer's attention
(`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`), the rest for cuBLAS and cuDNN."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """A group of a stage's weights that have the same dtype, sharding and quantization.

    Attributes:
        names: regular expression that matches the beginning of the names of the group's tensors in a checkpoint.
        elements: number of elements that the engine holds in its own dtype, regardless of the checkpoint's dtype.
        stored_bytes: bytes of tensors that keep the checkpoint's dtype, such as quantized weights.
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
    """Return `parts` with `elements` and `stored_bytes` computed from the tensors of a checkpoint.

    A tensor counts in the first part whose `names` matches its name, and in none if no part matches.
    """
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
    """Sizes of an encoder, for its peak memory in vLLM's profile run with the largest picture or video.

    Attributes:
        image_tokens: tokens of the largest picture.
        most_images: tokens of the largest video divided by `image_tokens`; a shorter `max_model_len` lowers it.
        token_bytes: bytes of activations for each token that every device of a replica holds.
        split_token_bytes: bytes of activations for each token that tensor parallelism divides.
        output_elements: elements of the encoder's output for one token.
    """

    image_tokens: int
    most_images: int
    token_bytes: int
    split_token_bytes: int
    output_elements: int


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """Sizes of one stage of a checkpoint that do not depend on engine arguments.

    Attributes:
        max_model_len: longest sequence in tokens; 0 = not known. In a stage that accepts parts (`plugins.flow.Submit`),
            which computes each part in one step, it is also the default of the engine's `max_model_len` and
            `max_num_batched_tokens`.
        weights: groups of the stage's weights; empty = the sizes of the stage are not known.
        kv_layers, kv_heads, kv_head_dim: shape of the KV cache of one token; 0 layers = no KV cache.
        step_elements: elements of activations for each token of a step that every device of a replica holds.
        split_step_elements: elements of activations for each token of a step that tensor parallelism divides.
        pass_elements: elements of activations of a step, independent of the number of its tokens.
        vocabulary: columns of the logits; 0 = no logits.
        sequence_elements: elements of buffers for each of `max_num_seqs` sequences.
        graph_layers: number of layers that vLLM captures in CUDA graphs.
        recorded_bytes: bytes of CUDA graphs that the model captures itself.
        library_bytes: bytes of kernels and workspaces of libraries that only this stage needs.
        encoder: sizes of the stage's encoder of pictures and videos; None = it has none.
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
"""Sizes of a checkpoint's stages, by the stage's name in flows (`plugins.spec.StageSpec.model_stage`)."""
