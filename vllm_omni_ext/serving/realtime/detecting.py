"""Computes the probabilities of speech, and of complete turns, in the input sound of one Realtime session."""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any

import numpy as np

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.modalities.sound import Samples
from vllm_omni_ext.serving.realtime import onnx, smart_turn, vad
from vllm_omni_ext.serving.realtime.pcm import RATES, Decoder, SoundFormat
from vllm_omni_ext.serving.realtime.smart_turn import SmartTurn
from vllm_omni_ext.serving.realtime.turns import TurnDetector
from vllm_omni_ext.serving.realtime.vad import RATE_HZ, SileroVad

KEPT_S = 2 * smart_turn.SECONDS
"""Seconds of sound that are kept, to compute the probability that a turn is complete."""

Frames = list[tuple[float, float]]

_MODELS = {"server_vad": vad.model_file, "semantic_vad": smart_turn.model_file}


def available() -> tuple[str, ...]:
    """Return the types of turn detection whose models are installed, the default first.

    The types are "server_vad" and "semantic_vad"; empty if the model of "server_vad" is not installed.
    """
    absent = missing()
    return () if "server_vad" in absent else tuple(kind for kind in _MODELS if kind not in absent)


def missing() -> dict[str, str]:
    """Return the types of turn detection whose models are not installed, with the reasons."""
    absent = {}
    for kind, check in _MODELS.items():
        try:
            check()
        except ConfigError as error:
            absent[kind] = str(error)
    return absent


class _Needed(Exception):
    """Raised when a detector reads a completeness (probability of a complete turn) that is not computed yet."""

    def __init__(self, start_ms: float, end_ms: float) -> None:
        super().__init__()
        self.start_ms, self.end_ms = start_ms, end_ms


class SpeechFrames:
    """Runs the models of turn detection on the sound of one session. Calls of `push` must not overlap."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None
        self._vad: SileroVad | None = None
        self._smart_turn: SmartTurn | None = None
        self._from_ms = 0.0
        self._kept: deque[Samples] = deque()
        self._kept_samples = 0
        self._kept_from_ms = 0.0
        self._computed: dict[tuple[float, float], float] = {}

    def begin(self, sound_format: dict[str, Any] | None, from_ms: float) -> None:
        """Reset before new sound; called at a session's start, at a new format, and if detection is turned on or off.

        Args:
            sound_format: format of the sound, e.g. {"type": "audio/pcm", "rate": 24000}; None: turn detection is off.
            from_ms: position of the first sample in the session's input sound, in ms.
        """
        self._decoder = self._vad = None
        self._from_ms = self._kept_from_ms = from_ms
        self._kept.clear()
        self._kept_samples = 0
        if sound_format is not None:
            kind = sound_format["type"]
            self._decoder, self._vad = Decoder(SoundFormat(kind, RATES[kind]), RATE_HZ), SileroVad()

    async def push(self, data: bytes, detector: TurnDetector) -> Frames:
        """Return (end in ms, probability of speech) of each frame that `data` completes.

        The probabilities of complete turns that `detector` reads for these frames are computed too; `completeness`
        returns them.
        """
        samples, found = await onnx.aside(self._run, data)
        frames = [(self._from_ms + end, each) for end, each in found]
        self._keep(samples)
        await self._compute(frames, detector)
        return frames

    def completeness(self, start_ms: float, end_ms: float) -> float:
        """Return the probability, computed by `push`, that the sound between two times is a complete turn."""
        if (start_ms, end_ms) not in self._computed:
            raise _Needed(start_ms, end_ms)
        return self._computed[start_ms, end_ms]

    def _run(self, data: bytes) -> tuple[Samples, Frames]:
        """Return the samples of `data`, and the frames that they complete, whose ends count from `begin` on."""
        assert self._decoder is not None and self._vad is not None, "detection is on"
        samples = self._decoder.write(data)
        return samples, self._vad.push(samples)

    async def _compute(self, frames: Frames, detector: TurnDetector) -> None:
        """Compute the probabilities of complete turns that the detector reads for the frames.

        Each pass writes the frames to a copy of the detector. The passes end when a copy reads only computed values.
        """
        self._computed.clear()
        while True:
            try:
                copy(detector).write(frames)
            except _Needed as needed:
                self._smart_turn = self._smart_turn or SmartTurn()
                found = await self._smart_turn.completeness_aside(self._between(needed.start_ms, needed.end_ms))
                self._computed[needed.start_ms, needed.end_ms] = found
            else:
                return

    def _keep(self, samples: Samples) -> None:
        self._kept.append(samples)
        self._kept_samples += len(samples)
        while self._kept_samples - len(self._kept[0]) > KEPT_S * RATE_HZ:
            dropped = len(self._kept.popleft())
            self._kept_samples -= dropped
            self._kept_from_ms += dropped * 1000 / RATE_HZ

    def _between(self, start_ms: float, end_ms: float) -> Samples:
        first, last = (round((at - self._kept_from_ms) * RATE_HZ / 1000) for at in (start_ms, end_ms))
        return np.concatenate(self._kept)[max(0, first) : max(0, last)]
