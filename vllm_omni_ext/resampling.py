"""Selects the method with which vLLM converts input sound to the model's sample rate, by the installed packages.

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
"""vLLM's name of a method -> (package that it needs, function that converts a test sound with the package).

The preferred method is the first.
"""


def available() -> str | None:
    """Return the first method of `METHODS` that can convert a short test sound in this process; None if none can."""
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
    """Set the conversion method of a vLLM renderer's multimodal processor to `available`.

    Does nothing if the package of the processor's own method is installed, or if no method is available.
    """
    processor = renderer.mm_processor
    if processor is None:
        return
    parsers = (processor.data_parser, processor.info.data_parser)  # vLLM makes one for each of both
    without = [each for each in parsers if find_spec(METHODS[each.audio_resampler.method][0]) is None]
    if without and (method := available()) is not None:
        for parser in without:
            parser.audio_resampler.method = method
