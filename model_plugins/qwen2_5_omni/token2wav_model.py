"""Token2wav as a vLLM model: codes in as prompt tokens, a waveform out (`qwen_omni.waveform_model`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig

from vllm_omni_ext.engine.graphs import recorder_for
from vllm_omni_ext.model_plugins.qwen2_5_omni.facts import EVALUATIONS
from vllm_omni_ext.model_plugins.qwen2_5_omni.messages import Utterance
from vllm_omni_ext.model_plugins.qwen2_5_omni.solver import Solver
from vllm_omni_ext.model_plugins.qwen2_5_omni.speakers import speakers_of
from vllm_omni_ext.model_plugins.qwen2_5_omni.token2wav import Token2Wav, UtteranceState
from vllm_omni_ext.model_plugins.qwen_omni.part_streams import Answer, Job, NoRoom, PartStreams
from vllm_omni_ext.model_plugins.qwen_omni.waveform_model import WaveformModel, WaveformPooler
from vllm_omni_ext.wire.stage_input import PartHeader


class UtteranceStreams(PartStreams):
    """Decodes the parts of all streams of a step in one call of `Token2Wav.decode`.

    The sound of a code becomes final many parts later (see `dit.py`), so the first parts of a stream have no samples.

    Args:
        most: number of utterances for which memory is planned, each with the default number of evaluations. One with
            more evaluations is refused if the open ones leave too few.
    """

    def __init__(self, token2wav: Token2Wav, *, idle_s: float, most: int) -> None:
        super().__init__(idle_s=idle_s, most=most)
        self._token2wav = token2wav

    def _open(self, header: PartHeader) -> UtteranceState:
        try:
            opened = msgspec.convert(header.payload, Utterance)
        except msgspec.ValidationError as error:
            raise ValueError(f"payload: {error}") from error
        params = opened.params
        solver = Solver(params.num_steps, params.guidance_scale, params.sway_coefficient)
        if params.seed is None:
            raise ValueError("payload: the first part of an utterance has a seed")
        held = sum(stream.state.dit.solver.evaluations for stream in self._streams.values())
        if solver.evaluations > EVALUATIONS and held + solver.evaluations > self._most * EVALUATIONS:
            default = Solver().num_steps
            raise NoRoom(f"num_steps: {params.num_steps} need memory that other answers have; use {default}, or wait")
        return self._token2wav.new_state(opened.speaker, params.seed, solver)

    def _size(self, state: UtteranceState) -> float:
        return state.dit.solver.evaluations / EVALUATIONS

    def _move(self, state: UtteranceState, *, to_host: bool) -> None:
        self._token2wav.move(state, to_host=to_host)

    def _run(self, jobs: Sequence[Job], answers: list[Answer]) -> None:
        """Decode the codes of all jobs. Of several parts of a stream, the answer of the last has all samples."""
        codes = [torch.cat(job.chunks).flatten() for job in jobs]
        waves = self._token2wav.decode(codes, [job.stream.state for job in jobs], [job.last for job in jobs])
        for job, wave in zip(jobs, waves, strict=True):
            for i in job.members:
                answers[i] = torch.zeros(0)
            answers[job.members[-1]] = wave


class Qwen2_5OmniToken2Wav(WaveformModel):
    """The pooling model that vLLM runs for the token2wav stage; its config is the checkpoint's `token2wav_config`."""

    checkpoint_prefix = "token2wav."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config)
        model_config: Any = vllm_config.model_config
        token2wav = Token2Wav(model_config.hf_config)
        token2wav.set_speakers(speakers_of(model_config.model, model_config.revision))
        self.pooler = WaveformPooler(
            token2wav,
            UtteranceStreams(token2wav, idle_s=self.idle_s, most=vllm_config.scheduler_config.max_num_seqs),
            try_out=token2wav.try_out,
        )

    def warm_up(self) -> None:
        """Record graphs and run every kernel once, so that the first request does not wait."""
        token2wav = self.pooler.vocoder
        if (recorder := recorder_for(token2wav.code2wav_dit_model.proj_out.weight.device, eager=False)) is not None:
            token2wav.record(recorder)
        token2wav.try_out()
