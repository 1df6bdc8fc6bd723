"""The small text files next to the weights: tokenizer, chat template, processor and generation settings."""

from __future__ import annotations

import json
from typing import Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.sizes import RELEASED, Sizes
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import NOT_SPECIAL, Vocabulary

Json = dict[str, Any]

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] in ('audio', 'audio_url', 'input_audio') or 'audio' in content %}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
            {%- elif content['type'] in ('image', 'image_url') or 'image' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif content['type'] in ('video', 'video_url') or 'video' in content %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML as Qwen3-Omni uses it: no default system turn; each media part becomes one placeholder."""

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
    """`tokenizer.json`: byte-level BPE with the Qwen word split."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary.ids), merges=list(vocabulary.merges)))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORD_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(**_added(token)) for token in vocabulary.specials])
    made: Json = json.loads(tokenizer.to_str())
    return made


def _added(token: str) -> Json:
    """Return one entry of the added tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": token, **flags, "special": token not in NOT_SPECIAL}


def tokenizer_config(vocabulary: Vocabulary) -> Json:
    """`tokenizer_config.json`."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {str(id_): _added(token) for token, id_ in vocabulary.specials.items()},
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 131072,
        "extra_special_tokens": NAMED_TOKENS,
        **NAMED_TOKENS,
    }


def preprocessor_config(sizes: Sizes) -> Json:
    """`preprocessor_config.json`: Whisper mel features, and image/video patches of the vision tower's size.

    `min_pixels` allows an image of two by two merged patches (64 x 64 pixels, 4 tokens). Qwen3-Omni's processor
    requires at least 128 x 32 x 32 pixels per pair of video frames, independent of this file.
    """
    vision = sizes.vision
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "chunk_length": 300,
        "dither": 0.0,
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 4800000,
        "nb_max_frames": 30000,
        "sampling_rate": 16000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }


def generation_config(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """`generation_config.json`: the talker's released sampling defaults and, where there are weights, the end token.

    The released file names no end token: readers fall back to `<|im_end|>`, the tokenizer's `eos_token`.
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
