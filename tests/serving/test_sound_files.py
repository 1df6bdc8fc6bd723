"""Sounds of containers that only PyAV opens: every sample format and number of channels."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from vllm.multimodal.media import audio

from tests.support.media import AUDIO_RATE
from tests.support.media import audio as tones
from vllm_omni_ext.serving import sound_files

FILES = [
    ("matroska", "pcm_s16le", "s16", 2**-15),
    ("matroska", "pcm_u8", "u8", 2**-7),
    ("matroska", "pcm_s32le", "s32", 2**-20),
    ("matroska", "pcm_f32le", "flt", 1e-6),
    ("mov", "pcm_s16le", "s16", 2**-15),
    ("mov", "alac", "s16p", 2**-15),
]


def written(container: str, codec: str, form: str, channels: list[np.ndarray]) -> io.BytesIO:
    """A file with these channels of float samples in [-1, 1)."""
    buffer, layout = io.BytesIO(), "mono" if len(channels) == 1 else "stereo"
    planes = np.stack(channels)
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=AUDIO_RATE, layout=layout)
        frame = av.AudioFrame.from_ndarray(planes.astype(np.float32), format="fltp", layout=layout)
        frame.sample_rate = AUDIO_RATE
        stream.format = form
        size = stream.frame_size or frame.samples
        for each in av.AudioResampler(format=form, layout=layout, rate=AUDIO_RATE, frame_size=size).resample(frame):
            output.mux(stream.encode(each))
        output.mux(stream.encode())
    return io.BytesIO(buffer.getvalue())


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("container", "codec", "form", "tolerance"), FILES)
def test_samples_are_those_that_were_written(
    container: str, codec: str, form: str, tolerance: float, channels: int
) -> None:
    sounds = [tones(0.5, seed) for seed in range(channels)]
    file = written(container, codec, form, sounds)
    with sound_files.install():
        samples, rate = audio.load_audio(file, sr=None)
    wanted = np.mean(sounds, axis=0)
    count = min(len(samples), len(wanted))  # frames of a codec have a fixed size
    assert rate == AUDIO_RATE and samples.dtype == np.float32 and count > 0.9 * len(wanted)
    assert np.abs(samples[:count] - wanted[:count]).max() <= 2 * tolerance


FORMATS = [
    ("wav", "pcm_s16le"),
    ("mp3", "libmp3lame"),
    ("flac", "flac"),
    ("ogg", "libopus"),
    ("ipod", "aac"),
    ("adts", "aac"),
    ("matroska", "libopus"),
    ("mov", "aac"),
    ("avi", "pcm_s16le"),
    ("webm", "libopus"),
    ("mpegts", "aac"),
]


@pytest.mark.parametrize("from_path", [False, True])
@pytest.mark.parametrize(("container", "codec"), FORMATS)
def test_pyav_reads_all_formats(container: str, codec: str, from_path: bool, tmp_path: Path) -> None:
    buffer, rate = io.BytesIO(), 48_000
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(tones(1.5, 1)[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format.name, "mono", rate, frame_size=stream.frame_size or 1024)
        for each in [*resampler.resample(frame), *resampler.resample(None), None]:
            output.mux(stream.encode(each))
    (tmp_path / "sound").write_bytes(buffer.getvalue())
    with sound_files.install():
        file = tmp_path / "sound" if from_path else io.BytesIO(buffer.getvalue())
        samples, found = audio.load_audio(file, sr=None, backend="pyav")
    assert found == rate and len(samples) > 0.9 * frame.samples and 0.01 < np.abs(samples).max() <= 1.1


REFERENCES = {
    "session": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 21000 RTP/AVP 0\n",
    "list of files": "ffconcat version 1.0\nfile 'sound.wav'\n",
    "playlist": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nsound.wav\n#EXT-X-ENDLIST\n",
}


@pytest.mark.parametrize("from_path", [False, True])
@pytest.mark.parametrize("backend", ["auto", "pyav", "torchcodec"])
@pytest.mark.parametrize("text", REFERENCES.values(), ids=REFERENCES)
def test_a_file_that_refers_to_others_is_refused(
    text: str, backend: str, from_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torchcodec":
        torchcodec: Any = lambda path, **options: pytest.fail("the file is opened")  # noqa: E731
        monkeypatch.setattr(audio, "AudioDecoder", object)
        monkeypatch.setattr(audio, "load_audio_torchcodec", torchcodec)
        monkeypatch.setitem(audio._AUDIO_LOADERS, "torchcodec", torchcodec)
    (tmp_path / "sound.wav").write_bytes(written("wav", "pcm_s16le", "s16", [tones(0.5, 1)]).getvalue())
    (tmp_path / "list.m3u8").write_text(text)
    since = time.monotonic()
    with sound_files.install(), pytest.raises(ValueError, match="refers to other files"):
        audio.load_audio(tmp_path / "list.m3u8" if from_path else io.BytesIO(text.encode()), backend=backend)
    assert time.monotonic() - since < 10, "FFmpeg has waited for packets of the session"


def test_torchcodec_gets_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Any = lambda path, **options: (len(path.read()), options["sr"])  # noqa: E731
    monkeypatch.setattr(audio, "AudioDecoder", object)
    monkeypatch.setattr(audio, "load_audio_torchcodec", read)
    monkeypatch.setitem(audio._AUDIO_LOADERS, "torchcodec", read)
    file = written("wav", "pcm_s16le", "s16", [tones(0.5, 1)])
    with sound_files.install():
        assert audio.load_audio(file, sr=16_000) == (len(file.getvalue()), 16_000)


def test_resampled_sound_and_vllms_errors_stay() -> None:
    stock, file = audio.load_audio_pyav, written("matroska", "pcm_s16le", "s16", [tones(0.5, 1)])
    wanted, _ = stock(file, sr=8000)
    file.seek(0)
    with sound_files.install():
        samples, rate = audio.load_audio_pyav(file, sr=8000)
        with pytest.raises(ValueError, match="Invalid or corrupted"):
            audio.load_audio_pyav(io.BytesIO(b"no file"))
    assert rate == 8000 and np.array_equal(samples, wanted)
    assert audio.load_audio_pyav is stock


def test_blocks_that_overlap_divide_once_and_the_last_one_restores_vllms_loader() -> None:
    stock, sound = audio.load_audio_pyav, tones(0.5, 1)
    first, second = sound_files.install(), sound_files.install()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    samples, _ = audio.load_audio(written("matroska", "pcm_s16le", "s16", [sound]), sr=None)
    assert np.abs(samples - sound).max() <= 2**-14
    second.__exit__(None, None, None)
    assert audio.load_audio_pyav is stock and audio._AUDIO_LOADERS["pyav"] is stock
