"""Token2wav: converts the codes of an utterance to samples, part by part.

`StreamingDiT` converts codes to mel frames, and BigVGAN converts mel frames to samples. BigVGAN has only convolutions:
a sample depends on mel frames at most `margin` away. Final mel frames are therefore decoded in windows that overlap by
twice `margin`, and the samples in the middle of each window equal those of the whole utterance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from vllm_omni_ext.engine.graphs import Recorder
from vllm_omni_ext.model_plugins.qwen2_5_omni.dit import DiTState, StreamingDiT, Voice
from vllm_omni_ext.model_plugins.qwen2_5_omni.reach import MOST_WINDOW_FRAMES, reach
from vllm_omni_ext.model_plugins.qwen2_5_omni.solver import Solver

TRIED_CODES = 16
"""Codes decoded when vLLM profiles the model or warms it up."""


class UtteranceState:
    """State of one utterance between its parts.

    Attributes:
        dit: state of the transformer.
        mel: final mel frames that later samples depend on, [frames, mel].
        first: position in the utterance of the first frame of `mel`.
        decoded: number of mel frames whose samples were returned.
    """

    def __init__(self, dit: DiTState, mel: Tensor) -> None:
        self.dit = dit
        self.mel = mel
        self.first = 0
        self.decoded = 0

    @property
    def final(self) -> int:
        """Number of mel frames of the utterance that later codes do not change any more."""
        return self.first + len(self.mel)


class Token2Wav(nn.Module):
    """Decodes codes of several utterances; the noise of each utterance is drawn from its own seed.

    Parameter names are those of a checkpoint's `token2wav.*` tensors without that prefix.

    Args:
        config: a checkpoint's `token2wav_config`.

    Attributes:
        groups: codes in a frame.
        codebook_size: every code is in `0 .. codebook_size - 1`.
        margin: mel frames on each side that a sample depends on.
        samples_per_frame: samples of a mel frame (240 as released).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._dit = StreamingDiT(config.dit_config)
        self.code2wav_dit_model = self._dit.model
        device = torch.get_default_device()
        with torch.device("cpu"):  # on a device, torch would compile a kernel for the window of the filters
            vocoder = Qwen2_5OmniToken2WavBigVGANModel(config.bigvgan_config)
        self.code2wav_bigvgan_model = vocoder.to(device)
        self.groups = 1
        self.codebook_size = self._dit.codes
        self.margin = reach(config.bigvgan_config)
        self.samples_per_frame = math.prod(config.bigvgan_config.upsample_rates)
        self._voices: dict[str, Voice] = {}
        self._speakers: Mapping[str, Mapping[str, Any]] = {}
        self.eval()  # Transformers' modules have dropout

    def set_speakers(self, speakers: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the checkpoint's speakers, in the form that `speakers.speakers_of` returns."""
        self._speakers = speakers

    def record(self, recorder: Recorder) -> None:
        """Record layers of the transformer as CUDA graphs, which `decode` then replays (see `dit_graphs.py`)."""
        self._dit.record(recorder)

    @torch.inference_mode()
    def new_state(self, voice: str, seed: int, solver: Solver) -> UtteranceState:
        """Return the state of a new utterance.

        Args:
            voice: name of the speaker.
            seed: seed of the utterance's noise.
            solver: parameters of the equation.

        Raises:
            ValueError: the checkpoint has no such speaker.
        """
        if voice not in self._voices:
            if voice not in self._speakers:
                raise ValueError(f"the checkpoint has no speaker '{voice}'")
            found = self._speakers[voice]
            device = self._dit.device
            self._voices[voice] = self._dit.voice(found["cond"].float().to(device), found["ref_mel"].float().to(device))
        dit = DiTState(self._voices[voice], solver, seed)
        return UtteranceState(dit, torch.zeros(0, self._dit.mel, device=self._dit.device))

    def move(self, state: UtteranceState, *, to_host: bool) -> None:
        """Move the tensors of an utterance to host memory, or back to the device."""
        device = torch.device("cpu") if to_host else self._dit.device
        state.mel = state.mel.to(device)
        state.dit.move(device)

    def try_out(self) -> None:
        """Decode a dummy utterance of `TRIED_CODES` codes, which compiles the kernels."""
        state = self.new_state(next(iter(self._speakers)), 0, Solver())
        self.decode([torch.zeros(TRIED_CODES, dtype=torch.int64)], [state], [True])

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor], states: Sequence[UtteranceState], lasts: Sequence[bool]) -> list[Tensor]:
        """Add codes to utterances; return for each utterance the samples that became final, [samples] float32.

        Args:
            codes: for each utterance its new codes, int64 [n]; n may be 0.
            states: state of each utterance, updated in place.
            lasts: for each utterance whether no codes follow.
        """
        made = self._dit.decode(codes, [state.dit for state in states], lasts)
        return [self._sound(*each) for each in zip(made, states, lasts, strict=True)]

    def _sound(self, new: Tensor, state: UtteranceState, last: bool) -> Tensor:
        state.mel = torch.cat([state.mel, new])
        stop = state.final if last else state.final - self.margin
        pieces = []
        while state.decoded < stop:
            end = min(stop, state.decoded + MOST_WINDOW_FRAMES)
            first, after = max(state.decoded - self.margin, 0), min(end + self.margin, state.final)
            window = state.mel[first - state.first : after - state.first]
            wave = self.code2wav_bigvgan_model(window.T[None]).reshape(-1)
            pieces.append(
                wave[(state.decoded - first) * self.samples_per_frame : (end - first) * self.samples_per_frame]
            )
            state.decoded = end
        unused = max(state.decoded - self.margin, 0) - state.first
        if unused > 0:
            state.mel, state.first = state.mel[unused:].clone(), state.first + unused
        return torch.cat(pieces) if pieces else torch.zeros(0)
