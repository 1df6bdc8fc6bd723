"""Decodes streams of codec frames with the vocoder, for `waveform_model.WaveformPooler`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder, VocoderState
from vllm_omni_ext.model_plugins.qwen_omni.part_streams import Answer, Job, PartStreams
from vllm_omni_ext.wire.stage_input import PartHeader


class VocoderStreams(PartStreams):
    """Decodes the parts of all streams of a step in one call of `Vocoder.decode`, and divides the samples by part."""

    def __init__(
        self, vocoder: Vocoder, *, idle_s: float, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(idle_s=idle_s, most=most, clock=clock)
        self._vocoder = vocoder
        self.frames = 0
        """Number of frames decoded so far, in all streams."""

    def _open(self, header: PartHeader) -> VocoderState:
        return self._vocoder.new_state()

    def _move(self, state: VocoderState, *, to_host: bool) -> None:
        state.flat = state.flat.to("cpu" if to_host else self._vocoder.code_embedding.weight.device)

    def _run(self, jobs: Sequence[Job], answers: list[Answer]) -> None:
        before = [job.stream.state.frames for job in jobs]
        waves = self._vocoder.decode(
            [torch.cat(job.chunks) for job in jobs], [job.stream.state for job in jobs], [job.last for job in jobs]
        )
        for job, wave, frames in zip(jobs, waves, before, strict=True):
            first = start = self._vocoder.samples_after(frames)
            for i, chunk in zip(job.members, job.chunks, strict=True):
                frames += len(chunk)
                end = self._vocoder.samples_after(frames)
                answers[i] = wave[start - first : end - first]
                start = end
            self.frames += sum(map(len, job.chunks))
