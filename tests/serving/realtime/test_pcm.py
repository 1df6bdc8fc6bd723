"""Sound of the Realtime API: G.711 compared with Python's own, resampling in pieces compared with the whole."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.realtime.pcm import PCM, PCMA, PCMU, RATES, Decoder, Encoder, SoundFormat, read_format

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    audioop = pytest.importorskip("audioop", reason="Python 3.13 has no audioop")

FORMATS = {kind: SoundFormat(kind, rate) for kind, rate in RATES.items()}
ALL_CODES = bytes(range(256))
ALL_SAMPLES = np.arange(-(2**15), 2**15).astype("<i2")
SPLITS = st.lists(st.floats(0, 1), max_size=12)


def pieces(items: Any, splits: list[float]) -> list[Any]:
    at = [0, *sorted(round(share * len(items)) for share in splits), len(items)]
    return [items[begin:end] for begin, end in pairwise(at)]


def tone(rate: int, samples: int, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(samples) / rate)).astype(np.float32)


@pytest.mark.parametrize(("kind", "decode"), [(PCMU, audioop.ulaw2lin), (PCMA, audioop.alaw2lin)])
def test_each_code_of_g711_is_the_sample_of_audioop(kind: str, decode: Any) -> None:
    expected = np.frombuffer(decode(ALL_CODES, 2), "<i2") / 2**15
    decoded = Decoder(FORMATS[kind], RATES[kind]).write(ALL_CODES)
    assert decoded.dtype == np.float32
    assert np.array_equal(decoded, expected)


@pytest.mark.parametrize(("kind", "encode"), [(PCMU, audioop.lin2ulaw), (PCMA, audioop.lin2alaw)])
def test_each_sample_has_the_code_of_audioop(kind: str, encode: Any) -> None:
    encoder = Encoder(FORMATS[kind], RATES[kind])
    assert encoder.write(ALL_SAMPLES / np.float32(2**15), last=True) == encode(ALL_SAMPLES.tobytes(), 2)


def test_samples_of_16_bits_come_back_unchanged() -> None:
    samples = Decoder(FORMATS[PCM], 24_000).write(ALL_SAMPLES.tobytes())
    assert (samples.min(), samples.max()) == (-1.0, 1 - 2**-15)
    assert Encoder(FORMATS[PCM], 24_000).write(samples, last=True) == ALL_SAMPLES.tobytes()


@pytest.mark.parametrize("kind", RATES)
def test_louder_samples_are_clipped(kind: str) -> None:
    loud, full = (np.array([level, -level], np.float32) for level in (3.0, 1.0))
    clipped = Encoder(FORMATS[kind], RATES[kind]).write(loud, last=True)
    assert clipped == Encoder(FORMATS[kind], RATES[kind]).write(full, last=True)


@settings(deadline=None)
@given(st.sampled_from(sorted(RATES)), st.sampled_from([8_000, 16_000, 24_000]), st.integers(0, 4000), SPLITS)
def test_bytes_in_any_pieces_decode_to_the_samples_of_the_whole(
    kind: str, rate: int, length: int, splits: list[float]
) -> None:
    data = Encoder(FORMATS[kind], RATES[kind]).write(tone(RATES[kind], length), last=True)
    whole = Decoder(FORMATS[kind], rate).write(data, last=True)
    assert len(whole) == -(-length * rate // RATES[kind])
    decoder = Decoder(FORMATS[kind], rate)
    for _ in range(2):  # the second sound begins as the first did
        got = [decoder.write(piece) for piece in pieces(data, splits)]
        assert np.array_equal(np.concatenate([*got, decoder.write(b"", last=True)]), whole)


@settings(deadline=None)
@given(st.sampled_from(sorted(RATES)), st.integers(0, 4000), SPLITS)
def test_samples_in_any_pieces_encode_to_the_bytes_of_the_whole(kind: str, length: int, splits: list[float]) -> None:
    samples = tone(24_000, length)
    whole = Encoder(FORMATS[kind], 24_000).write(samples, last=True)
    assert len(whole) == -(-length * RATES[kind] // 24_000) * FORMATS[kind].sample_bytes
    encoder = Encoder(FORMATS[kind], 24_000)
    parts = pieces(samples, splits)
    assert b"".join(encoder.write(part, last=at == len(parts) - 1) for at, part in enumerate(parts)) == whole


@pytest.mark.parametrize(("source", "target"), [(PCM, 16_000), (PCMU, 16_000), (PCMA, 24_000)])
def test_a_minute_in_pieces_of_20_ms_has_no_drift_and_no_clicks(source: str, target: int) -> None:
    rate = RATES[source]
    original = tone(rate, 60 * rate)
    data = Encoder(FORMATS[source], rate).write(original, last=True)
    decoder, step = Decoder(FORMATS[source], target), rate // 50 * FORMATS[source].sample_bytes
    got = [decoder.write(data[at : at + step]) for at in range(0, len(data), step)]
    written = np.cumsum([len(piece) for piece in got])
    owed = np.arange(1, len(got) + 1) * target / 50 - written
    assert owed.min() >= 0
    assert owed.max() <= 0.005 * target, "milliseconds that the filter keeps"
    sound = np.concatenate([*got, decoder.write(b"", last=True)])
    noise = sound - tone(target, 60 * target)
    inside = noise[target // 10 : -target // 10]
    limit = 1e-3 if source == PCM else 0.02  # G.711's own quantisation
    assert np.abs(inside).max() < limit
    if source == PCM:
        reference = soxr.resample(original, rate, target)
        assert np.abs(sound - reference)[target // 10 : -target // 10].max() < limit


def test_half_a_sample_waits_for_its_other_byte() -> None:
    decoder = Decoder(FORMATS[PCM], 24_000)
    assert len(decoder.write(b"\x00")) == 0
    assert decoder.write(b"\x40\x00").tolist() == [0.5]
    with pytest.raises(ValueError, match="half a sample of 2 bytes"):
        decoder.write(b"", last=True)
    assert decoder.write(b"\x00\x40").tolist() == [0.5], "the next sound begins with a whole one"


@pytest.mark.parametrize("kind", RATES)
def test_a_format_is_read_with_and_without_its_rate(kind: str) -> None:
    for value in ({"type": kind}, {"type": kind, "rate": RATES[kind]}):
        assert read_format(value, "format") == FORMATS[kind]
    assert read_format(FORMATS[kind].as_json(), "format") == FORMATS[kind]


@pytest.mark.parametrize(
    ("value", "parameter"),
    [
        ("pcm16", "format"),
        (None, "format"),
        ({}, "format.type"),
        ({"type": "audio/mp3"}, "format.type"),
        ({"type": ["audio/pcm"]}, "format.type"),
        ({"type": "audio/pcm", "rate": 16_000}, "format.rate"),
        ({"type": "audio/pcm", "rate": "24000"}, "format.rate"),
        ({"type": "audio/pcm", "rate": True}, "format.rate"),
        ({"type": "audio/pcmu", "rate": 24_000}, "format.rate"),
        ({"type": "audio/pcm", "channels": 2}, "format.channels"),
    ],
)
def test_a_wrong_format_is_refused_with_the_path_of_the_field(value: Any, parameter: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_format(value, "format")
    assert refused.value.parameter == parameter
    assert str(refused.value).startswith(parameter)
