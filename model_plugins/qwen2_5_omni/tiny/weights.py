"""Random weights with which a tiny model generates varied text and sound; see `qwen3_omni.tiny.weights`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.vocabulary import Vocabulary
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.weights import (
    BIAS_STD,
    EMBEDDING_STD,
    NORM_STD,
    QUIET,
    SNAKE_STD,
    TALKER_LOGIT_STD,
    THINKER_LOGIT_STD,
    WAVE_RMS,
    Rule,
    draw,
    expected_maximum,
    shape_thinker_head,
)

if TYPE_CHECKING:
    import torch

CALIBRATION_CODES = 16

TALKER_EOS_QUANTILE = 1.9
"""See `qwen3_omni.tiny.weights`. The value is lower than there, since this talker repeats its codes."""

RULES = (
    Rule(r"resblocks\..*\.weight$", 0.5, by_fan_in=True),
    Rule(r"bigvgan.*conv.*\.weight$", 0.8, by_fan_in=True),
    Rule(r"bigvgan.*ups\..*\.weight$", 0.8, by_fan_in=True),
    Rule(r"\.(alpha|beta)$", SNAKE_STD),
    Rule(r"dit_model\..*\.attn_norm\.linear\.weight$", 0.3, by_fan_in=True),
    Rule(r"dit_model\.proj_out\.weight$", 1.0, by_fan_in=True),
    Rule(r"(norm\w*|ln_q|ln_post)\.weight$", NORM_STD, mean=1.0),
    Rule(r"\.bias$", BIAS_STD),
    Rule(r"(embed_tokens|codec_embed|audio_bos_eos_token)\.weight$", EMBEDDING_STD),
    Rule(r"thinker\.lm_head\.weight$", THINKER_LOGIT_STD, by_fan_in=True),
    Rule(r"codec_head\.weight$", TALKER_LOGIT_STD, by_fan_in=True),
    Rule(r"(thinker\.model|talker\.model)\..*self_attn\.(v_proj|o_proj)\.weight$", 1.6, by_fan_in=True),
    Rule(r"(thinker\.model|talker\.model)\..*down_proj\.weight$", 2.0, by_fan_in=True),
    Rule(r"", 1.2, by_fan_in=True),
)
"""Rules of all parameters: the first rule that matches applies; the last rule matches all other parameters."""


def fill(model: Any, vocabulary: Vocabulary, speakers: Mapping[str, Any], generator: torch.Generator) -> None:
    """Draw all parameters of a Qwen2.5-Omni model, in the order of their names."""
    import torch

    with torch.no_grad():
        draw(model, RULES, generator)
        shape_thinker_head(model.thinker.lm_head.weight, vocabulary)
        _shape_codec_head(model.talker.codec_head.weight, model.config)
        _shape_wave(model.token2wav, next(iter(speakers.values())), generator)


def _shape_codec_head(head: torch.Tensor, config: Any) -> None:
    """Restrict the talker to codes and the end of speech; `head` is [talker vocabulary, hidden]."""
    codes, end = config.token2wav_config.dit_config.num_embeds, config.talker_config.tts_codec_end_token_id
    last = head[end].clone()
    head[codes:] = 0.0
    head[end] = last * expected_maximum(codes) / TALKER_EOS_QUANTILE


def _shape_wave(token2wav: Any, speaker: Mapping[str, Any], generator: torch.Generator) -> None:
    """Scale the last convolution [1, channels, kernel] to the loudness `WAVE_RMS`, by a power of two."""
    import torch

    last = token2wav.code2wav_bigvgan_model.conv_post
    last.weight -= last.weight.mean(dim=-1, keepdim=True)
    last.weight *= QUIET
    codes = torch.randint(token2wav.config.dit_config.num_embeds, (1, CALIBRATION_CODES), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sound = token2wav(codes, conditioning=speaker["cond"], reference_mel=speaker["ref_mel"])
    loudness = sound.square().mean().sqrt().item() / QUIET
    last.weight *= 2.0 ** round(math.log2(WAVE_RMS / loudness)) / QUIET
