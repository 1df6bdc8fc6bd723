"""The model's `config.json`, in the layout of the released checkpoint (`rope_scaling`, `num_experts`, ...).

The field names, the codec special ids and their places above the codebook come from the public `config.json`
of Qwen/Qwen3-Omni-30B-A3B-Instruct; fields that only repeat a Transformers default are left out.
"""

from __future__ import annotations

from dataclasses import asdict
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


def _decoder(sizes: DecoderSizes, vocab_size: int) -> Json:
    """Return the fields that thinker, talker and code predictor share; the predictor has no experts."""
    fields = {name: value for name, value in asdict(sizes).items() if sizes.num_experts or value != 0}
    section = fields.pop("mrope_section")
    if sizes.num_experts:
        fields["norm_topk_prob"] = True
    return fields | {
        "vocab_size": vocab_size,
        "rope_theta": ROPE_THETA,
        "rope_scaling": section and {"type": "default", "mrope_section": list(section), "interleaved": True},
        "sliding_window": None,
        "tie_word_embeddings": False,
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


def _thinker(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    audio, vision = asdict(sizes.audio), asdict(sizes.vision)
    vision["num_position_embeddings"] = (sizes.vision.image_size // sizes.vision.patch_size) ** 2
    vision["apply_vit_abs_pos_embed"] = True  # vLLM reads this field of the released file
    # Without the field, Transformers takes 128 experts.
    text = _decoder(sizes.thinker, text_rows(sizes, vocabulary)) | {"num_experts": sizes.thinker.num_experts}
    text["rope_scaling"]["mrope_interleaved"] = True
    return _media_ids(vocabulary) | {
        "dtype": sizes.dtype,
        "user_token_id": vocabulary.id_of("user"),
        "vision_end_token_id": vocabulary.id_of("<|vision_end|>"),
        "audio_config": audio | {"output_dim": sizes.thinker.hidden_size},
        "vision_config": vision | {"out_hidden_size": sizes.thinker.hidden_size},
        "text_config": text,
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
    predictor = _decoder(sizes.predictor, sizes.codebook_size) | {"num_code_groups": sizes.num_code_groups}
    return {
        **_media_ids(vocabulary),
        **codec_special_ids(sizes),
        "accept_hidden_layer": sizes.accept_hidden_layer,
        "num_code_groups": sizes.num_code_groups,
        "spatial_merge_size": sizes.vision.spatial_merge_size,
        "speaker_id": speaker_ids(sizes),
        "thinker_hidden_size": sizes.thinker.hidden_size,
        "text_config": _decoder(sizes.talker, sizes.talker_vocab_size),
        "code_predictor_config": predictor,
    }


def _code2wav(sizes: Sizes) -> Json:
    return asdict(sizes.code2wav) | {
        "codebook_size": sizes.codebook_size,
        "num_quantizers": sizes.num_code_groups,
        "num_key_value_heads": sizes.code2wav.num_attention_heads,
    }
