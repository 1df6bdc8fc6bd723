"""Context lengths, and memory on a CUDA device, of the stages of a Qwen3-Omni checkpoint, for the planner.

Activations are the tensors that are alive at the same time in the largest layer, counted by hand from vLLM's and this
package's code. The counts of the vision encoder and of the vocoder were compared with the live tensors of a run on a
CPU. The sums were compared with the processes of a run on one H200 (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen_omni.facts import (
    CONVOLUTION_BYTES,
    ENCODER_PIECES,
    GRAPH_NODE_BYTES,
    LARGEST_IMAGE_PIXELS,
    MOST_VIDEO_FRAME_PAIRS,
    described,
)
from vllm_omni_ext.plugins.memory import EncoderMemory, StageFacts, StoredTensors, WeightPart, measured

QUANTIZED = r"thinker\.model\..*\.(mlp\.experts|self_attn\.._proj)\."
"""Names of the thinker's tensors that are quantized in a quantized checkpoint, in the format of its config."""

WEIGHTS = {
    "thinker": (
        WeightPart(names=r"thinker\.(visual|audio_tower|model\.embed_tokens|lm_head)\."),
        WeightPart(names=QUANTIZED, quantizable=True),
        WeightPart(names=r"thinker\.", split=False),
    ),
    "talker": (
        WeightPart(names=r"talker\.(code_predictor|text_projection|hidden_projection)\.", split=False),
        WeightPart(names=r"talker\.(model\.codec_embedding|codec_head)\."),
        WeightPart(names=r"talker\.model\..*\.(mlp\.experts|mlp\.shared_expert|self_attn\.._proj)\.", quantizable=True),
        WeightPart(names=r"talker\.", split=False),
    ),
    "code2wav": (WeightPart(names=r"code2wav\.", split=False),),
}
"""Tensors of each stage by name; each tensor belongs to the first entry that matches."""

FRAMES_IN_FLIGHT = 256
"""Most frames that the vocoder decodes in one pass without a CUDA graph (`vocoder.DEFAULT_MAX_FRAMES_PER_PASS`)."""

WAVES_ALIVE = 6
"""Tensors of the size of the vocoder's last block that are alive at the same time. 4.5 were counted on a CPU; the
remainder is for the workspaces of cuDNN's convolutions."""

FRAME_STATE = 4
"""Memory of a frame during its computation, as a multiple of the code predictor's keys and values (`frames.py`): the
keys and values twice, logits, random numbers and the activations of a position. 1.3 MB for the released shape in
bfloat16."""

PREDICTOR_GRAPH_NODES = 7 * 1100
"""Operators in the graphs of a frame, for 1 to 64 requests (`frames.py`)."""

VOCODER_GRAPH_NODES = 36 * 520
"""Operators in the graphs of the vocoder (`vocoder_graphs.py`)."""

RECORDED_FRAMES = 128
"""Frames of the vocoder's largest recorded pass (`vocoder_graphs.MOST_FRAMES`), whose memory belongs to its graph."""

STATE_OVERHEAD = 1.25
"""State of a stream in all vocoder layers, as a multiple of the keys and values of the vocoder's transformer."""


def facts(
    hf_config: Any, params: Mapping[str, Mapping[str, Any]], stored: StoredTensors | None = None
) -> dict[str, StageFacts]:
    """Return by stage the sizes from which the planner computes memory: weights, context length, activations, caches.

    Args:
        hf_config: the Hugging Face config of the whole model.
        params: default parameters by stage; the talker's `max_tokens` is the largest number of frames of a reply.
        stored: all tensors of the checkpoint; None: its files are not on this machine, and the weights are computed
            from the config.

    Raises:
        ConfigError: the checkpoint has only the thinker.
    """
    if not hf_config.enable_audio_output:
        raise ConfigError("model: this checkpoint has no sound output (enable_audio_output is false); leave --omni out")
    tensors = described("Qwen3OmniMoeForConditionalGeneration", hf_config, QUANTIZED) if stored is None else stored
    weights = {stage: measured(parts, tensors) for stage, parts in WEIGHTS.items()}
    thinker, talker = hf_config.thinker_config, hf_config.talker_config
    # The thinker's embedding table, projected to the talker's width when the talker loads.
    table = WeightPart(elements=thinker.text_config.vocab_size * talker.text_config.hidden_size, split=False)
    predictor = talker.code_predictor_config
    kept = 2 * predictor.num_hidden_layers * predictor.num_key_value_heads * predictor.head_dim * talker.num_code_groups
    return {
        "thinker": StageFacts(
            weights=weights["thinker"], encoder=_encoder(thinker.vision_config), **_decoder(thinker.text_config)
        ),
        "talker": StageFacts(
            weights=(*weights["talker"], table),
            sequence_elements=FRAME_STATE * kept,
            recorded_bytes=PREDICTOR_GRAPH_NODES * GRAPH_NODE_BYTES,
            **_decoder(talker.text_config),
        ),
        "code2wav": _code2wav(
            hf_config.code2wav_config, weights["code2wav"], int(params["talker"]["max_tokens"]) * talker.num_code_groups
        ),
    }


def _code2wav(config: Any, weights: tuple[WeightPart, ...], longest: int) -> StageFacts:
    channels = config.decoder_dim // 2 ** len(config.upsample_rates)
    samples = math.prod((*config.upsampling_ratios, *config.upsample_rates))
    kept = 2 * config.num_hidden_layers * config.sliding_window * config.hidden_size
    return StageFacts(
        max_model_len=longest,
        weights=weights,
        pass_elements=(FRAMES_IN_FLIGHT + RECORDED_FRAMES) * samples * channels * WAVES_ALIVE,
        recorded_bytes=VOCODER_GRAPH_NODES * GRAPH_NODE_BYTES,
        library_bytes=CONVOLUTION_BYTES,
        sequence_elements=int(kept * STATE_OVERHEAD),
    )


def _decoder(text: Any) -> dict[str, Any]:
    """Return `StageFacts` fields of a decoder: its KV cache, and the activations of an MoE layer for one token.

    Every device stores the hidden state, the residual, their normed copies, the embeddings of the step and the output
    of each chosen expert. Tensor parallelism divides queries, keys, values, the attention's output and the experts'
    inner activations.
    """
    heads, experts = text.num_attention_heads + text.num_key_value_heads, text.num_experts_per_tok
    return {
        "max_model_len": text.max_position_embeddings,
        "kv_layers": text.num_hidden_layers,
        "kv_heads": text.num_key_value_heads,
        "kv_head_dim": text.head_dim,
        "step_elements": (6 + experts) * text.hidden_size,
        "split_step_elements": 2 * heads * text.head_dim + 3 * experts * text.moe_intermediate_size,
        "vocabulary": text.vocab_size,
        "graph_layers": text.num_hidden_layers,
    }


def _encoder(vision: Any) -> EncoderMemory:
    """Return the sizes of the vision encoder; a token consists of `spatial_merge_size` squared patches.

    The peak is in attention. Every device stores each patch's pixels (in float32 and in 16 bits), its rotary cosines
    and sines, hidden state, normed copy, and the hidden states kept for `deepstack`. Tensor parallelism divides the
    merged queries, keys and values, the queries and keys before and after rotation, and the result in two layouts.
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
