"""Sizes of the checkpoints that this package can write, and their `config.json` in the released checkpoint's layout.

The field names, the codec special ids and their places above the codebook come from the public `config.json` of
Qwen/Qwen3-Omni-30B-A3B-Instruct; fields that only repeat a Transformers default are left out. `RELEASED` has the sizes
of that file, `SMALL` and `REAL_VOCAB` are smaller versions of the same structure. Lower limits: vLLM has no CPU
attention kernel for head sizes below 32, and the hidden and expert sizes of every mixture-of-experts stage must be
multiples of 32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

Json = dict[str, Any]

CODEC_SPECIALS = 1024
"""The last 1024 ids of the talker vocabulary are never codes: begin, end, padding, speakers, ..."""

CODEC_OFFSETS = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
"""Offset of each codec special above the codebook; with 2048 codes these are the released 2148, 2149, 2150, ..."""

SPEAKER_OFFSETS = {"chelsie": 253, "ethan": 254, "aiden": 255}

PATCH, MERGED_PATCHES = 16, 2
"""Side of a patch in pixels, and side of a token in patches, in every vision tower."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one complete Qwen3-Omni model.

    Attributes:
        text_vocab_size: rows of the thinker's embedding table; 0: as many as the tokenizer needs, rounded up to a
            multiple of 64.
        codebook_size: number of codes in each of the `num_code_groups` codebooks.
        accept_hidden_layer: number of the thinker's layer whose output the talker reads at multimodal positions.
        thinker, talker, predictor, audio, vision, code2wav: config fields of the thinker's and the talker's decoder, of
            the code predictor, the encoders and the vocoder; missing fields have Transformers' defaults.
    """

    name: str
    text_vocab_size: int
    num_code_groups: int
    codebook_size: int
    accept_hidden_layer: int
    thinker: Json
    talker: Json
    predictor: Json
    audio: Json = field(default_factory=dict)
    vision: Json = field(default_factory=dict)
    code2wav: Json = field(default_factory=dict)
    dtype: str = "float32"


_TINY_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
_TINY_EXPERTS = {
    "mrope_section": (8, 4, 4),
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

SMALL = Sizes(
    name="small",
    text_vocab_size=0,
    num_code_groups=4,
    codebook_size=64,
    accept_hidden_layer=3,
    thinker={**_TINY_DECODER, **_TINY_EXPERTS, "hidden_size": 96, "num_hidden_layers": 4},
    talker={**_TINY_DECODER, **_TINY_EXPERTS, "shared_expert_intermediate_size": 64},
    predictor=_TINY_DECODER,
    audio={
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 1,
        "encoder_ffn_dim": 64,
        "downsample_hidden_size": 8,
        "n_window_infer": 200,
    },
    vision={
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 1,
        "image_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": (0, 1),
    },
    code2wav={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "decoder_dim": 64,
        "sliding_window": 8,
        "upsample_rates": (4, 3, 2, 2),
        "upsampling_ratios": (2, 2),
        "layer_scale_initial_scale": 0.3,
    },
)

REAL_VOCAB = replace(
    SMALL,
    name="real-vocab",
    text_vocab_size=152064,
    num_code_groups=16,
    codebook_size=2048,
    thinker={**SMALL.thinker, "hidden_size": 64, "max_position_embeddings": 65536},
    code2wav={**SMALL.code2wav, "sliding_window": 72, "upsample_rates": (8, 5, 4, 3)},
)

_RELEASED_EXPERTS = {"mrope_section": (24, 20, 20), "num_experts": 128, "max_position_embeddings": 65536}

RELEASED = Sizes(
    name="released-shape",
    text_vocab_size=152064,
    num_code_groups=16,
    codebook_size=2048,
    accept_hidden_layer=24,
    dtype="bfloat16",
    vision={"image_size": 768, "deepstack_visual_indexes": (8, 16, 24)},
    thinker={
        **_RELEASED_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    talker={
        **_RELEASED_EXPERTS,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 768,
    },
    predictor={
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
)


def model_config(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """Return the complete `config.json`."""
    id_of, hidden = vocabulary.id_of, sizes.thinker["hidden_size"]
    media = {
        "audio_token_id": id_of("<|audio_pad|>"),
        "audio_start_token_id": id_of("<|audio_start|>"),
        "audio_end_token_id": id_of("<|audio_end|>"),
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    # Without `num_experts`, Transformers uses 128 experts.
    text = _decoder(sizes.thinker, sizes.text_vocab_size or -(-vocabulary.size // 64) * 64)
    text["rope_scaling"]["mrope_interleaved"] = True
    thinker = {
        **media,
        "dtype": sizes.dtype,
        "user_token_id": id_of("user"),
        "vision_end_token_id": id_of("<|vision_end|>"),
        "audio_config": {**sizes.audio, "output_dim": hidden},
        # vLLM also reads `image_size` and `apply_vit_abs_pos_embed`, which Transformers does not define.
        "vision_config": {**sizes.vision, "apply_vit_abs_pos_embed": True, "out_hidden_size": hidden},
        "text_config": text,
    }
    talker = {
        **media,
        **{name: sizes.codebook_size + offset for name, offset in CODEC_OFFSETS.items()},
        "accept_hidden_layer": sizes.accept_hidden_layer,
        "num_code_groups": sizes.num_code_groups,
        "spatial_merge_size": MERGED_PATCHES,
        "speaker_id": {name: sizes.codebook_size + offset for name, offset in SPEAKER_OFFSETS.items()},
        "thinker_hidden_size": hidden,
        "text_config": _decoder(sizes.talker, sizes.codebook_size + CODEC_SPECIALS),
        "code_predictor_config": {
            **_decoder(sizes.predictor, sizes.codebook_size),
            "num_code_groups": sizes.num_code_groups,
        },
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        # As in the released file; without a version, Transformers loads a large local tokenizer as one of Mistral's.
        "transformers_version": "4.57.0",
        "dtype": sizes.dtype,
        "enable_audio_output": True,
        "im_start_token_id": id_of("<|im_start|>"),
        "im_end_token_id": id_of("<|im_end|>"),
        "system_token_id": id_of("system"),
        "user_token_id": id_of("user"),
        "assistant_token_id": id_of("assistant"),
        "tts_pad_token_id": id_of("<tts_pad>"),
        "tts_bos_token_id": id_of("<tts_text_bos>"),
        "tts_eos_token_id": id_of("<tts_text_eod>"),
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": {
            **sizes.code2wav,
            "codebook_size": sizes.codebook_size,
            "num_quantizers": sizes.num_code_groups,
        },
    }


def _decoder(sizes: Json, vocab_size: int) -> Json:
    """Return the text config of thinker, talker or code predictor; the predictor has no experts and no M-RoPE."""
    section = sizes.get("mrope_section")
    fields = {name: value for name, value in sizes.items() if name != "mrope_section"}
    if fields.get("num_experts"):
        fields["norm_topk_prob"] = True
    return fields | {
        "vocab_size": vocab_size,
        "rope_theta": 1_000_000,
        "rope_scaling": section and {"type": "default", "mrope_section": list(section), "interleaved": True},
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
