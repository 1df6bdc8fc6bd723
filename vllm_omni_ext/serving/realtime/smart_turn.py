"""Computes the probability that a turn is complete, with Smart Turn v3 (BSD-2-Clause).

The weights are a file of the package pipecat-ai.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.modalities.sound import Samples
from vllm_omni_ext.serving.realtime import onnx

RATE_HZ = 16_000
SECONDS = 8
"""Length of the model's input: the last 8 s of a turn. A shorter turn is padded with zeros at its beginning."""

MEL_BANDS = 80
INPUT = "input_features"
FILE = "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
ADVICE = "install it with: pip install --no-deps pipecat-ai==1.14.0"


def model_file() -> Path:
    """Return the path of the model's ONNX file.

    Raises:
        ConfigError: onnxruntime or pipecat-ai is not installed.
    """
    onnx.require_runtime("semantic_vad")
    file = onnx.packaged("pipecat", FILE)
    if file is None:
        raise ConfigError(f"semantic_vad: Smart Turn is not installed; {ADVICE}")
    return file


class SmartTurn:
    """Computes the probability that a turn is complete. The first call in a process loads the model.

    Raises:
        ConfigError: see `model_file`.
    """

    def __init__(self) -> None:
        self._file = model_file()

    def completeness(self, samples: Samples) -> float:
        """Return the probability that a turn is complete. A call takes 20 to 100 ms.

        Args:
            samples: the turn, float32 [n] at 16 kHz; only the last `SECONDS` are used.
        """
        (probabilities,) = onnx.session(self._file).run(None, {INPUT: features(samples)})
        return float(np.ravel(probabilities)[0])

    async def completeness_aside(self, samples: Samples) -> float:
        """Like `completeness`, but computed in a thread, for callers in an event loop."""
        return await onnx.aside(self.completeness, samples)


def features(samples: Samples) -> Samples:
    """Return Whisper's log-mel spectrogram of the last `SECONDS`, float32 [1, `MEL_BANDS`, 100 per second]."""
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
