"""Conversion of input sound to the model's sample rate, with a package that is installed.

vLLM has a method for each of four packages. Its default is torchaudio, which is not installed on a CPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

Method: TypeAlias = Literal["soxr", "scipy", "pyav", "torchaudio"]

METHODS: dict[Method, str] = {"soxr": "soxr", "scipy": "scipy", "pyav": "av", "torchaudio": "torchaudio"}
"""The package of each of vLLM's methods, the preferred one first."""


def available() -> str | None:
    """Return the first method that converts a short sound here; None if there is none."""
    import numpy as np
    from vllm.multimodal.audio import AudioResampler

    for method, package in METHODS.items():
        if find_spec(package) is None:
            continue
        try:
            AudioResampler(16_000, method).resample(np.zeros(2400, np.float32), orig_sr=24_000)
        except (ImportError, OSError, AttributeError):  # a build for another torch, or a library is missing
            continue
        return method
    return None


def use_available(renderer: Any) -> None:
    """Let a renderer's processor convert sound with an installed package, if that of its method is missing."""
    processor = renderer.mm_processor
    if processor is None:
        return
    parsers = (processor.data_parser, processor.info.data_parser)  # vLLM makes one for each of both
    without = [each for each in parsers if find_spec(METHODS[each.audio_resampler.method]) is None]
    if without and (method := available()) is not None:
        for parser in without:
            parser.audio_resampler.method = method
