"""Contents of a checkpoint's text files: tokenizer, chat template, processor and generation settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.config import MERGED_PATCHES, PATCH, RELEASED, Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import NOT_SPECIAL, Vocabulary

Json = dict[str, Any]

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""File with the chat template: ChatML without a default system turn; each media part becomes one placeholder."""

NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Attributes that the processor reads from the tokenizer."""

_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_json(vocabulary: Vocabulary) -> Json:
    """Return `tokenizer.json`: byte-level BPE with the Qwen word split."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary.ids), merges=list(vocabulary.merges)))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORD_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, normalized=False, special=token not in NOT_SPECIAL) for token in vocabulary.specials]
    tokenizer.add_tokens(added)
    made: Json = json.loads(tokenizer.to_str())
    return made


def tokenizer_config(vocabulary: Vocabulary, names: Mapping[str, str] = MappingProxyType(NAMED_TOKENS)) -> Json:
    """Return `tokenizer_config.json`; `names` are the attributes that the processor reads from the tokenizer."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(token.pop("id")): token for token in tokenizer_json(vocabulary)["added_tokens"]},
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 131072,
        "extra_special_tokens": dict(names),
        **names,
    }


PREPROCESSOR_CONFIG: Json = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "chunk_length": 300,
    "feature_size": 128,
    "return_attention_mask": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": PATCH,
    "merge_size": MERGED_PATCHES,
    "temporal_patch_size": 2,
}
"""`preprocessor_config.json`: Whisper mel features, and image/video patches of the vision tower's size.

`min_pixels` allows an image of two by two merged patches (64 x 64 pixels, 4 tokens). Qwen3-Omni's processor requires at
least 128 x 32 x 32 pixels per pair of video frames, independent of this file.
"""


def generation_config(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """Return `generation_config.json`: the talker's released sampling, and the end token unless sizes are `RELEASED`.

    The released file has no end token: Transformers then uses `<|im_end|>`, the tokenizer's `eos_token`.
    """
    talker = {
        "talker_max_new_tokens": 4096,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
    }
    if sizes is RELEASED:
        return talker
    return {"eos_token_id": vocabulary.id_of("<|im_end|>"), "pad_token_id": vocabulary.id_of("<|endoftext|>")} | talker
