"""Completeness of turns, by Smart Turn v3 (BSD-2-Clause). The weights are a file of the package pipecat-ai, or the
user's.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.modalities.sound import Samples
from vllm_omni_ext.serving.realtime import onnx

RATE_HZ = 16_000
SECONDS = 8
"""The model reads the end of a turn, with zeros before a shorter one."""

MEL_BANDS = 80
INPUT = "input_features"
FILE = "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
ADVICE = "install it with: pip install --no-deps pipecat-ai==1.14.0; or set the path of a smart-turn-v3 ONNX file"


def model_file(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the model's file.

    Args:
        path: the user's own file; None: that of pipecat-ai.

    Raises:
        ConfigError: there is no such file, or onnxruntime is not installed.
    """
    onnx.require_runtime("semantic_vad")
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"semantic_vad: {os.fspath(path)}: there is no such file")
        return Path(path)
    file = onnx.packaged("pipecat", FILE)
    if file is None:
        raise ConfigError(f"semantic_vad: Smart Turn is not installed; {ADVICE}")
    return file


class SmartTurn:
    """Computes the probability that a turn is complete. The first call of a process loads the model.

    Raises:
        ConfigError: see `model_file`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._file = model_file(path)

    def completeness(self, samples: Samples) -> float:
        """Return the probability for float32 samples [n] at 16 kHz, of which the last `SECONDS` count.

        It computes 20 to 100 ms; in an event loop use `completeness_aside`.
        """
        (probabilities,) = onnx.session(self._file).run(None, {INPUT: features(samples)})
        return float(np.ravel(probabilities)[0])

    async def completeness_aside(self, samples: Samples) -> float:
        """Like `completeness`, in a thread."""
        return await onnx.aside(self.completeness, samples)


def features(samples: Samples) -> Samples:
    """Return Whisper's log-mel spectrogram, float32 [1, `MEL_BANDS`, 100 a second], of the last `SECONDS`."""
    length = SECONDS * RATE_HZ
    sound = np.asarray(samples, np.float32)[-length:]
    sound = np.concatenate([np.zeros(length - len(sound), np.float32), sound])
    found = _extractor()(sound, sampling_rate=RATE_HZ, return_tensors="np", do_normalize=True)
    spectrogram: Samples = found[INPUT].astype(np.float32)
    return spectrogram


@cache
def _extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=MEL_BANDS, sampling_rate=RATE_HZ, chunk_length=SECONDS)
