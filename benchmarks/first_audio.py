"""Measures the time to the first sound, with and without chunks, on the same engines, and its parts by stage.

Prompts: short (19 tokens), long (about 4,000 tokens, with 3 s of sound), and short with a reply of a minute. All
lengths are fixed, so the work does not depend on the weights. "on" are the pipeline's chunk sizes, "off" is everything
at once (`chunks` of the request). Answers of both kinds take turns.

The time line of "on", step by step, from the engines' own clocks:

    thinker   from the request to the end of the step that made the first token
    talker    the step that made the first frame (without its earlier steps for the prompt)
    code2wav  the step that made the first sound
    between   the rest: queues, messages, orchestrator

    python benchmarks/first_audio.py [MODEL] [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from checkpoint import checkpoint, parser
from speech import rpc
from spoken import QUESTION, STAGES
from step_times import EXTENSION
from vllm import LLM, SamplingParams

from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.runtime import RequestOptions

MAX_LEN, STEP_TOKENS = 8192, 1024
SOUND_S, SOUND_HZ = 3.0, 16_000
WORDS = "The quick brown fox jumps over the lazy dog. "
LONG_TOKENS = 4000
OFF = {"text": "all", "frames": "all"}

_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """One request: its messages, and the numbers of text tokens and frames of its answer."""

    messages: list[dict[str, Any]]
    text: int
    frames: int


@dataclass(frozen=True)
class Line:
    """Seconds from the request to the first sound, and the seconds that each stage took of them."""

    first: float
    thinker: float = 0.0
    talker: float = 0.0
    code2wav: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """The counted steps: (stage, start, end), in seconds since the request began."""

    @property
    def between(self) -> float:
        return self.first - self.thinker - self.talker - self.code2wav


@dataclass
class Result:
    """All rounds of one case, with chunks (`on`) and without (`off`); `tokens` is the length of the prompt."""

    tokens: int
    on: list[Line] = field(default_factory=list)
    off: list[Line] = field(default_factory=list)


def cases(tokenizer: Any) -> dict[str, Case]:
    """Return the cases by name."""
    times = LONG_TOKENS // len(tokenizer.encode(WORDS))
    sound = io.BytesIO()
    wave = np.sin(np.arange(int(SOUND_S * SOUND_HZ)) / 20).astype(np.float32)
    soundfile.write(sound, wave, SOUND_HZ, format="WAV")
    heard = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound.getvalue()).decode(), "format": "wav"},
    }
    said = {"type": "text", "text": WORDS * times}
    return {
        "short": Case(QUESTION, text=64, frames=127),
        "long, with sound": Case([{"role": "user", "content": [heard, said]}], text=64, frames=127),
        "short, a minute of reply": Case(QUESTION, text=64, frames=750),
    }


async def answer(omni: Any, prompt: Any, case: Case, chunks: dict[str, Any]) -> Line:
    """Request one spoken answer without sampling, with these chunk sizes; return its times."""
    await rpc(omni, "take_step_log")
    talker = SamplingParams(temperature=0, max_tokens=case.frames + 1, min_tokens=case.frames + 1)
    text = SamplingParams(temperature=0, max_tokens=case.text, ignore_eos=True)
    options = RequestOptions(modalities=("text", "audio"), params={"talker": talker}, chunks=chunks, streamed=True)
    began, first, frames = time.monotonic(), None, 0
    async for item in omni._omni.generate(prompt, text, f"first-{next(_numbers)}", options=options):
        if isinstance(item, AudioChunk):
            if len(item.samples) and first is None:
                first = time.monotonic()
            frames = len(item.frames)
    assert first is not None and frames == case.frames, f"{frames} frames instead of {case.frames}"
    return line(began, first, await rpc(omni, "take_step_log"))


def line(began: float, first: float, steps: dict[str, Sequence[Sequence[float]]]) -> Line:
    """Return the times of one answer from the log of the stages' steps.

    A frame counts from the last talker step that ended before the code2wav step of the first sound, and a token from
    the last thinker step that ended before that talker step. All earlier steps of the thinker count too.

    Args:
        began, first: times of the request and of the first sound, on the clock of the steps.
        steps: (start, end) of each step, by stage.
    """
    sound = max((step for step in steps["code2wav"] if step[1] <= first), key=lambda step: step[1])
    frame = max((step for step in steps["talker"] if step[1] <= sound[0]), key=lambda step: step[1])
    token = max((step for step in steps["thinker"] if step[1] <= frame[0]), key=lambda step: step[1])
    prefill = [step for step in steps["thinker"] if step[1] <= token[1]]
    spent = [("thinker", *step) for step in prefill] + [("talker", *frame), ("code2wav", *sound)]
    spans = [(stage, start - began, end - began) for stage, start, end in spent]
    took = sum(end - start for start, end in prefill)
    return Line(first - began, took, frame[1] - frame[0], sound[1] - sound[0], spans)


def table(results: dict[str, Result]) -> Iterator[str]:
    """Yield the printed lines: medians, and the smallest and largest first sound."""
    yield f"{'first sound, ms':28}{'prompt':>8}{'on':>22}{'off':>24}{'off/on':>8}"
    for name, result in results.items():
        on, off = ([1e3 * each.first for each in lines] for lines in (result.on, result.off))
        ratio = statistics.median(off) / statistics.median(on)
        yield f"{name:28}{result.tokens:8}{_spread(on):>22}{_spread(off):>24}{ratio:8.1f}"
    yield ""
    yield f"{'of it with chunks, ms':28}{'thinker':>12}{'talker':>12}{'code2wav':>12}{'between':>12}"
    for name, result in results.items():
        parts = ([1e3 * getattr(each, part) for each in result.on] for part in (*STAGES, "between"))
        yield f"{name:28}" + "".join(f"{statistics.median(part):12.1f}" for part in parts)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--rounds", type=int, default=8, help="measured rounds, after one that warms up")
    flags.add_argument("--json", type=Path, help="file that takes every round")
    args = flags.parse_args()
    extension = {stage: {"engine": {"worker_extension_cls": EXTENSION}} for stage in STAGES}
    for stage in ("thinker", "talker"):
        extension[stage]["engine"]["max_num_batched_tokens"] = STEP_TOKENS
    results: dict[str, Result] = {}
    with (
        checkpoint(args.model) as model,
        LLM(model, omni=True, max_model_len=MAX_LEN, stage_overrides=extension) as omni,
    ):
        omni._run(rpc(omni, "start_step_times"))
        for name, case in cases(omni.get_tokenizer()).items():
            prompt = omni._preprocess_chat_one(case.messages)
            result = results[name] = Result(len(prompt["prompt_token_ids"]))
            for _ in range(args.rounds + 1):
                result.on.append(omni._run(answer(omni, prompt, case, {})))
                result.off.append(omni._run(answer(omni, prompt, case, OFF)))
            del result.on[0], result.off[0]
    print(*table(results), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
