"""Reads sound with vLLM's loaders that use FFmpeg: corrects integer samples, and refuses references to other data.

vLLM's loader for PyAV, which reads MKV, MOV, AVI and M4A, converts integer samples to float without scaling them to
[-1, 1], and reads interleaved channels as one channel. PCM, FLAC and ALAC are decoded to integers, AAC, MP3, Opus and
Vorbis to float in separate planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from vllm.multimodal.media import audio

from vllm_omni_ext.serving.limits import references

Load = Callable[..., tuple[np.ndarray, float]]
_lock = Lock()
_users = 0


@contextmanager
def install() -> Iterator[None]:
    """Replace vLLM's loaders for PyAV and TorchCodec in this process, inside the `with` block.

    Blocks of several threads may overlap.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for name, load in _LOADERS.items():
                _use(name, partial(load, audio._AUDIO_LOADERS[name]))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for name in _LOADERS:
                    _use(name, audio._AUDIO_LOADERS[name].args[0])  # type: ignore[attr-defined]


def _use(name: str, load: Load) -> None:
    audio._AUDIO_LOADERS[name] = load
    setattr(audio, f"load_audio_{name}", load)


def _load_pyav(stock: Load, path: Any, **options: Any) -> tuple[np.ndarray, float]:
    """Read a file with vLLM's loader `stock`; scale integer samples, and mix interleaved channels.

    Returns:
        (samples [n], float32 in [-1, 1]; sample rate in Hz)

    Raises:
        ValueError: the file is no sound, or refers to other files or to addresses.
    """
    file = _in_memory(path)
    with references.opened(file) as container:
        if not container.streams.audio:
            raise ValueError("No audio stream found.")
        stream = container.streams.audio[0]
        form, channels, own_rate = stream.format, stream.channels, stream.rate
    file.seek(0)
    samples, rate = stock(file, **options)
    if rate != own_rate or samples.ndim > 1:  # resampled, which makes float of one channel; or not mixed
        return samples, rate
    if form.is_packed and channels > 1:
        samples = samples.reshape(-1, channels).mean(axis=1)
    if form.name.startswith("u8"):
        samples = samples / 128 - 1
    elif form.name.startswith("s"):
        samples = samples / 2 ** (8 * form.bytes - 1)
    return samples.astype(np.float32, copy=False), rate


def _load_torchcodec(stock: Load, path: Any, **options: Any) -> tuple[np.ndarray, float]:
    """Read a file with vLLM's loader `stock`; raise ValueError if it refers to other files or to addresses."""
    if audio.AudioDecoder is None:
        return stock(path, **options)  # raises ImportError, at which vLLM uses another loader
    file = _in_memory(path)
    references.opened(file).close()
    file.seek(0)
    return stock(file, **options)


def _in_memory(path: Any) -> BytesIO:
    """Return a sound as a file in memory, because FFmpeg needs a protocol for a path. vLLM has limited its bytes."""
    return path if isinstance(path, BytesIO) else BytesIO(Path(path).read_bytes())


_LOADERS: dict[str, Load] = {"pyav": _load_pyav, "torchcodec": _load_torchcodec}
"""Functions that call vLLM's loaders, by the loader's key in vLLM's `_AUDIO_LOADERS`."""
