"""Creates the stream that sends the frames of a reply to the code2wav stage. Pure: no I/O."""

from __future__ import annotations

from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.connectors.codec_stream import CodecStream
from vllm_omni_ext.model_plugins.qwen_omni.pooling import POOLING_TASK

CODE2WAV = "code2wav"


def code2wav_stream(schedule: ChunkSchedule, sample_rate: int) -> CodecStream:
    """Return the `CodecStream` of one reply, which divides its frames into parts (engine requests) for code2wav.

    Args:
        schedule: number of frames in each part.
        sample_rate: Hz.
    """
    return CodecStream(CODE2WAV, schedule, sample_rate, pooling_task=POOLING_TASK)
