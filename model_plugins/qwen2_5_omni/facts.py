"""Context lengths, and memory on a CUDA device, of the stages of a Qwen2.5-Omni checkpoint, for the planner.

Activations are the tensors that are alive at the same time in the largest layer, counted by hand from vLLM's,
Transformers' and this package's code. They have not been compared with a run on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.qwen2_5_omni.reach import MOST_WINDOW_FRAMES, reach
from vllm_omni_ext.model_plugins.qwen_omni.facts import (
    CONVOLUTION_BYTES,
    ENCODER_PIECES,
    GRAPH_NODE_BYTES,
    LARGEST_IMAGE_PIXELS,
    MOST_VIDEO_FRAME_PAIRS,
    described,
)
from vllm_omni_ext.plugins.memory import EncoderMemory, StageFacts, StoredTensors, WeightPart, measured

QUANTIZED = r"thinker\.model\.layers\..*\.(mlp|self_attn)\..*_proj\."
"""Names of the thinker's tensors that are quantized in a quantized checkpoint, in the format of its config."""

WEIGHTS = {
    "thinker": (
        WeightPart(names=r"thinker\.(visual|model\.embed_tokens|lm_head)\."),
        WeightPart(names=QUANTIZED, quantizable=True),
        WeightPart(names=r"thinker\.", split=False),
    ),
    "talker": (
        WeightPart(names=r"talker\.codec_head\."),
        WeightPart(names=r"talker\.model\.layers\..*\.(mlp|self_attn)\.", quantizable=True),
        WeightPart(names=r"talker\.(?!model\.embed_tokens)", split=False),
    ),
    "token2wav": (WeightPart(names=r"token2wav\.", split=False),),
}
"""Tensors of each stage by name; each tensor belongs to the first entry that matches."""

FRAMES_IN_FLIGHT = 64 * 96
"""Most mel frames of the diffusion transformer's pass: parts of 48 codes of 64 utterances. Larger steps are divided."""

STATES_ALIVE = 14
"""Tensors of the transformer's width that are alive at the same time for a frame: input, normed input, queries, keys
and values, these and a neighbour's once more where a layer attends to other blocks, results, and the MLP."""

WAVES_ALIVE = 12
"""Tensors of the size of BigVGAN's largest layer: three of the residual blocks, and an activation at twice the rate."""

GRAPH_NODES = 6 * 19 * 38
"""Operators in the graphs of the transformer (`dit_graphs.py`): graphs for 6 numbers of blocks, 19 layers of 38
operators."""

MELS_OF_A_BLOCK = 6
"""Tensors of mel frames of a waiting block: value, point, and the slopes of four evaluations."""

EVALUATIONS = 36
"""Number of evaluations of the transformer for a block, with the default number of steps."""


def facts(
    hf_config: Any, params: Mapping[str, Mapping[str, Any]], stored: StoredTensors | None = None
) -> dict[str, StageFacts]:
    """Return by stage the sizes from which the planner computes memory: weights, context length, activations, caches.

    Args:
        hf_config: the Hugging Face config of the whole model.
        params: default parameters by stage.
        stored: all tensors of the checkpoint; None: its files are not on this machine, and the weights are computed
            from the config.

    Raises:
        ConfigError: the checkpoint has only the thinker.
    """
    if not hf_config.enable_audio_output:
        raise ConfigError("model: this checkpoint has no sound output (enable_audio_output is false); leave --omni out")
    tensors = described("Qwen2_5OmniForConditionalGeneration", hf_config, QUANTIZED) if stored is None else stored
    weights = {stage: measured(parts, tensors) for stage, parts in WEIGHTS.items()}
    thinker, talker = hf_config.thinker_config, hf_config.talker_config
    text = thinker.text_config
    # Both tables are in the talker's width: they are projected when the talker loads.
    tables = (
        WeightPart(elements=text.vocab_size * talker.hidden_size, split=False),
        WeightPart(elements=talker.vocab_size * talker.hidden_size),
    )
    return {
        "thinker": StageFacts(
            weights=weights["thinker"],
            encoder=_encoder(thinker.vision_config),
            **_decoder(text, text.hidden_size // text.num_attention_heads),
        ),
        "talker": StageFacts(weights=(*weights["talker"], *tables), **_decoder(talker, talker.head_dim)),
        "token2wav": _token2wav(hf_config.token2wav_config, weights["token2wav"]),
    }


def _token2wav(config: Any, weights: tuple[WeightPart, ...]) -> StageFacts:
    dit, bigvgan = config.dit_config, config.bigvgan_config
    inner = dit.num_attention_heads * dit.head_dim
    # A block waits at each layer that looks ahead, with its hidden states and condition; both twice, for the guidance.
    waiting = 2 * (dit.hidden_size + dit.enc_dim + dit.enc_emb_dim + dit.emb_dim) + MELS_OF_A_BLOCK * dit.mel_dim
    block = dit.block_size * (len(dit.look_ahead_layers) * waiting + len(dit.look_backward_layers) * 4 * inner)
    rates = [math.prod(bigvgan.upsample_rates[: i + 1]) for i in range(len(bigvgan.upsample_rates))]
    widest = max(rate * (bigvgan.upsample_initial_channel >> (i + 1)) for i, rate in enumerate(rates))
    window = MOST_WINDOW_FRAMES + 2 * reach(bigvgan)
    return StageFacts(
        max_model_len=dit.max_position_embeddings // dit.repeats,
        weights=weights,
        pass_elements=FRAMES_IN_FLIGHT * 2 * STATES_ALIVE * dit.hidden_size + window * widest * WAVES_ALIVE,
        library_bytes=CONVOLUTION_BYTES,
        recorded_bytes=GRAPH_NODES * GRAPH_NODE_BYTES,
        sequence_elements=EVALUATIONS * block,
    )


def _decoder(text: Any, head_dim: int) -> dict[str, Any]:
    """Return `StageFacts` fields of a decoder: its KV cache, and the activations of a layer for one token."""
    heads = text.num_attention_heads + text.num_key_value_heads
    return {
        "max_model_len": text.max_position_embeddings,
        "kv_layers": text.num_hidden_layers,
        "kv_heads": text.num_key_value_heads,
        "kv_head_dim": head_dim,
        "step_elements": 6 * text.hidden_size,
        "split_step_elements": 2 * heads * head_dim + 3 * text.intermediate_size,
        "vocabulary": text.vocab_size,
        "graph_layers": text.num_hidden_layers,
    }


def _encoder(vision: Any) -> EncoderMemory:
    """Return the sizes of the vision encoder; a token consists of `spatial_merge_size` squared patches.

    Every device stores each patch's pixels (in float32 and in 16 bits), its rotary cosines and sines, hidden state and
    normed copy. Tensor parallelism divides queries, keys and values, or the inner activations of the MLP.
    """
    patches = vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side, hidden = vision.patch_size * vision.spatial_merge_size, vision.hidden_size
    split = max(9 * hidden, 2 * hidden + 3 * vision.intermediate_size)
    return EncoderMemory(
        image_tokens=LARGEST_IMAGE_PIXELS // side**2,
        most_images=MOST_VIDEO_FRAME_PAIRS,
        token_bytes=int(ENCODER_PIECES * patches * (6 * pixels + 2 * (2 * hidden + hidden // vision.num_heads))),
        split_token_bytes=int(ENCODER_PIECES * patches * 2 * split),
        output_elements=vision.out_hidden_size,
    )
