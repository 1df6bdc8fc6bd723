"""Memory of each stage of a Qwen3-Omni checkpoint on a CUDA device. Reads plain attributes: no vLLM, no torch.

The sizes of the weights are computed from the config, or summed from the headers of the checkpoint's files if those can
be read. Activations are the tensors that are alive at the same time in the largest layer, counted by hand from vLLM's
and this package's code. The counts of the vision encoder and of the vocoder were compared with the live tensors of a
run on a CPU, the sums with the processes of a run on one H200 (docs/gpu.md), from which `ENCODER_PIECES` and
`CONVOLUTION_BYTES` are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_ext.plugins.memory import EncoderMemory, StageMemory, StoredTensors, WeightPart

LARGEST_IMAGE_PIXELS = 12_845_056
"""`max_pixels` of the released `preprocessor_config.json`."""

MOST_VIDEO_FRAME_PAIRS = 7
"""vLLM profiles a video of at most 14 frames (`qwen2_vl._MAX_FRAMES_PER_VIDEO`), two frames in one row of patches."""

FRAMES_IN_FLIGHT = 256
"""Frames that the vocoder decodes in one pass (`vocoder.DEFAULT_MAX_FRAMES_PER_PASS`)."""

WAVES_ALIVE = 6
"""Tensors of the size of the vocoder's last block that are alive at the same time. 4.5 were counted on a CPU; the
remainder is for the workspaces of cuDNN's convolutions."""

FRAME_STATE = 4
"""Memory of a frame in progress, relative to the keys and values of the code predictor alone (`frames.py`): these
twice, logits, draws and the activations of a position. 1.3 MB for the released shape in bfloat16."""

GRAPH_NODE_BYTES = 32 << 10
"""Memory of an operator in a CUDA graph: an estimate from vLLM's graphs, whose layers have about 16 operators."""

PREDICTOR_GRAPH_NODES = 7 * 1100
"""Operators in the graphs of a frame, for 1 to 64 requests (`frames.py`)."""

VOCODER_GRAPH_NODES = 36 * 520
"""Operators in the graphs of the vocoder (`vocoder_graphs.py`)."""

RECORDED_FRAMES = 128
"""Frames of the vocoder's largest recorded pass (`vocoder_graphs.MOST_FRAMES`), whose memory belongs to its graph."""

STATE_OVERHEAD = 1.25
"""A stream's state of all vocoder layers, relative to the keys and values of its transformer alone."""

ENCODER_PIECES = 1.12
"""Memory of the vision encoder's pass, relative to its live tensors: pieces that PyTorch's allocator cannot use again.
The thinker's process had 1.25 GiB more than counted after videos of 46,000 tokens."""

CONVOLUTION_BYTES = 860 << 20
"""Kernels and workspaces of cuDNN in code2wav's process, which had that much more than counted."""

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that vLLM converts to the engine's dtype when it loads; tensors of other types keep theirs."""


def memory(hf_config: Any, stored: StoredTensors | None = None) -> dict[str, StageMemory]:
    """Return the memory of a replica of each stage.

    Args:
        hf_config: the Hugging Face config of the whole model.
        stored: all tensors of the checkpoint, if its files could be read; None: sizes come from the config.
    """
    found = {
        "thinker": _thinker(hf_config.thinker_config),
        "talker": _talker(hf_config),
        "code2wav": _code2wav(hf_config.code2wav_config),
    }
    if stored is None:
        width = _stored_width(getattr(hf_config, "quantization_config", None))
        return {name: replace(each, weights=tuple(_shrunk(each.weights, width))) for name, each in found.items()}
    return {name: replace(each, weights=tuple(_as_stored(each.weights, stored))) for name, each in found.items()}


def part_of(tensor: str) -> str:
    """Return the weight part to which a tensor of the checkpoint belongs; "" if no stage loads the tensor."""
    stage, _, rest = tensor.partition(".")
    if stage == "code2wav":
        return "vocoder"
    if stage == "thinker" and rest.startswith("visual."):
        return "vision encoder"
    if stage == "thinker" and rest.startswith("audio_tower."):
        return "audio encoder"
    if stage not in ("thinker", "talker"):
        return ""
    if stage == "talker" and rest.startswith(("code_predictor.", "text_projection.", "hidden_projection.")):
        return "code predictor"
    return f"{stage} {_kind(rest)}"


def _kind(name: str) -> str:
    if ".experts." in name or ".shared_expert." in name:
        return "experts"
    if ".self_attn." in name and "_norm." not in name:
        return "attention"
    if name.startswith(("model.embed_tokens.", "model.codec_embedding.", "lm_head.", "codec_head.")):
        return "embeddings"
    return "norms"


