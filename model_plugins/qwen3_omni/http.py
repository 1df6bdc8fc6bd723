"""HTTP interface of Qwen3-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

from __future__ import annotations

from vllm_omni_ext.model_plugins.qwen_omni.speech import SpeakingHttp

OPENING = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
"""Conversation before a text that is read out: an empty user turn, since the talker was trained on conversations."""


class Qwen3OmniHttp(SpeakingHttp):
    """`plugins.http.HttpSurface` of Qwen3-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

    opening = OPENING
