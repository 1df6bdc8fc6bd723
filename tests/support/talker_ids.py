"""Small special ids for tests of the pure parts, and prompts written with words."""

from __future__ import annotations

from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds

IDS = SpecialIds(
    im_start=1,
    user=2,
    assistant=3,
    tts_bos=5,
    tts_eos=6,
    tts_pad=7,
    multimodal=frozenset((11, 12, 13)),
    codec_nothink=70,
    codec_think_bos=71,
    codec_think_eos=72,
    codec_pad=73,
    codec_bos=74,
    codec_eos=75,
    speakers={"ethan": 80, "chelsie": 81},
)
SYSTEM, NEWLINE, IM_END = 4, 8, 9
AUDIO, IMAGE, VIDEO = 11, 12, 13


def turn(role: int, *content: int) -> list[int]:
    """A complete turn of the chat template."""
    return [IDS.im_start, role, NEWLINE, *content, IM_END, NEWLINE]


def user(*content: int) -> list[int]:
    return turn(IDS.user, *content)


HEADER = [IDS.im_start, IDS.assistant, NEWLINE]
