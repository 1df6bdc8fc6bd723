"""Sound as bytes."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.modalities.sound import Base64Pieces, pcm16, wav_stream_header

LOUD = np.sin(np.arange(1001) / 9).astype(np.float32) * 1.5


def test_loud_samples_are_clipped() -> None:
    values = np.frombuffer(pcm16(LOUD), "<i2")
    assert (values.min(), values.max()) == (-(2**15), 2**15 - 1)
    inside = np.abs(LOUD) < 1
    assert np.abs(values[inside] / 2**15 - LOUD[inside]).max() < 1 / 2**14


def as_libsndfile(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 1, format="RAW", subtype="PCM_16", endian="LITTLE")
    return file.getvalue()


def test_every_sample_is_as_libsndfile_makes_it() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(-(2**15), 2**15, dtype=np.float64) / 2**15
    near = np.concatenate([steps, np.nextafter(steps, -2), np.nextafter(steps, 2), steps + 0.5 / 2**15])
    for samples in (near, rng.uniform(-1.5, 1.5, 200_000), rng.normal(0, 1e-5, 100_000), np.array([1e30, -1e30, -0.0])):
        floats = samples.astype(np.float32)
        assert pcm16(floats) == as_libsndfile(floats)


@pytest.mark.engine
def test_bare_samples_need_no_libsndfile() -> None:
    look = "import vllm_omni_ext.modalities.sound as e, sys; print('soundfile' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def test_nothing() -> None:
    assert pcm16(np.zeros(0, np.float32)) == b""


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_stream_header_is_readable(rate: int) -> None:
    data = wav_stream_header(rate) + pcm16(LOUD)
    samples, read_rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (read_rate, samples.tobytes()) == (rate, pcm16(LOUD))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.readframes(10_000)) == (rate, pcm16(LOUD))


@given(st.lists(st.integers(0, 40).map(lambda samples: b"ab" * samples), min_size=1))
def test_base64_pieces(pieces: list[bytes]) -> None:
    writer = Base64Pieces()
    written = [writer.write(piece, last=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    assert base64.b64decode("".join(written)) == b"".join(pieces)
    assert b"".join(map(base64.b64decode, written)) == b"".join(pieces)
    assert all(len(base64.b64decode(text)) % 2 == 0 for text in written)
