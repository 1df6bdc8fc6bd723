"""Time of a spoken answer: first sound, whole answer, several at once, and where the steps' time goes.

The lengths are fixed, so that the work is the same whatever the weights: a prompt of 19 tokens, 64 text tokens and
127 frames, 10.2 s of sound, of which 10.1 s are left after the vocoder's edge. The reference is vllm-omni 0.30 with the
same lengths and checkpoint (released vocabulary, float32) on 2 cores, on an unofficial CPU platform.

    python benchmarks/speech.py [MODEL] [--rounds 10] [--requests 8] [--concurrency 4] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from checkpoint import checkpoint, parser
from step_times import EXTENSION, parts_of
from vllm import LLM, SamplingParams

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.requests import OmniOptions
from vllm_omni_ext.outputs import AudioOutput

QUESTION = [{"role": "user", "content": "Tell me about"}]  # 19 tokens with the chat template
TEXT_TOKENS = 64
FRAMES = 127
STAGES = ("thinker", "talker", "code2wav")
REFERENCE = {"first sound, ms": (113, 176), "answer, s": (1.73, 1.89), "8 answers, 4 at once, s": (7.2, 7.2)}

_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """One answer: seconds from its start to the first sound and to its end, and seconds of sound."""

    first_s: float
    whole_s: float
    sound_s: float


def sampling(omni: Any, seed: int) -> tuple[SamplingParams, OmniOptions]:
    """The stages' own sampling, seeded, with fixed lengths."""
    text = SamplingParams(temperature=0, max_tokens=TEXT_TOKENS, ignore_eos=True)
    (talker,) = (stage for stage in omni.plan.stages if stage.name == "talker")
    steps = FRAMES + 1  # the frame of the last step is dropped
    speech = SamplingParams(**{**talker.sampling, "max_tokens": steps, "min_tokens": steps, "seed": seed})
    return text, OmniOptions(modalities=("text", "audio"), sampling={"talker": speech})


async def answer(omni: Any, prompt: Any, seed: int) -> Answer:
    """One spoken answer."""
    text, options = sampling(omni, seed)
    began, first, samples, rate = time.perf_counter(), None, 0, 1
    async for item in omni._omni.generate(prompt, text, f"speech-{next(_numbers)}", options=options):
        if isinstance(item, AudioOutput):
            if len(item.samples) and first is None:
                first = time.perf_counter() - began
            samples, rate = samples + len(item.samples), item.sample_rate
            frames = len(item.frames)
    assert first is not None and frames == FRAMES, f"{frames} frames instead of {FRAMES}"
    return Answer(first, time.perf_counter() - began, samples / rate)


async def several(omni: Any, prompt: Any, requests: int, concurrency: int) -> float:
    """Seconds for all answers, of which `concurrency` run at a time."""
    places = asyncio.Semaphore(concurrency)

    async def one(seed: int) -> None:
        async with places:
            await answer(omni, prompt, seed)

    began = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(requests)))
    return time.perf_counter() - began


async def rpc(omni: Any, method: str) -> dict[str, Any]:
    """Call the extension in the first replica of every stage."""
    replicas = omni._omni.orchestrator.replicas
    first = {stage: replicas[ReplicaId(stage, 0)].client for stage in STAGES}
    return {stage: (await client.collective_rpc_async(method))[0] for stage, client in first.items()}


class Clock:
    """CPU seconds of this process (the API server's part) and of the engines, between two looks."""

    def __init__(self, omni: Any) -> None:
        self._processes = {"API server": psutil.Process(os.getpid())}
        self._processes |= {str(r): psutil.Process(p.pid) for r, p in omni._deployment.processes().items()}
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def take(self) -> dict[str, float]:
        """CPU seconds by process since the last call."""
        now, before = self._now(), self._last
        self._last = now
        return {name: now[name] - before[name] for name in now}


