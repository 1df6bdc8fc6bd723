"""Measures the time to the first sound over the turns of a conversation, with and without what earlier turns left.

Each turn of the user is `--seconds` of sound; the answer is one short sentence, and its length is fixed. A turn is
measured twice on the same engines: "again" after the prefix caches and kept hidden states were freed, so that the whole
conversation is computed, and "kept" after the turn before it, as in a conversation. Both give the same tokens.

    python benchmarks/conversation.py [MODEL] [--turns 10] [--seconds 4] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from checkpoint import checkpoint, parser
from vllm import LLM, SamplingParams

from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.runtime import RequestOptions

SOUND_HZ = 16_000
TEXT, FRAMES = 12, 24
BLOCK = 32
REPLY = {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog."}

_numbers = itertools.count()


def sound(seconds: float, seed: int) -> dict[str, Any]:
    """Return a message of the user with noise."""
    wave, file = np.random.default_rng(seed).uniform(-0.3, 0.3, int(seconds * SOUND_HZ)), io.BytesIO()
    soundfile.write(file, wave.astype(np.float32), SOUND_HZ, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    return {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]}


def conversation(turns: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return the messages up to the last turn of the user."""
    users = [sound(seconds, seed * 1000 + turn) for turn in range(turns)]
    return [message for user in users for message in (user, REPLY)][:-1]


async def first_sound(omni: Any, prompt: Any) -> tuple[float, list[int]]:
    """Return the seconds to the first sound of a greedy answer, and its first codes."""
    talker = SamplingParams(temperature=0, max_tokens=FRAMES + 1, min_tokens=FRAMES + 1)
    text = SamplingParams(temperature=0, max_tokens=TEXT, ignore_eos=True)
    options = RequestOptions(modalities=("text", "audio"), params={"talker": talker})
    began, first, codes = time.monotonic(), 0.0, []
    async for item in omni._omni.generate(prompt, text, f"turn-{next(_numbers)}", options=options):
        if isinstance(item, AudioChunk) and len(item.samples):
            first = first or time.monotonic() - began
            codes = np.asarray(item.frames).flatten().tolist()
    return first, codes


def main() -> None:
    """Measure and print."""
    flags = parser(__doc__ or "")
    flags.add_argument("--turns", type=int, default=10)
    flags.add_argument("--seconds", type=float, default=4.0, help="length of each turn of the user")
    flags.add_argument("--rounds", type=int, default=3, help="measured conversations, after one that warms up")
    flags.add_argument("--json", type=Path, help="file that takes every figure")
    args = flags.parse_args()
    size = {"max_model_len": 16384, "max_num_batched_tokens": 16384}
    stages = {"thinker": {"engine": {"block_size": BLOCK}}}
    kept: dict[int, list[float]] = {turn: [] for turn in range(1, args.turns + 1)}
    again: dict[int, list[float]] = {turn: [] for turn in range(1, args.turns + 1)}
    with checkpoint(args.model) as model, LLM(model, omni=True, stage_overrides=stages, **size) as omni:
        for seed in range(args.rounds + 1):
            for turn in kept:
                prompt = omni._preprocess_chat_one(conversation(turn, args.seconds, seed))
                seconds, codes = omni._run(first_sound(omni, prompt))
                kept[turn].append(seconds)
                omni.reset_prefix_cache()
                omni.reset_mm_cache()
                seconds, expected = omni._run(first_sound(omni, prompt))
                again[turn].append(seconds)
                assert codes == expected, f"turn {turn}: other codes"
    print(f"{'first sound, ms':>16}{'kept':>10}{'again':>10}{'kept/again':>12}{'kept/turn 1':>13}")
    one = statistics.median(kept[1][1:])
    for turn in kept:
        k, a = (statistics.median(each[turn][1:]) for each in (kept, again))
        print(f"turn {turn:11}{1e3 * k:10.0f}{1e3 * a:10.0f}{k / a:12.2f}{k / one:13.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"kept": kept, "again": again}, indent=1))


if __name__ == "__main__":
    main()
