"""Reads sound of integer samples from containers that only PyAV opens (MKV, MOV, AVI, M4A).

vLLM's loader for PyAV converts integer samples to float without scaling them to [-1, 1], and reads interleaved channels
as one channel. PCM, FLAC and ALAC are decoded to integers, AAC, MP3, Opus and Vorbis to float in separate planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any

import av
import numpy as np
from vllm.multimodal.media import audio

Load = Callable[..., tuple[np.ndarray, float]]
PYAV = "pyav"


_lock = Lock()
_users = 0


@contextmanager
def install() -> Iterator[None]:
    """Replace vLLM's PyAV loader in this process, inside the `with` block, by one that reads integer samples correctly.

    Blocks of several threads may overlap.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _use(partial(_load, audio.load_audio_pyav))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _use(audio.load_audio_pyav.args[0])  # type: ignore[attr-defined]


def _use(load: Load) -> None:
    audio.load_audio_pyav = audio._AUDIO_LOADERS[PYAV] = load


def _load(stock: Load, path: Any, **options: Any) -> tuple[np.ndarray, float]:
    """Read a file with vLLM's loader `stock`; scale integer samples, and mix interleaved channels.

    Returns:
        (samples [n], float32 in [-1, 1]; sample rate in Hz)
    """
    samples, rate = stock(path, **options)
    if isinstance(path, BytesIO):
        path.seek(0)
    with av.open(path) as container:
        stream = container.streams.audio[0]
        form, channels, own_rate = stream.format, stream.channels, stream.rate
    if rate != own_rate or samples.ndim > 1:  # resampled, which makes float of one channel; or not mixed
        return samples, rate
    if form.is_packed and channels > 1:
        samples = samples.reshape(-1, channels).mean(axis=1)
    if form.name.startswith("u8"):
        samples = samples / 128 - 1
    elif form.name.startswith("s"):
        samples = samples / 2 ** (8 * form.bytes - 1)
    return samples.astype(np.float32, copy=False), rate
