"""Creates the stream that sends the frames of a reply to the code2wav stage. Pure: no I/O."""

from __future__ import annotations

from typing import Literal

from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import CodecStream

CODE2WAV = "code2wav"
POOLING_TASK: Literal["token_embed"] = "token_embed"
"""Pooling task of every code2wav request. Model Runner V2, vLLM's default on GPUs, accepts only its own tasks (not
"plugin"). This task reads no prefix cache and leaves the pooler's output unchanged, on both runners."""


def code2wav_stream(schedule: ChunkSchedule, sample_rate: int) -> CodecStream:
    """Return the `CodecStream` of one reply, which divides its frames into parts (engine requests) for code2wav.

    Args:
        schedule: number of frames in each part.
        sample_rate: Hz.
    """
    return CodecStream(CODE2WAV, schedule, sample_rate, pooling_task=POOLING_TASK)
