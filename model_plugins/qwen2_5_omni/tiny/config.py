"""Sizes of the tiny checkpoint, and its `config.json` in the released checkpoint's layout.

The field names, and the places of the codec's special ids above the codebook, are those of the public `config.json` of
Qwen/Qwen2.5-Omni-7B. As there, the talker's heads together are not as wide as its hidden states. vLLM has no CPU
attention kernel for head sizes below 32.
"""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary

Json = dict[str, Any]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
"""The added tokens of the released tokenizer in id order (151643 .. 151656)."""

NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""Attributes that the processor reads from the tokenizer."""

TEXT_MARKS = 8
"""Ids of the thinker's vocabulary above the tokenizer's: padding, start and end of spoken text, and the speakers'."""

CODES = 64
"""Number of codes of the codec (8193 as released)."""

CODEC_OFFSETS = {
    "tts_codec_pad_token_id": 99,
    "tts_codec_start_token_id": 100,
    "tts_codec_end_token_id": 101,
    "tts_codec_mask_token_id": 103,
}
"""Offset of each special id above the codes; with 8193 codes these are the released 8292, 8293, 8294 and 8296."""

SPEAKERS = {"Chelsie": 3, "Ethan": 4}
"""Offset above the tokenizer's ids of the id that opens a speaker's text."""

MEL, REFERENCE_FRAMES, SPEAKER_WIDTH = 16, 30, 16

_DECODER = {
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 1_000_000,
    "rope_scaling": {"type": "default", "mrope_section": [8, 4, 4]},
}

AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 1,
    "encoder_ffn_dim": 64,
    "n_window": 20,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 1,
    "fullatt_block_indexes": [1],
}
DIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 16,
    "block_size": 8,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "emb_dim": 16,
    "enc_emb_dim": SPEAKER_WIDTH,
    "enc_dim": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "mel_dim": MEL,
    "num_embeds": CODES,
}
BIGVGAN = {
    "mel_dim": MEL,
    "upsample_initial_channel": 32,
    "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_rates": [4, 3, 2],
    "upsample_kernel_sizes": [8, 7, 4],
}
HIDDEN = 64


def model_config(vocabulary: Vocabulary) -> Json:
    """Return the complete `config.json`."""
    id_of, first = vocabulary.id_of, vocabulary.size
    media = {
        "audio_token_index": id_of("<|AUDIO|>"),
        "audio_start_token_id": id_of("<|audio_bos|>"),
        "audio_end_token_id": id_of("<|audio_eos|>"),
        "image_token_index": id_of("<|IMAGE|>"),
        "video_token_index": id_of("<|VIDEO|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    vision_marks = {
        "vision_start_token_id": id_of("<|vision_bos|>"),
        "vision_end_token_id": id_of("<|vision_eos|>"),
    }
    thinker = {
        **media,
        **vision_marks,
        "user_token_id": id_of("user"),
        "audio_config": {**AUDIO, "output_dim": HIDDEN},
        "vision_config": {**VISION, "out_hidden_size": HIDDEN},
        "text_config": {
            **_DECODER,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "vocab_size": -(-(first + TEXT_MARKS) // 64) * 64,
            "tie_word_embeddings": False,
        },
    }
    talker = {
        **media,
        **vision_marks,
        **_DECODER,
        **{name: CODES + offset for name, offset in CODEC_OFFSETS.items()},
        "tts_text_pad_token_id": first,
        "tts_text_start_token_id": first + 1,
        "tts_text_end_token_id": first + 2,
        "embedding_size": HIDDEN,
        "hidden_size": 96,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": CODES + 256,
    }
    return {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "model_type": "qwen2_5_omni",
        "transformers_version": "4.52.0",
        "dtype": "float32",
        "enable_audio_output": True,
        "thinker_config": thinker,
        "talker_config": talker,
        "token2wav_config": {"dit_config": DIT, "bigvgan_config": BIGVGAN},
    }


def speaker_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id that opens the text of each speaker."""
    return {name: vocabulary.size + offset for name, offset in SPEAKERS.items()}
