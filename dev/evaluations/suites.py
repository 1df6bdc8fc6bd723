"""Makes suites for `vllm-omni-ext eval` from downloaded benchmarks.

python -m dev.evaluations.suites daily-omni FOLDER daily-omni.yaml
python -m dev.evaluations.suites mmsu FOLDER mmsu.yaml
python -m dev.evaluations.suites seed-tts FOLDER/en/meta.lst seed-tts-en.yaml
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

LETTERS = "ABCD"
ONE_LETTER = "Answer with the letter of the right option only."
ALOUD = "Say exactly the following text, word for word, and nothing else:"


def question(text: str, options: Iterable[str]) -> dict[str, str]:
    """Return a multiple-choice question as the text part of a message; each of `options` begins with its letter."""
    return {"type": "text", "text": "\n".join([text, *options, ONE_LETTER])}


def daily_omni(folder: Path) -> dict[str, Any]:
    """Return Daily-Omni (arXiv 2505.17862; huggingface.co/datasets/liarliar/Daily-Omni) as a suite.

    Args:
        folder: contains `qa.json`, and the unpacked `Videos.tar`: VIDEO/VIDEO_video.mp4 and VIDEO/VIDEO_audio.wav.
    """
    entries = json.loads((folder / "qa.json").read_text(encoding="utf-8"))
    rows = list(entries.values()) if isinstance(entries, dict) else entries
    files = {path.name: path.resolve() for path in folder.rglob("*_*.*")}
    items = []
    for number, row in enumerate(rows):
        media = [
            {"type": kind, "file": str(files[f"{row['video_id']}_{name}"])}
            for kind, name in (("video_url", "video.mp4"), ("input_audio", "audio.wav"))
        ]
        content = [*media, question(row["Question"], row["Choice"])]
        items.append({"id": f"{number:04}-{row['video_id']}", "content": content, "expected": row["Answer"]})
    # vllm-omni's nightly tests require 0.685 of Qwen3-Omni-30B-A3B-Instruct.
    return suite("Daily-Omni", items, threshold=0.685, score="choice")


def mmsu(folder: Path) -> dict[str, Any]:
    """Return MMSU (arXiv 2506.04779; huggingface.co/datasets/ddwang2000/MMSU) as a suite.

    Args:
        folder: contains `*.parquet` files with `id`, `audio`, `question`, `choice_a` to `choice_d` and `answer_gt`;
            needs `pip install pyarrow`. Sounds are written into its folder `sounds`.
    """
    import pyarrow.parquet

    tables = map(pyarrow.parquet.read_table, sorted(folder.rglob("*.parquet")))
    return mmsu_rows((row for table in tables for row in table.to_pylist()), folder / "sounds")


def mmsu_rows(rows: Iterable[Mapping[str, Any]], sounds: Path) -> dict[str, Any]:
    """Return rows of MMSU as a suite, and write their sounds into the folder `sounds`; see `mmsu`."""
    sounds.mkdir(exist_ok=True)
    items = []
    for row in rows:
        file = sounds / f"{row['id']}.wav"
        file.write_bytes(row["audio"]["bytes"])
        choices = [row[f"choice_{letter.lower()}"] for letter in LETTERS]
        options = [f"{letter}. {each}" for letter, each in zip(LETTERS, choices, strict=True)]
        content = [{"type": "input_audio", "file": str(file.resolve())}, question(row["question"], options)]
        right = LETTERS[choices.index(row["answer_gt"])]
        items.append({"id": str(row["id"]), "content": content, "expected": right})
    # sglang-omni's tests require 69 % of 2,000 of its questions (github.com/sgl-project/sglang-omni/pull/298).
    return suite("MMSU", items, threshold=0.69, score="choice")


def seed_tts(listing: Path) -> dict[str, Any]:
    """Return Seed-TTS-eval (github.com/BytedanceSpeech/seed-tts-eval) as a suite of texts to speak.

    The score is 1 - word error rate. There is no threshold, since published figures were made with another recogniser.

    Args:
        listing: `en/meta.lst`; a line is ID|TEXT OF THE PROMPT|WAV OF THE PROMPT|TEXT. Voices are not cloned.
    """
    rows = [line.split("|") for line in listing.read_text(encoding="utf-8").splitlines() if line]
    items = [{"id": row[0], "content": f"{ALOUD}\n{row[3]}", "expected": row[3], "listen": True} for row in rows]
    spoken = {"modalities": ["text", "audio"], "audio": {"format": "wav"}, "talker": {"temperature": 0}}
    return suite("Seed-TTS", items, score="words", recogniser="whisper", options=spoken)


def suite(name: str, items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return a suite for `vllm-omni-ext eval`. `fields` are further keys; the default `options` request only text."""
    return {"name": name, "options": {"modalities": ["text"]}, **fields, "items": items}


MAKERS = {"daily-omni": daily_omni, "mmsu": mmsu, "seed-tts": seed_tts}


def main(argv: list[str] | None = None) -> None:
    """Convert a downloaded benchmark to a suite file."""
    parser = argparse.ArgumentParser(prog="python -m dev.evaluations.suites", description=main.__doc__)
    parser.add_argument("benchmark", choices=MAKERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("suite", type=Path)
    args = parser.parse_args(argv)
    text = yaml.safe_dump(MAKERS[args.benchmark](args.source), sort_keys=False, allow_unicode=True)
    args.suite.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
