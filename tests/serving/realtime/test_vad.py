"""Speech in a sound: turns of another program's voice at known places, and the same in any pieces."""

from __future__ import annotations

import asyncio
import threading
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import pytest

from tests.support.spoken import RATE, SENTENCES, of_espeak, sentence, with_pauses
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.serving.realtime import onnx, smart_turn, vad
from vllm_omni_ext.serving.realtime.pcm import PCMU, Decoder, Encoder, SoundFormat
from vllm_omni_ext.serving.realtime.smart_turn import SmartTurn
from vllm_omni_ext.serving.realtime.turns import (
    PAUSE_MS,
    SemanticVad,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TurnDetector,
)
from vllm_omni_ext.serving.realtime.vad import SileroVad

NEAR_MS = 150.0
LONG_SENTENCE = "Good morning, I would like to know when the next train leaves for London."
PAUSES_S = (1.0, 0.8, 2.0, 1.5)
TELEPHONE = SoundFormat(PCMU, 8_000)


@pytest.fixture(scope="module")
def dialogue() -> tuple[np.ndarray, list[tuple]]:
    return with_pauses([sentence(text) for text in SENTENCES], PAUSES_S)


def telephone(sound: np.ndarray) -> np.ndarray:
    """The sound at 16 kHz after G.711 at 8 kHz, in pieces of 20 ms."""
    data = Encoder(TELEPHONE, RATE).write(sound, last=True)
    decoder = Decoder(TELEPHONE, RATE)
    return np.concatenate([decoder.write(data[at : at + 160]) for at in range(0, len(data), 160)])


def noisy(sound: np.ndarray) -> np.ndarray:
    return sound + np.random.default_rng(0).normal(0, 0.005, len(sound)).astype(np.float32)


