"""Memory sizes for the planner that Qwen3-Omni and Qwen2.5-Omni share: weights by the config, and constants.

`ENCODER_PIECES` and `CONVOLUTION_BYTES` come from a run of Qwen3-Omni on one H200 (docs/gpu.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.plugins.memory import StoredTensors

LARGEST_IMAGE_PIXELS = 12_845_056
"""`max_pixels` of the released `preprocessor_config.json`."""

MOST_VIDEO_FRAME_PAIRS = 7
"""Largest number of frame pairs in the video of vLLM's profile run, which has at most 14 frames
(`qwen2_vl._MAX_FRAMES_PER_VIDEO`). A patch covers two frames."""

ENCODER_PIECES = 1.12
"""Memory of the vision encoder's pass, as a multiple of its live tensors: PyTorch's allocator cannot reuse some pieces.
After videos of 46,000 tokens, the thinker's process used 1.25 GiB more than the live tensors that were counted."""

GRAPH_NODE_BYTES = 32 << 10
"""Bytes of an operator in a CUDA graph: an estimate from vLLM's graphs, whose layers have about 16 operators."""

CONVOLUTION_BYTES = 860 << 20
"""Bytes of cuDNN's kernels and workspaces in code2wav's process: its measured memory minus all memory that is counted.
"""


def described(model: str, hf_config: Any, quantized: str) -> StoredTensors:
    """Return the tensors (name -> dtype, elements, bytes) of a checkpoint with this config, without reading its files.

    The tensors have 16 bits, or the width of the config's quantization.

    Args:
        model: name of the model's class in Transformers.
        quantized: pattern that matches the beginning of the names of tensors that a quantized checkpoint quantizes.
    """
    import torch
    import transformers

    with torch.device("meta"):
        parameters = getattr(transformers, model)(hf_config).named_parameters()
    width = quantized_width(getattr(hf_config, "quantization_config", None))
    found: dict[str, tuple[str, int, int]] = {}
    for name, parameter in parameters:
        count = parameter.numel()
        packed = width is not None and re.match(quantized, name)
        found[name] = ("packed", count, int(count * width)) if packed else ("BF16", count, 2 * count)
    return found


def quantized_width(quantization: Any) -> float | None:
    """Return the bytes of one quantized weight, with its share of scales and zero points.

    Args:
        quantization: `quantization_config` of the checkpoint's config.

    Returns:
        bytes, e.g. 0.52 for 4 bits; None if the checkpoint is not quantized or the number of bits is unknown.
    """
    if quantization is None:
        return None
    fields: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else vars(quantization)
    groups = fields.get("config_groups") or {}
    bits = fields.get("bits") or next((group["weights"]["num_bits"] for group in groups.values()), None)
    if bits is None and "fp8" in str(fields.get("quant_method")):
        bits = 8
    # One 16-bit scale and one zero point for every 128 weights, as usual.
    return None if bits is None else bits / 8 + 3 / 128
