"""Sound as samples of 16 bits, streamed files and base64."""

from __future__ import annotations

import base64
import io
import wave

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.modalities.sound import CHAT_FORMATS, Base64Pieces, SoundStream, encode, pcm16, wav_stream_header

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


def decoded(data: bytes) -> tuple[int, np.ndarray]:
    """Return rate and float samples."""
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.audio
        to_floats = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [made for frame in file.decode(stream) for made in to_floats.resample(frame)]
        return stream.rate, np.concatenate([frame.to_ndarray()[0] for frame in frames])


FILES = sorted(name for name, encoding in CHAT_FORMATS.items() if encoding.muxer)
TUNE = (np.sin(np.arange(24_000) / 9) * np.sin(np.arange(24_000) / 1500) * 0.8).astype(np.float32)


@pytest.mark.parametrize("rate", [24_000, 22_050])
@pytest.mark.parametrize("name", FILES)
def test_a_streamed_file_has_the_sound(name: str, rate: int) -> None:
    stream, pieces = SoundStream(CHAT_FORMATS[name]), np.split(TUNE, [0, 1, 301, 2400, 2400, 14_000])
    written = [stream.write(piece, rate, last=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    assert all(written[3:4] + written[5:])  # a piece is sent when it is written
    found_rate, found = decoded(b"".join(written))
    expected = (
        TUNE if found_rate == rate else np.interp(np.arange(0, 24_000, rate / found_rate), np.arange(24_000), TUNE)
    )
    assert 0 <= len(found) - len(expected) <= 0.1 * rate  # encoders pad their first and last block
    shifts = [found[at : at + len(expected)] for at in range(len(found) - len(expected) + 1)]
    assert min(np.abs(each - expected).mean() for each in shifts) < 0.06 * np.abs(TUNE).mean()  # LAME: 0.95 as loud
    if name == "flac":
        assert np.array_equal(np.rint(found * 2**15), np.frombuffer(pcm16(TUNE), "<i2"))


@pytest.mark.parametrize("name", FILES)
def test_a_sound_without_samples_is_a_file(name: str) -> None:
    nothing = np.zeros(0, np.float32)
    assert isinstance(SoundStream(CHAT_FORMATS[name]).write(nothing, 24_000, last=True), bytes)
    assert isinstance(encode(nothing, 24_000, CHAT_FORMATS[name]), bytes)


@given(st.lists(st.integers(0, 40).map(lambda samples: b"ab" * samples), min_size=1))
def test_pieces_of_base64_add_up_to_the_sound_alone_and_together(pieces: list[bytes]) -> None:
    writer = Base64Pieces()
    written = [writer.write(piece, last=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    assert base64.b64decode("".join(written)) == b"".join(pieces)
    assert b"".join(map(base64.b64decode, written)) == b"".join(pieces)
    assert all(len(base64.b64decode(text)) % 2 == 0 for text in written)
