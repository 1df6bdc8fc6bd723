"""HTTP interface of Qwen2.5-Omni: chat, `/v1/audio/speech` and `/v1/realtime`."""

from __future__ import annotations

from typing import Any

from vllm_omni_ext.model_plugins.qwen2_5_omni.flow import TALKER
from vllm_omni_ext.model_plugins.qwen3_omni.http import refuse_others, rendered
from vllm_omni_ext.plugins.http import REALTIME, SPEECH, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""System prompt with which the released checkpoints were trained to speak."""

OPENING = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
"""Prompt of a text that is read out: an empty user turn."""


class Qwen2_5OmniHttp(HttpSurface):
    """Serves speech requests and realtime sessions in addition to chat."""

    apis = (SPEECH, REALTIME)
    speech_stage = TALKER

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Return the request that reads the body's text out.

        Raises:
            RequestError: the text is empty or too long, or the body has a field that the talker does not support.
        """
        refuse_others(body)
        return await rendered(body.input, server, opening=OPENING)
