"""HTTP interface of Qwen2.5-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

from __future__ import annotations

from vllm_omni_ext.model_plugins.qwen_omni.speech import SpeakingHttp

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""System prompt with which the released checkpoints were trained to speak."""

OPENING = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
"""Conversation before a text that is read out: the system prompt and an empty user turn."""


class Qwen2_5OmniHttp(SpeakingHttp):
    """`plugins.http.HttpSurface` of Qwen2.5-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

    opening = OPENING
