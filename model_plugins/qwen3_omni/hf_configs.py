"""`hf_overrides` of the stages: the part of a Qwen3-Omni config that a stage's engine uses as its model config.

vLLM first calls each function with a dummy config, which the function returns unchanged. The functions are sent to
other processes by name, so they stay at module level.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from vllm_omni_ext.model_plugins.qwen_omni.hf_configs import part_of

CODE2WAV_POSITION_LIMIT = 1 << 24
"""Upper bound for `max_model_len` of the vocoder stage, in codes. The network has no limit, since its attention window
slides. vLLM requires a bound that is not below the configured `max_model_len`."""


def talker(config: PretrainedConfig) -> PretrainedConfig:
    """Return `talker_config` with added fields of the whole config that the talker needs.

    These are `thinker_vocab_size` (rows of the thinker's embedding table) and the ids of the text-to-speech marks
    `tts_bos_token_id`, `tts_eos_token_id` and `tts_pad_token_id`. M-RoPE sections are set to interleaved. vLLM reads
    the sizes from the nested `text_config`.
    """
    part = part_of(config, "talker_config")
    if part is None:
        return config
    part.architectures = ["Qwen3OmniTalker"]
    part.model_type = "qwen3_omni_talker"
    part.thinker_vocab_size = config.thinker_config.text_config.vocab_size
    # Transformers always interleaves the talker's M-RoPE sections; the released config has no field for this.
    part.text_config.rope_parameters = {**part.text_config.rope_parameters, "mrope_interleaved": True}
    part.tts_bos_token_id = config.tts_bos_token_id
    part.tts_eos_token_id = config.tts_eos_token_id
    part.tts_pad_token_id = config.tts_pad_token_id
    return part


def code2wav(config: PretrainedConfig) -> PretrainedConfig:
    """Return `code2wav_config` with the fields that vLLM requires of any model; codes are its tokens."""
    part = part_of(config, "code2wav_config")
    if part is None:
        return config
    part.architectures = ["Qwen3OmniCode2Wav"]
    part.model_type = "qwen3_omni_code2wav"
    part.vocab_size = part.codebook_size
    part.max_position_embeddings = CODE2WAV_POSITION_LIMIT
    return part
