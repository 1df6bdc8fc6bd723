"""Frames of speech, and complete turns, of a session's input sound."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.support.spoken import RATE, SENTENCES, sentence, with_pauses
from vllm_omni_ext.serving.realtime import detecting
from vllm_omni_ext.serving.realtime.detecting import SpeechFrames
from vllm_omni_ext.serving.realtime.pcm import PCM, PCMU, RATES, Decoder, Encoder, SoundFormat
from vllm_omni_ext.serving.realtime.turns import SemanticVad, ServerVad, SpeechStarted, SpeechStopped, TurnDetector

FROM_MS = 5000.0
PIECE_S = 0.1


async def turns_of(settings: Any, kind: str, sound: np.ndarray, piece_s: float = PIECE_S) -> list[Any]:
    """Return the turns in a sound that begins at `FROM_MS`, in a format of the protocol."""
    speech = SpeechFrames()
    speech.begin({"type": kind}, FROM_MS)
    detector = TurnDetector(settings, speech.completeness)
    detector.drop(FROM_MS)
    data = Encoder(SoundFormat(kind, RATES[kind]), RATE).write(sound, last=True)
    size = round(piece_s * RATES[kind]) * (2 if kind == PCM else 1)
    found = []
    for at in range(0, len(data), size):
        found += detector.write(await speech.push(data[at : at + size], detector))
    return found


@pytest.mark.parametrize("kind", [PCM, PCMU])
async def test_turns_have_the_times_of_the_session(kind: str) -> None:
    sound, places = with_pauses([sentence(text) for text in SENTENCES[:2]], (0.5, 1.0, 1.0))
    found = await turns_of(ServerVad(prefix_padding_ms=0), kind, sound)
    assert [type(each) for each in found] == [SpeechStarted, SpeechStopped] * 2
    for (begin, end), started, stopped in zip(places, found[::2], found[1::2], strict=True):
        assert started.audio_start_ms == pytest.approx(FROM_MS + begin, abs=150)
        assert stopped.audio_end_ms == pytest.approx(FROM_MS + end + 500, abs=150)


async def test_turns_do_not_depend_on_the_size_of_the_pieces() -> None:
    sound, _ = with_pauses([sentence(text) for text in SENTENCES[:2]], (0.5, 1.0, 1.0))
    first, *others = [await turns_of(ServerVad(), PCMU, sound, piece_s) for piece_s in (0.02, PIECE_S, 1.4, 60.0)]
    assert len(first) == 4 and others == [first] * 3


async def test_sound_is_decoded_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, stock = list[threading.Thread](), Decoder.write

    def write(self: Decoder, data: bytes) -> np.ndarray:
        threads.append(threading.current_thread())
        return stock(self, data)

    monkeypatch.setattr(Decoder, "write", write)
    await turns_of(ServerVad(), PCMU, np.zeros(RATE // 10, np.float32))
    assert len(threads) == 1 and threading.current_thread() not in threads


async def test_a_complete_turn_ends_earlier_than_an_incomplete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Turn:
        complete = 1.0

        async def completeness_aside(self, samples: np.ndarray) -> float:
            lengths.append(len(samples))
            return self.complete

    monkeypatch.setattr(detecting, "SmartTurn", Turn)
    sound, ((_, end),) = with_pauses([sentence(SENTENCES[0])], (0.5, 3.0))
    _, stopped = await turns_of(SemanticVad(eagerness="high"), PCM, sound)
    assert stopped.audio_end_ms == pytest.approx(FROM_MS + end + 200, abs=150)
    (length,) = lengths  # computed once for a pause, from the sound of the turn
    assert length == pytest.approx((end - 500 + 300 + 200) * RATE / 1000, abs=RATE / 5)
    monkeypatch.setattr(Turn, "complete", 0.0)
    _, stopped = await turns_of(SemanticVad(eagerness="high"), PCM, sound)
    assert stopped.audio_end_ms == pytest.approx(FROM_MS + end + 2000, abs=150)


def test_without_the_models_there_is_no_turn_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni_ext.serving.realtime import onnx

    monkeypatch.setattr(onnx, "find_spec", lambda name: None)
    assert detecting.available() == ()