@dataclass
class Round:
    """What one round measured."""

    alone: Answer
    steps: Mapping[str, Mapping[str, float]]
    cpu: Mapping[str, float]
    several_s: float
    several_steps: Mapping[str, Mapping[str, float]]


def measure(omni: Any, requests: int, concurrency: int, detailed: bool) -> Callable[[], Round]:
    """A function that runs one round."""
    prompt = omni._preprocess_chat_one(QUESTION)
    clock = Clock(omni)
    print(f"prompt: {len(prompt['prompt_token_ids'])} tokens")
    if detailed:
        omni._run(rpc(omni, "start_step_times"))

    def steps() -> dict[str, dict[str, float]]:
        taken = omni._run(rpc(omni, "take_step_times")) if detailed else {}
        return {stage: parts_of(seconds) for stage, seconds in taken.items()}

    def one() -> Round:
        steps(), clock.take()
        alone = omni._run(answer(omni, prompt, seed=0))
        cpu, alone_steps = clock.take(), steps()
        together = omni._run(several(omni, prompt, requests, concurrency))
        return Round(alone, alone_steps, cpu, together, steps())

    return one


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, smallest, largest."""
    return statistics.median(values), min(values), max(values)


def table(rounds: list[Round], requests: int, concurrency: int) -> Iterator[str]:
    """The lines that are printed."""
    rows = {
        "first sound, ms": [1e3 * r.alone.first_s for r in rounds],
        "answer, s": [r.alone.whole_s for r in rounds],
        f"{requests} answers, {concurrency} at once, s": [r.several_s for r in rounds],
        "sound a second, s": [requests * r.alone.sound_s / r.several_s for r in rounds],
    }
    for name, values in rows.items():
        middle, least, most = spread(values)
        low, high = REFERENCE.get(name, (0, 0))
        beside = f"  reference {low:g} to {high:g}, ratio {middle / ((low + high) / 2):.2f}" if high else ""
        print_form = ".0f" if name.endswith("ms") else ".3f"
        yield f"{name:26}{middle:8{print_form}} ({least:{print_form}} to {most:{print_form}}){beside}"
    yield ""
    yield "CPU seconds of one answer: " + ", ".join(
        f"{name} {statistics.median([r.cpu[name] for r in rounds]):.2f}" for name in rounds[0].cpu
    )
    if rounds[0].steps:
        yield from _step_table(rounds, concurrency)


def _step_table(rounds: list[Round], concurrency: int) -> Iterator[str]:
    columns = [(f"{stage}, alone", [r.steps[stage] for r in rounds]) for stage in STAGES]
    columns += [(f"{stage}, {concurrency}", [r.several_steps[stage] for r in rounds]) for stage in STAGES]
    yield f"{'ms a step':18}" + "".join(f"{name:>17}" for name, _ in columns)
    for part in columns[0][1][0]:
        cells = (statistics.median([parts[part] for parts in values]) for _, values in columns)
        yield f"{part:18}" + "".join(f"{cell:17.2f}" for cell in cells)


def main() -> None:
    """Measure and print."""
    flags = parser(__doc__ or "")
    flags.add_argument("--rounds", type=int, default=10, help="measured rounds, after one that warms up")
    flags.add_argument("--requests", type=int, default=8, help="answers of the run with several at once")
    flags.add_argument("--concurrency", type=int, default=4, help="how many of them at a time")
    flags.add_argument("--no-steps", action="store_true", help="leave the engines as they are: no times of steps")
    flags.add_argument("--json", type=Path, help="file that takes every round")
    args = flags.parse_args()
    overrides = {} if args.no_steps else {s: {"engine": {"worker_extension_cls": EXTENSION}} for s in STAGES}
    with checkpoint(args.model) as model, LLM(model, omni=True, stage_overrides=overrides) as omni:
        one = measure(omni, args.requests, args.concurrency, not args.no_steps)
        rounds = [one() for _ in range(args.rounds + 1)][1:]
    print(*table(rounds, args.requests, args.concurrency), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1))


if __name__ == "__main__":
    main()
