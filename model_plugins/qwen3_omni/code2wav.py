"""The vocoder as a vLLM model: codec frames in as prompt tokens, a waveform out (`qwen_omni.waveform_model`)."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig

from vllm_omni_ext.engine.graphs import recorder_for
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder import Vocoder
from vllm_omni_ext.model_plugins.qwen3_omni.vocoder_streams import VocoderStreams
from vllm_omni_ext.model_plugins.qwen_omni.waveform_model import WaveformModel, WaveformPooler

WARM_UP_FRAMES = 16
"""Frames decoded when vLLM profiles the model or warms it up. More would not need more memory: the vocoder limits the
frames of a pass."""


class Qwen3OmniCode2Wav(WaveformModel):
    """The pooling model that vLLM runs for the code2wav stage; its config is the checkpoint's `code2wav_config`."""

    checkpoint_prefix = "code2wav."

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config)
        vocoder = Vocoder(vllm_config.model_config.hf_config)
        self._streams: int = vllm_config.scheduler_config.max_num_seqs
        streams = VocoderStreams(vocoder, idle_s=self.idle_s, most=self._streams)
        self.pooler = WaveformPooler(vocoder, streams, try_out=self._try_out)

    def _try_out(self) -> None:
        """Run every kernel once, on `WARM_UP_FRAMES` frames."""
        vocoder = self.pooler.vocoder
        codes = torch.zeros(WARM_UP_FRAMES, vocoder.groups, dtype=torch.int64)
        vocoder.decode([codes], [vocoder.new_state()], [True])

    def warm_up(self) -> None:
        """Compile kernels and record graphs at the end of the start-up, so that the first request does not wait."""
        vocoder = self.pooler.vocoder
        recorder = recorder_for(vocoder.code_embedding.weight.device, eager=False)
        if recorder is not None:
            vocoder.record(recorder, streams=self._streams)
        vocoder.warm_up()
