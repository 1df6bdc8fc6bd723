"""Computes probabilities of speech in sound with Silero VAD (MIT). The weights are in the package silero-vad."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.modalities.sound import Samples
from vllm_omni_ext.serving.realtime import onnx

RATE_HZ = 16_000
WINDOW = 512
"""Samples of a frame: 32 ms."""

CONTEXT = 64
"""Number of samples before a frame that are also input of the model."""

STATE = (1, 1, 128)
FILE = "data/silero_vad_16k_sequence.onnx"
"""Model file that takes a sequence of frames per call; its results equal those of the file for single frames."""

MOST_WINDOWS = 256
"""Largest number of frames in one call: 8 s of sound, 0.6 MB of input."""


def model_file() -> Path:
    """Return the path of the model's ONNX file.

    Raises:
        ConfigError: onnxruntime or silero-vad is not installed.
    """
    onnx.require_runtime("server_vad")
    file = onnx.packaged("silero_vad", FILE)
    if file is None:
        raise ConfigError(f"server_vad: the file {FILE} of silero-vad is not installed; run: {onnx.EXTRA}")
    return file


class SileroVad:
    """Computes the probability of speech for each 32 ms of a sound. The first `push` in a process loads the model.

    Raises:
        ConfigError: see `model_file`.
    """

    def __init__(self) -> None:
        self._file = model_file()
        self._h = self._c = np.zeros(STATE, np.float32)
        self._rest = np.zeros(CONTEXT, np.float32)
        """The last `CONTEXT` samples of the preceding frame, and the samples that do not fill a frame yet."""
        self._frames = 0

    def push(self, samples: Samples) -> list[tuple[float, float]]:
        """Add float32 samples [n] at 16 kHz, and return (end in ms, probability) of each frame that they complete.

        The end is counted from the first sample of the sound. A frame takes about 0.1 ms.
        """
        sound = np.concatenate([self._rest, np.asarray(samples, np.float32)])
        count = (len(sound) - CONTEXT) // WINDOW
        self._rest = sound[count * WINDOW :]
        if not count:
            return []
        windows = np.lib.stride_tricks.sliding_window_view(sound, CONTEXT + WINDOW)[::WINDOW][:count]
        calls = range(0, count, MOST_WINDOWS)
        probabilities = np.concatenate([self._run(windows[at : at + MOST_WINDOWS]) for at in calls])
        first, self._frames = self._frames, self._frames + count
        ends = 1e3 * WINDOW / RATE_HZ * np.arange(first + 1, self._frames + 1)
        return list(zip(ends.tolist(), probabilities.tolist(), strict=True))

    def _run(self, windows: Samples) -> Samples:
        inputs = {"input": np.ascontiguousarray(windows), "h": self._h, "c": self._c}
        probabilities: Samples
        probabilities, self._h, self._c = onnx.session(self._file).run(("speech_probs", "hn", "cn"), inputs)
        return probabilities
