"""Sizes of weights that a config describes, and figures of both families for the planner.

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
"""vLLM profiles a video of at most 14 frames (`qwen2_vl._MAX_FRAMES_PER_VIDEO`), two frames in one row of patches."""

ENCODER_PIECES = 1.12
"""Memory of the vision encoder's pass, as a multiple of its live tensors: PyTorch's allocator cannot reuse some pieces.
The thinker's process used 1.25 GiB more than counted after videos of 46,000 tokens."""

GRAPH_NODE_BYTES = 32 << 10
"""Memory of an operator in a CUDA graph: an estimate from vLLM's graphs, whose layers have about 16 operators."""

CONVOLUTION_BYTES = 860 << 20
"""Memory of cuDNN's kernels and workspaces in code2wav's process, which used this much more than counted."""


def described(model: str, hf_config: Any, quantized: str) -> StoredTensors:
    """Return the tensors of a model with this config, in 16 bits or as the config quantizes them.

    Args:
        model: name of the model's class in Transformers.
        quantized: pattern of the names of tensors that are quantized in a quantized checkpoint.
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
    """Return the bytes of a quantized weight according to the checkpoint's config; None if not quantized or unknown."""
    if quantization is None:
        return None
    fields: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else vars(quantization)
    groups = fields.get("config_groups") or {}
    bits = fields.get("bits") or next((group["weights"]["num_bits"] for group in groups.values()), None)
    if bits is None and "fp8" in str(fields.get("quant_method")):
        bits = 8
    # One 16-bit scale and one zero point for every 128 weights, as usual.
    return None if bits is None else bits / 8 + 3 / 128
