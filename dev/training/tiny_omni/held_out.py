"""Writes the held-out sounds of `heard.py` as one FLAC file, for the accuracy tests.

A JSON file has the range of samples of each word: `WORD/NUMBER OF THE WAY` -> [start, stop].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import soundfile

from dev.training.tiny_omni.listening import RATE


def main() -> None:
    """Write `held_out.flac` and `held_out.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("heard", type=Path, help="directory of heard.py")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    sounds = dict(np.load(arguments.heard / "held_out.npz"))
    stops = np.cumsum([len(sound) for sound in sounds.values()]).tolist()
    places = {name: [stop - len(sound), stop] for (name, sound), stop in zip(sounds.items(), stops, strict=True)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    soundfile.write(arguments.out / "held_out.flac", np.concatenate(list(sounds.values())), RATE)
    (arguments.out / "held_out.json").write_text(json.dumps(places, indent=0) + "\n")


if __name__ == "__main__":
    main()
