"""Sizes of the checkpoints that this package can write, and their `config.json` in the released checkpoint's layout.

The field names, and the places of the codec's special ids above the codebook, are those of the public `config.json` of
Qwen/Qwen2.5-Omni-7B. `RELEASED` has the sizes of that file; fields that repeat a Transformers default are left out.
`SMALL` is tiny. As in the released model, the talker's heads together are not as wide as its hidden states. vLLM has no
CPU attention kernel for head sizes below 32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
"""Number of ids in the thinker's vocabulary above the tokenizer's ids: padding, start and end of spoken text, and the
speakers' ids."""

CODEC_SPECIALS = 255
"""Least number of ids in the talker's vocabulary above the codes. The size of the vocabulary is rounded up to a
multiple of 64 (8448 as released)."""

CODEC_OFFSETS = {
    "tts_codec_pad_token_id": 99,
    "tts_codec_start_token_id": 100,
    "tts_codec_end_token_id": 101,
    "tts_codec_mask_token_id": 103,
}
"""Offset of each special id above the codes; with 8193 codes these are the released 8292, 8293, 8294 and 8296."""

SPEAKERS = {"Chelsie": 3, "Ethan": 4}
"""Name of a speaker -> offset of its text id above the tokenizer's ids. The id precedes the reply in the talker's
prompt."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one complete Qwen2.5-Omni model.

    Attributes:
        text_vocab_size: rows of the thinker's embedding table; 0: as many as the tokenizer needs, rounded up to a
            multiple of 64.
        codes: number of codes of the codec.
        mel, reference_frames, speaker_width: bands and frames of a speaker's reference spectrogram, and the length of
            its embedding.
        thinker, talker, audio, vision, dit, bigvgan: config fields of the decoders, the encoders, the diffusion
            transformer and BigVGAN; missing fields have Transformers' defaults.
    """

    name: str
    text_vocab_size: int
    codes: int
    mel: int
    reference_frames: int
    speaker_width: int
    thinker: Json
    talker: Json
    audio: Json = field(default_factory=dict)
    vision: Json = field(default_factory=dict)
    dit: Json = field(default_factory=dict)
    bigvgan: Json = field(default_factory=dict)
    dtype: str = "float32"


_TINY_DECODER = {
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "mrope_section": (8, 4, 4),
}

SMALL = Sizes(
    name="small",
    text_vocab_size=0,
    codes=64,
    mel=16,
    reference_frames=30,
    speaker_width=16,
    thinker={**_TINY_DECODER, "hidden_size": 64, "num_hidden_layers": 3},
    talker={**_TINY_DECODER, "hidden_size": 96, "head_dim": 32, "num_hidden_layers": 2},
    audio={
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 1,
        "encoder_ffn_dim": 64,
        "n_window": 20,
    },
    vision={
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 1,
        "fullatt_block_indexes": [1],
    },
    dit={
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 16,
        "block_size": 8,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "emb_dim": 16,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
    },
    bigvgan={
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3, 7],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "upsample_rates": [4, 3, 2],
        "upsample_kernel_sizes": [8, 7, 4],
    },
)

_RELEASED_DECODER = {
    "intermediate_size": 18944,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "mrope_section": (16, 24, 24),
}

RELEASED = Sizes(
    name="released-shape",
    text_vocab_size=152064,
    codes=8193,
    mel=80,
    reference_frames=300,
    speaker_width=192,
    dtype="bfloat16",
    thinker={**_RELEASED_DECODER, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
    talker={
        **_RELEASED_DECODER,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "head_dim": 128,
    },
    vision={"hidden_size": 1280},
)


def model_config(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """Return the complete `config.json`."""
    id_of, first, hidden = vocabulary.id_of, vocabulary.size, sizes.thinker["hidden_size"]
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
        "audio_config": {**sizes.audio, "output_dim": hidden},
        "vision_config": {**sizes.vision, "out_hidden_size": hidden},
        "text_config": {
            **_decoder(sizes.thinker),
            "vocab_size": sizes.text_vocab_size or -(-(first + TEXT_MARKS) // 64) * 64,
            "tie_word_embeddings": False,
        },
    }
    talker = {
        **media,
        **vision_marks,
        **_decoder(sizes.talker),
        **{name: sizes.codes + offset for name, offset in CODEC_OFFSETS.items()},
        "tts_text_pad_token_id": first,
        "tts_text_start_token_id": first + 1,
        "tts_text_end_token_id": first + 2,
        "embedding_size": hidden,
        "vocab_size": -(-(sizes.codes + CODEC_SPECIALS) // 64) * 64,
    }
    dit = {"mel_dim": sizes.mel, "num_embeds": sizes.codes, "enc_emb_dim": sizes.speaker_width}
    return {
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "model_type": "qwen2_5_omni",
        "transformers_version": "4.52.0",
        "dtype": sizes.dtype,
        "enable_audio_output": True,
        "thinker_config": thinker,
        "talker_config": talker,
        "token2wav_config": {
            "dit_config": {**sizes.dit, **dit},
            "bigvgan_config": {**sizes.bigvgan, "mel_dim": sizes.mel},
        },
    }


def _decoder(sizes: Json) -> Json:
    """Return the text config of thinker or talker, without its vocabulary."""
    fields = {name: value for name, value in sizes.items() if name != "mrope_section"}
    scaling = {"type": "default", "mrope_section": list(sizes["mrope_section"])}
    return {**fields, "rope_theta": 1_000_000, "rope_scaling": scaling}


def speaker_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the text id of each speaker by name (see `SPEAKERS`)."""
    return {name: vocabulary.size + offset for name, offset in SPEAKERS.items()}
