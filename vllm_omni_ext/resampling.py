"""Conversion of input sound to the model's sample rate, with a package that is installed.

vLLM has a method for each of four packages. Its default is torchaudio, which is not installed on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

RATE_HZ, OTHER_HZ, SAMPLES = 24_000, 16_000, 2400


def _soxr(sound: Any) -> Any:
    import soxr

    return soxr.resample(sound, RATE_HZ, OTHER_HZ)


def _scipy(sound: Any) -> Any:
    from scipy.signal import resample_poly

    return resample_poly(sound, OTHER_HZ, RATE_HZ)


def _pyav(sound: Any) -> Any:
    import av
    import numpy as np

    frame = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format="fltp", layout="mono")
    frame.sample_rate = RATE_HZ
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=OTHER_HZ)
    return np.concatenate([each.to_ndarray()[0] for each in (*resampler.resample(frame), *resampler.resample(None))])


def _torchaudio(sound: Any) -> Any:
    import torch
    import torchaudio

    return torchaudio.functional.resample(torch.from_numpy(sound), RATE_HZ, OTHER_HZ).numpy()


METHODS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "soxr": ("soxr", _soxr),
    "scipy": ("scipy", _scipy),
    "pyav": ("av", _pyav),
    "torchaudio": ("torchaudio", _torchaudio),
}
"""Package and trial of each of vLLM's methods, the preferred one first."""


def available() -> str | None:
    """Return the first method that converts a short sound here; None if there is none."""
    import numpy as np

    for method, (package, convert) in METHODS.items():
        if find_spec(package) is None:
            continue
        try:
            made = convert(np.zeros(SAMPLES, np.float32))
        except (ImportError, OSError, AttributeError):  # a build for another torch, or a library is missing
            continue
        if abs(len(made) - SAMPLES * OTHER_HZ / RATE_HZ) <= 1 + SAMPLES // 10:
            return method
    return None


def use_available(renderer: Any) -> None:
    """Let a renderer's processor convert sound with an installed package, if that of its method is missing."""
    processor = renderer.mm_processor
    if processor is None:
        return
    parsers = (processor.data_parser, processor.info.data_parser)  # vLLM makes one for each of both
    without = [each for each in parsers if find_spec(METHODS[each.audio_resampler.method][0]) is None]
    if without and (method := available()) is not None:
        for parser in without:
            parser.audio_resampler.method = method
