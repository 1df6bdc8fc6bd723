"""Memory that one replica needs on each of its CUDA devices, from its stage's sizes and engine arguments. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_ext.plugins.memory import EncoderMemory, StageMemory

GIB = 1 << 30
MIB = 1 << 20

CONTEXT_BYTES = 600 * MIB
"""A process's CUDA context with the code of its kernels. About 0.5 GiB on an H100, allocated before vLLM measures free
memory, so that it is outside `gpu_memory_utilization`.
"""

COMMUNICATION_BYTES = GIB
"""NCCL's channels and vLLM's buffers for all-reduce, if a replica has several devices. An estimate; also allocated
before vLLM measures.
"""

LIBRARY_BYTES = 512 * MIB
"""Workspaces: FlashInfer's attention has 394 MiB (`VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE`), cuBLAS and cuDNN the
rest."""

GRAPH_LAYER_BYTES = 512 << 10
"""A layer in one captured graph. vLLM logs 0.5 to 0.85 GiB for 67 sizes of models with 32 to 36 layers, which is half
of this; the other half is for layers with experts. An estimate.
"""

MOST_CAPTURED_TOKENS = 512
"""The largest batch vLLM captures by default; the default is twice `max_num_seqs` below that."""

LOGIT_BYTES = 18
"""Bytes per logit at the peak of sampling: in 16 bits, in float32, scaled, as probability and sorted."""

COUNT_BITS = 33
"""Bits per vocabulary entry of each sequence for penalties: an int32 count and one bit for the prompt."""

DEFAULT_BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float": 4}
"""Bytes per number by `EngineArgs.dtype`; all others have 2, also `auto`, which is never float32 on CUDA."""

ONLINE_BYTES: Mapping[str, float] = {
    "fp8": 1,
    "fp8_per_tensor": 1,
    "fp8_per_channel": 1,
    "fp8_per_block": 1 + 1 / 128,
    "int8_per_channel_weight_only": 1,
    "mxfp8": 1 + 1 / 32,
    "nvfp4_per_token": 0.5 + 1 / 16,
}
"""Bytes per weight by `EngineArgs.quantization`, for those that vLLM applies to any checkpoint while loading."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on each device of a replica.

    Attributes:
        weights: weights as loaded, after quantization.
        activations: peak of a step or of the encoder's largest input, workspaces included.
        encoder: bytes of the encoder's largest input; 0 = the stage has no encoder, or it takes no pictures.
        graphs: CUDA graphs.
        buffers: buffers for all sequences, besides the KV cache.
        context: memory allocated before vLLM measures free memory.
        kv_token: KV cache of one token; 0 = the stage has no KV cache.
        sequence_tokens: the longest sequence, for which the KV cache must have room.
        block_tokens: tokens of a block of the KV cache.
    """

    weights: int
    activations: int
    graphs: int
    buffers: int
    context: int
    encoder: int = 0
    kv_token: int = 0
    sequence_tokens: int = 0
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    @property
    def fixed(self) -> int:
        """Bytes that `gpu_memory_utilization` must cover besides the KV cache."""
        return self.weights + self.activations + self.graphs + self.buffers

    @property
    def least_kv(self) -> int:
        """KV cache of one sequence of full length, with the block that vLLM keeps for itself."""
        blocks = -(-self.sequence_tokens // self.block_tokens) + 1
        return blocks * self.block_tokens * self.kv_token


def need(memory: StageMemory, args: Mapping[str, Any], longest: int, media: int | None = None) -> Need:
    """Compute the memory that a replica needs.

    Args:
        args: the resolved `EngineArgs` fields of the stage.
        longest: longest sequence in tokens that the model allows.
        media: most tokens that the encoder computes in one step; None: as many as one sequence may have.
    """
    tensor, pipeline = int(args.get("tensor_parallel_size", 1)), int(args.get("pipeline_parallel_size", 1))
    width = DTYPE_BYTES.get(str(args.get("dtype", "auto")).removeprefix("torch."), 2)
    sequences = int(args.get("max_num_seqs") or 0)
    said = args.get("max_model_len") or longest
    length: int = said if isinstance(said, int) and said > 0 else 1  # -1: vLLM chooses a length that fits
    kv_width = _kv_width(str(args.get("kv_cache_dtype", "auto")), width)
    heads = max(1, memory.kv_heads // tensor) if memory.kv_layers else 0
    encoder, rows = _encoder(memory, args, width, tensor, length, media)
    return Need(
        weights=_weights(memory, args, width, tensor * pipeline),
        activations=max(_step(memory, args, width, tensor), encoder) + rows + LIBRARY_BYTES + memory.library_bytes,
        graphs=memory.recorded_bytes
        + (0 if args.get("enforce_eager") else _graphs(memory.graph_layers, sequences) // pipeline),
        buffers=sequences * (memory.sequence_elements * width + memory.vocabulary * COUNT_BITS // 8),
        context=CONTEXT_BYTES + (COMMUNICATION_BYTES if tensor * pipeline > 1 else 0),
        encoder=encoder + rows,
        kv_token=math.ceil(memory.kv_layers / pipeline) * heads * memory.kv_head_dim * 2 * kv_width,
        sequence_tokens=length,
        block_tokens=args.get("block_size") or DEFAULT_BLOCK_TOKENS,
    )


def _weights(memory: StageMemory, args: Mapping[str, Any], width: int, ranks: int) -> int:
    quantized = ONLINE_BYTES.get(str(args.get("quantization")), width)
    total = 0.0
    for part in memory.weights:
        size = part.elements * (quantized if part.quantizable else width) + part.stored_bytes
        total += size / (ranks if part.split else 1)
    return max(0, math.ceil(total - float(args.get("cpu_offload_gb") or 0) * GIB))


def _step(memory: StageMemory, args: Mapping[str, Any], width: int, tensor: int) -> int:
    """Activations of a decoder step with sampling."""
    tokens = int(args.get("max_num_batched_tokens") or 0)
    step: int = tokens * (memory.step_elements + memory.split_step_elements // tensor) + memory.pass_elements
    logits = int(args.get("max_num_seqs") or 0) * memory.vocabulary * LOGIT_BYTES
    return step * width + logits


def _encoder(
    memory: StageMemory, args: Mapping[str, Any], width: int, tensor: int, length: int, media: int | None
) -> tuple[int, int]:
    """Activations of the encoder, and its output, which is held during the decoder's steps."""
    if memory.encoder is None:
        return 0, 0
    encoded = _encoded_tokens(memory.encoder, args, length)
    computed = encoded if media is None else min(encoded, media)
    activations = computed * (memory.encoder.token_bytes + memory.encoder.split_token_bytes // tensor)
    return activations, encoded * memory.encoder.output_elements * width


def _encoded_tokens(encoder: EncoderMemory, args: Mapping[str, Any], length: int) -> int:
    """Tokens of the images, or of the video, with which vLLM profiles the encoder."""
    limits = args.get("limit_mm_per_prompt") or {}
    allowed = {kind: _count(limits.get(kind, 1)) > 0 for kind in ("image", "video")}
    if not any(allowed.values()):
        return 0
    images = min(encoder.most_images, length // encoder.image_tokens) if allowed["video"] else 1
    tokens: int = max(1, images) * encoder.image_tokens
    return tokens


def _count(limit: Any) -> int:
    """A limit of `limit_mm_per_prompt` as a number: an integer, or an object with `count`."""
    value = limit.get("count", 1) if isinstance(limit, Mapping) else limit
    return int(value) if isinstance(value, int) else 1


def _graphs(layers: int, sequences: int) -> int:
    """Bytes of all captured sizes: 1, 2, 4, then every 8th up to 256 and every 16th above."""
    largest = min(2 * sequences, MOST_CAPTURED_TOKENS)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED_TOKENS + 1, 16))
    captured: int = sum(size <= largest for size in sizes)
    return layers * captured * GRAPH_LAYER_BYTES


def _kv_width(dtype: str, width: int) -> int:
    """Bytes per number in the KV cache."""
    if dtype == "auto":
        return width
    return 1 if dtype.startswith(("fp8", "int8")) else 2
