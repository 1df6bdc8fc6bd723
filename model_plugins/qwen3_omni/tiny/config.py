"""The model's `config.json`, in the layout of the released checkpoint (`rope_scaling`, `num_experts`, ...).

The field names, the codec special ids and their places above the codebook come from the public `config.json`
of Qwen/Qwen3-Omni-30B-A3B-Instruct; fields that only repeat a Transformers default are left out.
"""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.sizes import CODEC_SPECIALS, DecoderSizes, Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

ROPE_THETA = 1_000_000
POSITION_IDS_PER_SECOND = 13
TRANSFORMERS_VERSION = "4.57.0"
"""As in the released file; without a version, Transformers takes a large local tokenizer for one of Mistral's."""

SPEAKERS = ("chelsie", "ethan", "aiden")

CODEC_OFFSETS = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
"""Offset of each codec special above the codebook; with 2048 codes these are the released 2148, 2149, 2150, ..."""

FIRST_SPEAKER_OFFSET = 253

Json = dict[str, Any]


def text_rows(sizes: Sizes, vocabulary: Vocabulary) -> int:
    """Number of rows of the thinker's embedding table."""
    return sizes.text_vocab_size or -(-vocabulary.size // 64) * 64


def model_config(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """The complete `config.json`."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "transformers_version": TRANSFORMERS_VERSION,
        "dtype": sizes.dtype,
        "enable_audio_output": True,
        "initializer_range": 0.02,
        "im_start_token_id": vocabulary.id_of("<|im_start|>"),
        "im_end_token_id": vocabulary.id_of("<|im_end|>"),
        "system_token_id": vocabulary.id_of("system"),
        "user_token_id": vocabulary.id_of("user"),
        "assistant_token_id": vocabulary.id_of("assistant"),
        "tts_pad_token_id": vocabulary.id_of("<tts_pad>"),
        "tts_bos_token_id": vocabulary.id_of("<tts_text_bos>"),
        "tts_eos_token_id": vocabulary.id_of("<tts_text_eod>"),
        "thinker_config": _thinker(sizes, vocabulary),
        "talker_config": _talker(sizes, vocabulary),
        "code2wav_config": _code2wav(sizes),
    }


def _media_ids(vocabulary: Vocabulary) -> Json:
    return {
        "audio_token_id": vocabulary.id_of("<|audio_pad|>"),
        "audio_start_token_id": vocabulary.id_of("<|audio_start|>"),
        "audio_end_token_id": vocabulary.id_of("<|audio_end|>"),
        "image_token_id": vocabulary.id_of("<|image_pad|>"),
        "video_token_id": vocabulary.id_of("<|video_pad|>"),
        "vision_start_token_id": vocabulary.id_of("<|vision_start|>"),
        "position_id_per_seconds": POSITION_IDS_PER_SECOND,
        "seconds_per_chunk": 2,
    }


def _decoder(sizes: DecoderSizes, vocab_size: int) -> Json:
    """Return the fields that thinker, talker and code predictor share."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _experts(sizes: DecoderSizes) -> Json:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.num_experts_per_tok,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "shared_expert_intermediate_size": sizes.shared_expert_intermediate_size,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _mrope(sizes: DecoderSizes) -> Json:
    section = list(sizes.mrope_section or ())
    return {"rope_type": "default", "type": "default", "mrope_section": section, "interleaved": True}


def _thinker(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    text = _decoder(sizes.thinker, text_rows(sizes, vocabulary)) | _experts(sizes.thinker)
    text |= {
        "model_type": "qwen3_omni_moe_text",
        "rope_scaling": _mrope(sizes.thinker) | {"mrope_interleaved": True},
        "use_qk_norm": True,
    }
    return _media_ids(vocabulary) | {
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": sizes.dtype,
        "initializer_range": 0.02,
        "user_token_id": vocabulary.id_of("user"),
        "vision_end_token_id": vocabulary.id_of("<|vision_end|>"),
        "tie_word_embeddings": False,
        "audio_config": _audio(sizes),
        "vision_config": _vision(sizes),
        "text_config": text,
    }


def _audio(sizes: Sizes) -> Json:
    audio = sizes.audio
    return {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "num_mel_bins": 128,
        "d_model": audio.d_model,
        "encoder_layers": audio.encoder_layers,
        "encoder_attention_heads": audio.encoder_attention_heads,
        "encoder_ffn_dim": audio.encoder_ffn_dim,
        "downsample_hidden_size": audio.downsample_hidden_size,
        "output_dim": sizes.thinker.hidden_size,
        "max_source_positions": audio.max_source_positions,
        "n_window": 50,
        "n_window_infer": audio.n_window_infer,
        "conv_chunksize": 500,
        "activation_function": "gelu",
        "scale_embedding": False,
    }


def _vision(sizes: Sizes) -> Json:
    vision = sizes.vision
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_heads,
        "out_hidden_size": sizes.thinker.hidden_size,
        "deepstack_visual_indexes": list(vision.deepstack_visual_indexes),
        "image_size": vision.image_size,
        "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
        "apply_vit_abs_pos_embed": True,
        "patch_size": vision.patch_size,
        "spatial_patch_size": vision.patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "in_channels": 3,
        "in_chans": 3,
        "tokens_per_second": 2,
        "hidden_act": "gelu_pytorch_tanh",
    }


def codec_special_ids(sizes: Sizes) -> dict[str, int]:
    """Return the talker ids of begin, end, padding and the thinking marks."""
    return {name: sizes.codebook_size + offset for name, offset in CODEC_OFFSETS.items()}


def speaker_ids(sizes: Sizes) -> dict[str, int]:
    """Return voice name (lower case) -> talker id."""
    first = sizes.codebook_size + FIRST_SPEAKER_OFFSET
    assert FIRST_SPEAKER_OFFSET + len(SPEAKERS) <= CODEC_SPECIALS
    return {name: first + index for index, name in enumerate(SPEAKERS)}


def _talker(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    text = _decoder(sizes.talker, sizes.talker_vocab_size) | _experts(sizes.talker)
    text |= {"model_type": "qwen3_omni_moe_talker_text", "rope_scaling": _mrope(sizes.talker)}
    predictor = _decoder(sizes.predictor, sizes.codebook_size) | {
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "rope_scaling": None,
        "num_code_groups": sizes.num_code_groups,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * sizes.predictor.num_hidden_layers,
    }
    return (
        _media_ids(vocabulary)
        | codec_special_ids(sizes)
        | {
            "accept_hidden_layer": sizes.accept_hidden_layer,
            "initializer_range": 0.02,
            "num_code_groups": sizes.num_code_groups,
            "output_router_logits": False,
            "spatial_merge_size": sizes.vision.spatial_merge_size,
            "speaker_id": speaker_ids(sizes),
            "thinker_hidden_size": sizes.thinker.hidden_size,
            "text_config": text,
            "code_predictor_config": predictor,
        }
    )


def _code2wav(sizes: Sizes) -> Json:
    vocoder = sizes.code2wav
    return {
        "codebook_size": sizes.codebook_size,
        "num_quantizers": sizes.num_code_groups,
        "hidden_size": vocoder.hidden_size,
        "intermediate_size": vocoder.intermediate_size,
        "num_hidden_layers": vocoder.num_hidden_layers,
        "num_attention_heads": vocoder.num_attention_heads,
        "num_key_value_heads": vocoder.num_attention_heads,
        "decoder_dim": vocoder.decoder_dim,
        "sliding_window": vocoder.sliding_window,
        "upsample_rates": list(vocoder.upsample_rates),
        "upsampling_ratios": list(vocoder.upsampling_ratios),
        "layer_scale_initial_scale": vocoder.layer_scale_initial_scale,
        "max_position_embeddings": vocoder.max_position_embeddings,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