def _thinker(config: Any) -> StageMemory:
    text, vision = config.text_config, config.vision_config
    return StageMemory(
        weights=(
            *_decoder("thinker", text, experts=text.num_experts),
            WeightPart(name="vision encoder", elements=_vision_elements(vision)),
            WeightPart(name="audio encoder", elements=_audio_elements(config.audio_config)),
        ),
        **_kv(text),
        **_step(text),
        vocabulary=text.vocab_size,
        graph_layers=text.num_hidden_layers,
        encoder=_encoder(vision),
    )


def _talker(hf_config: Any) -> StageMemory:
    config = hf_config.talker_config
    text, predictor = config.text_config, config.code_predictor_config
    hidden, wide = text.hidden_size, config.thinker_hidden_size
    kept = 2 * predictor.num_hidden_layers * predictor.num_key_value_heads * predictor.head_dim * config.num_code_groups
    resize = wide * text.intermediate_size + text.intermediate_size * (hidden + 1) + hidden
    tables = 2 * (predictor.num_code_groups - 1) * predictor.vocab_size * predictor.hidden_size
    dense = sum(part.elements for part in _decoder("predictor", predictor, experts=0, embeddings=False))
    thinker_vocabulary = hf_config.thinker_config.text_config.vocab_size
    return StageMemory(
        weights=(
            *_decoder("talker", text, experts=text.num_experts),
            WeightPart(name="code predictor", elements=dense + tables + 2 * resize, split=False),
            # The thinker's embedding table, projected to the talker's width when the talker loads.
            WeightPart(name="text table", elements=thinker_vocabulary * hidden, split=False),
        ),
        **_kv(text),
        **_step(text),
        vocabulary=text.vocab_size,
        graph_layers=text.num_hidden_layers,
        sequence_elements=FRAME_STATE * kept,
        recorded_bytes=PREDICTOR_GRAPH_NODES * GRAPH_NODE_BYTES,
    )


def _code2wav(config: Any) -> StageMemory:
    channels = config.decoder_dim // 2 ** len(config.upsample_rates)
    samples = math.prod((*config.upsampling_ratios, *config.upsample_rates))
    kept = 2 * config.num_hidden_layers * config.sliding_window * config.hidden_size
    return StageMemory(
        weights=(WeightPart(name="vocoder", elements=_vocoder_elements(config), split=False),),
        pass_elements=(FRAMES_IN_FLIGHT + RECORDED_FRAMES) * samples * channels * WAVES_ALIVE,
        recorded_bytes=VOCODER_GRAPH_NODES * GRAPH_NODE_BYTES,
        library_bytes=CONVOLUTION_BYTES,
        sequence_elements=int(kept * STATE_OVERHEAD),
    )


def _kv(text: Any) -> dict[str, Any]:
    return {
        "kv_layers": text.num_hidden_layers,
        "kv_heads": text.num_key_value_heads,
        "kv_head_dim": text.head_dim,
    }


def _step(text: Any) -> dict[str, Any]:
    """Return the activations of a mixture-of-experts layer for one token.

    Every device holds the hidden state, the residual, their normed copies, the embeddings of the step and the output
    of each chosen expert; tensor parallelism divides queries, keys, values, the attention's output and the experts'
    inner activations.
    """
    heads = text.num_attention_heads + text.num_key_value_heads
    experts = text.num_experts_per_tok
    return {
        "step_elements": (6 + experts) * text.hidden_size,
        "split_step_elements": 2 * heads * text.head_dim + 3 * experts * text.moe_intermediate_size,
    }