def assert_same(got: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Frames with the same ends, and the same probabilities but for rounding."""
    assert [end for end, _ in got] == [end for end, _ in expected]
    assert [p for _, p in got] == pytest.approx([p for _, p in expected], abs=1e-5)


def of_hibari() -> list[np.ndarray]:
    return [sentence(text) for text in SENTENCES]


@pytest.mark.parametrize("channel", [np.copy, telephone, noisy])
@pytest.mark.parametrize("synthesiser", [of_hibari, of_espeak])
def test_turns_are_found_at_their_places(synthesiser: Any, channel: Any) -> None:
    sound, places = with_pauses(synthesiser(), PAUSES_S)
    settings = ServerVad(prefix_padding_ms=0, silence_duration_ms=500)
    events = TurnDetector(settings).write(SileroVad().push(channel(sound)))
    assert [type(event) for event in events] == [SpeechStarted, SpeechStopped] * len(places)
    began = [event.audio_start_ms for event in events[::2]]
    ended = [event.audio_end_ms - settings.silence_duration_ms for event in events[1::2]]
    assert began == pytest.approx([begin for begin, _ in places], abs=NEAR_MS)
    assert ended == pytest.approx([end for _, end in places], abs=NEAR_MS)


@pytest.mark.parametrize("size", [1, 160, 511, 512, 513, 4000])
def test_probabilities_do_not_depend_on_pieces(dialogue: Any, size: int) -> None:
    sound = dialogue[0][: 3 * RATE] if size > 1 else dialogue[0][:2000]
    whole = SileroVad().push(sound)
    pieces = SileroVad()
    got = [frame for at in range(0, len(sound), size) for frame in pieces.push(sound[at : at + size])]
    assert_same(got, whole)
    assert [end for end, _ in got] == [32.0 * (at + 1) for at in range(len(sound) // 512)]


def test_more_sound_than_one_call_reads_gives_the_same(dialogue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SileroVad().push(dialogue[0])
    monkeypatch.setattr(vad, "MOST_WINDOWS", 7)
    assert_same(SileroVad().push(dialogue[0]), whole)


def test_the_model_for_sequences_is_that_for_single_frames(dialogue: Any) -> None:
    sound = dialogue[0][: 2 * RATE]
    model = onnx.session(onnx.packaged("silero_vad", "data/silero_vad.onnx"))
    state, padded, expected = np.zeros((2, 1, 128), np.float32), np.concatenate([np.zeros(64), sound]), []
    for at in range(0, len(sound) - 511, 512):
        window = padded[None, at : at + 576].astype(np.float32)
        probability, state = model.run(None, {"input": window, "state": state, "sr": np.array(RATE)})
        expected.append(probability.item())
    assert [p for _, p in SileroVad().push(sound)] == pytest.approx(expected, abs=1e-5)


def test_two_sounds_share_the_model_and_nothing_else(dialogue: Any) -> None:
    sound, quiet = dialogue[0][: 2 * RATE], np.zeros(2 * RATE, np.float32)
    alone = SileroVad().push(sound)
    one, other = SileroVad(), SileroVad()
    mixed = []
    for at in range(0, len(sound), 1600):
        mixed += one.push(sound[at : at + 1600])
        assert all(p < 0.5 for _, p in other.push(quiet[at : at + 1600]))
    assert_same(mixed, alone)
    assert onnx.session(vad.model_file()) is onnx.session(vad.model_file())


@pytest.mark.parametrize(
    "sound",
    [
        np.zeros(5 * RATE, np.float32),
        np.random.default_rng(0).normal(0, 0.1, 5 * RATE).astype(np.float32),
        (0.3 * np.sin(2 * np.pi * 440 * np.arange(5 * RATE) / RATE)).astype(np.float32),
    ],
    ids=["silence", "noise", "tone"],
)
def test_sound_without_speech_has_no_turn(sound: np.ndarray) -> None:
    assert TurnDetector(ServerVad()).write(SileroVad().push(sound)) == []


async def test_models_run_in_threads_of_their_own(dialogue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = dialogue[0][:RATE]
    names: list[str] = []
    run = SileroVad._run

    def recorded(self: SileroVad, windows: np.ndarray) -> np.ndarray:
        names.append(threading.current_thread().name)
        return run(self, windows)

    expected = SileroVad().push(sound)
    monkeypatch.setattr(SileroVad, "_run", recorded)
    many = [SileroVad() for _ in range(6)]
    assert await asyncio.gather(*(onnx.aside(each.push, sound) for each in many)) == [expected] * 6
    assert len(set(names)) <= onnx.THREADS
    assert all(name.startswith("omni-vad") for name in names)


def test_an_unfinished_sentence_is_not_complete() -> None:
    turn = SmartTurn()
    text = SENTENCES[0]
    pause = np.zeros(round(PAUSE_MS * RATE / 1e3), np.float32)
    whole = sentence(text)
    assert turn.completeness(np.concatenate([whole, pause])) > 0.7
    assert turn.completeness(np.concatenate([whole[: len(whole) // 2], pause])) < 0.3
    assert turn.completeness(np.concatenate([sentence("I think that we should, um"), pause])) < 0.3


def test_the_spectrogram_is_of_the_last_8_s_with_silence_before_a_shorter_sound(dialogue: Any) -> None:
    sound = dialogue[0]
    assert len(sound) > 8 * RATE
    assert smart_turn.features(sound).shape == (1, 80, 800)
    assert np.array_equal(smart_turn.features(sound), smart_turn.features(sound[-8 * RATE :]))
    short = sound[: 3 * RATE]
    padded = np.concatenate([np.zeros(5 * RATE, np.float32), short])
    assert np.array_equal(smart_turn.features(short), smart_turn.features(padded))


def test_semantic_detection_waits_in_the_middle_of_a_sentence() -> None:
    """A sentence with pauses of 300 and 700 ms: `server_vad` makes two turns of it."""
    whole = sentence(LONG_SENTENCE)
    half = len(whole) // 2
    sound, _ = with_pauses([whole[:half], whole[half:]], (0.5, 0.7, 1.5))
    turn, frames = SmartTurn(), SileroVad().push(sound)

    def completeness(begin: float, end: float) -> float:
        return turn.completeness(sound[int(begin * RATE / 1e3) : int(end * RATE / 1e3)])

    semantic = TurnDetector(SemanticVad(), completeness).write(frames)
    assert [type(event) for event in semantic] == [SpeechStarted, SpeechStopped]
    fixed = TurnDetector(ServerVad()).write(frames)
    assert [type(event) for event in fixed] == [SpeechStarted, SpeechStopped] * 2
    assert semantic[-1].audio_end_ms < fixed[-1].audio_end_ms, "and ends the whole sentence earlier"


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = onnx.find_spec

    def found(name: str) -> ModuleSpec | None:
        return None if name in packages else find(name)

    monkeypatch.setattr(onnx, "find_spec", found)


@pytest.mark.parametrize("package", ["onnxruntime", "silero_vad"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    without(monkeypatch, package)
    name = package.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"^server_vad: .*{name}.*pip install 'vllm-omni-ext\[realtime\]'"):
        SileroVad()


def test_a_missing_model_for_semantic_detection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pipecat")
    with pytest.raises(ConfigError, match=r"^semantic_vad: Smart Turn is not installed; .*pip install --no-deps"):
        SmartTurn()
    without(monkeypatch, "onnxruntime")
    with pytest.raises(ConfigError, match=r"^semantic_vad: onnxruntime.*\[realtime\]"):
        SmartTurn()
