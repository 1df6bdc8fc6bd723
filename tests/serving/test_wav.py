"""Sound as samples of 16 bits, WAV and base64."""

from __future__ import annotations

import base64
import io
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.modalities.sound import Base64Pieces, pcm16, wav_stream_header

LOUD = np.sin(np.arange(1001) / 9).astype(np.float32) * 1.5


def as_libsndfile(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 1, format="RAW", subtype="PCM_16", endian="LITTLE")
    return file.getvalue()


def test_samples_equal_those_of_libsndfile() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(-(2**15), 2**15, dtype=np.float64) / 2**15
    near = np.concatenate([steps, np.nextafter(steps, -2), np.nextafter(steps, 2), steps + 0.5 / 2**15])
    for samples in (
        near,
        rng.uniform(-1.5, 1.5, 200_000),
        rng.normal(0, 1e-5, 100_000),
        np.array([1e30, -1e30, -0.0]),
        np.zeros(0),
    ):
        floats = samples.astype(np.float32)
        assert pcm16(floats) == as_libsndfile(floats)


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_a_stream_with_a_wav_header_is_readable(rate: int) -> None:
    data = wav_stream_header(rate) + pcm16(LOUD)
    samples, read_rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (read_rate, samples.tobytes()) == (rate, pcm16(LOUD))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.readframes(10_000)) == (rate, pcm16(LOUD))


@given(st.lists(st.integers(0, 40).map(lambda samples: b"ab" * samples), min_size=1))
def test_pieces_of_base64_add_up_to_the_sound_alone_and_together(pieces: list[bytes]) -> None:
    writer = Base64Pieces()
    written = [writer.write(piece, last=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    assert base64.b64decode("".join(written)) == b"".join(pieces)
    assert b"".join(map(base64.b64decode, written)) == b"".join(pieces)
    assert all(len(base64.b64decode(text)) % 2 == 0 for text in written)