def _encoder(vision: Any) -> EncoderMemory:
    """Return the activations of the vision encoder for one token, which is `spatial_merge_size` squared patches.

    The peak is in attention. Every device holds each patch's pixels (float32 and again in 16 bits), its rotary cosines
    and sines, hidden state, normed copy, and the hidden states kept for `deepstack`; tensor parallelism divides
    queries, keys and values together, queries and keys in one piece and again rotated, and the result in two layouts.
    """
    patches = vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side = vision.patch_size * vision.spatial_merge_size
    hidden, kept = vision.hidden_size, len(vision.deepstack_visual_indexes)
    return EncoderMemory(
        image_tokens=LARGEST_IMAGE_PIXELS // side**2,
        most_images=MOST_VIDEO_FRAME_PAIRS,
        token_bytes=int(
            ENCODER_PIECES * patches * (6 * pixels + 2 * (hidden * (2 + kept) + hidden // vision.num_heads))
        ),
        split_token_bytes=int(ENCODER_PIECES * patches * 2 * 9 * hidden),
        output_elements=vision.out_hidden_size * (1 + kept),
    )


def _decoder(stage: str, text: Any, *, experts: int, embeddings: bool = True) -> tuple[WeightPart, ...]:
    """Return a Qwen3 decoder with `experts` experts in each layer, or with a dense MLP if there are none."""
    hidden, layers, dim = text.hidden_size, text.num_hidden_layers, text.head_dim
    queries, keys = text.num_attention_heads * dim, text.num_key_value_heads * dim
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0 if stage == "talker" else 0
    inner = 3 * hidden * (experts * text.moe_intermediate_size + shared if experts else text.intermediate_size)
    norms = 2 * hidden + 2 * dim + experts * hidden + (hidden if shared else 0)
    parts = (
        WeightPart(name=f"{stage} experts", elements=layers * inner, quantizable=True),
        WeightPart(name=f"{stage} attention", elements=layers * hidden * (2 * queries + 2 * keys), quantizable=True),
        WeightPart(name=f"{stage} norms", elements=layers * norms + hidden, split=False),
    )
    if not embeddings:
        return parts
    return (*parts, WeightPart(name=f"{stage} embeddings", elements=2 * text.vocab_size * hidden))


def _vision_elements(c: Any) -> int:
    hidden, inner = c.hidden_size, c.intermediate_size
    merged = hidden * c.spatial_merge_size**2
    patch = c.in_channels * c.temporal_patch_size * c.patch_size**2
    block = _linear(hidden, 3 * hidden) + _linear(hidden, hidden) + _linear(hidden, inner) + _linear(inner, hidden)
    merger = _linear(merged, merged) + _linear(merged, c.out_hidden_size)
    deep = len(c.deepstack_visual_indexes) * (merger + 2 * merged)
    positions = c.num_position_embeddings * hidden
    return _linear(patch, hidden) + positions + c.depth * (block + 4 * hidden) + merger + 2 * hidden + deep


def _audio_elements(c: Any) -> int:
    width, inner, channels = c.d_model, c.encoder_ffn_dim, c.downsample_hidden_size
    bands = c.num_mel_bins
    for _ in range(3):  # three convolutions with stride 2
        bands = (bands + 1) // 2
    convolutions = _linear(9, channels) + 2 * _linear(9 * channels, channels) + channels * bands * width
    block = 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width) + 4 * width
    return convolutions + c.encoder_layers * block + 2 * width + _linear(width, width) + _linear(width, c.output_dim)


def _vocoder_elements(c: Any) -> int:
    hidden = c.hidden_size
    dim = getattr(c, "head_dim", None) or hidden // c.num_attention_heads
    queries, keys = c.num_attention_heads * dim, c.num_key_value_heads * dim
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * c.intermediate_size + 4 * hidden
    total = c.num_hidden_layers * layer + hidden + c.codebook_size * c.num_quantizers * hidden
    for factor in c.upsampling_ratios:
        block = hidden + _linear(7, hidden) + 2 * hidden + _linear(hidden, 4 * hidden) + _linear(4 * hidden, hidden)
        total += factor * hidden * hidden + hidden + block
    width = c.decoder_dim
    total += _linear(7 * hidden, width)
    for rate in c.upsample_rates:
        total += 2 * width
        width //= 2
        total += _linear(2 * width * 2 * rate, width) + 3 * (
            4 * width + _linear(7 * width, width) + _linear(width, width)
        )
    return total + 2 * width + _linear(7 * width, 1)


def _linear(inputs: int, outputs: int) -> int:
    """Return the number of weights and biases."""
    return outputs * (inputs + 1)


def _stored_width(quantization: Any) -> float | None:
    """Return the bytes of a quantized weight by the checkpoint's config; None: not quantized, or unknown."""
    if quantization is None:
        return None
    fields: Mapping[str, Any] = quantization if isinstance(quantization, Mapping) else vars(quantization)
    groups = fields.get("config_groups") or {}
    bits = fields.get("bits") or next((group["weights"]["num_bits"] for group in groups.values()), None)
    if bits is None and "fp8" in str(fields.get("quant_method")):
        bits = 8
    # One 16-bit scale and one zero point for every 128 weights, as usual.
    return None if bits is None else bits / 8 + 3 / 128


def _shrunk(parts: Iterable[WeightPart], width: float | None) -> Iterable[WeightPart]:
    """Return the same parts for a checkpoint whose thinker is stored quantized."""
    for part in parts:
        if width is None or not part.quantizable or not part.name.startswith("thinker"):
            yield part
        else:
            yield replace(part, elements=0, stored_bytes=int(part.elements * width), quantizable=False)


def _as_stored(parts: Iterable[WeightPart], stored: StoredTensors) -> Iterable[WeightPart]:
    """Return the same parts with the sizes of the checkpoint's files; parts that are in no file keep their sizes."""
    plain: dict[str, int] = {}
    fixed: dict[str, int] = {}
    for name, (dtype, elements, size) in stored.items():
        into, count = (plain, elements) if dtype in _PLAIN_DTYPES else (fixed, size)
        where = part_of(name)
        into[where] = into.get(where, 0) + count
    for part in parts:
        if part.name in plain or part.name in fixed:
            yield replace(part, elements=plain.get(part.name, 0), stored_bytes=fixed.get(part.name, 0))
        else:
            yield part
