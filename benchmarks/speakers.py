"""Measures how much of a spoken answer's time is spent outside of the devices, with up to 64 answers at once.

Device time is simulated, and no model is computed: each stage's step takes a stated time, `--step-ms` and
`--token-us` for each token. The defaults are those of one H200 by docs/gpu.md: a talker's step of 1 answer takes 10 ms,
of 32 answers 22 ms. Each speaker requests one answer after the other from the API server's code in this process, which
has no HTTP. The first answers of the speakers begin at different times.

A row has, for a number of speakers: answers a second; time of an answer and of its first sound; the talker's steps,
what they took beyond the device's time, and how long this process worked for each of them; and silence at a listener.

    python benchmarks/speakers.py [MODEL] [--speakers 1 32 64] [--joined 1 8] [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from checkpoint import checkpoint, parser
from simulated import TAKE_STEPS, idle
from stage_load import Step, closed_loop, deployed, watch
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.compat import activate
from vllm_omni_ext.connectors import codec_stream
from vllm_omni_ext.connectors.playback import Player
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen3_omni import flow
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.runtime import RequestOptions

GROUPS = 16
STAGES = ("thinker", "talker", "code2wav")
STEP_MS = {"thinker": 8.0, "talker": 9.6, "code2wav": 4.0}
TOKEN_US = {"thinker": 100.0, "talker": 390.0, "code2wav": 6.0}
"""Of a token: a frame of code2wav has `GROUPS` tokens."""

TOKENS, FRAMES = 32, 100
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
TALKER = ReplicaId("talker", 0)
SPREAD_S, SETTLE_S = 4.0, 5.0
MOST_TOKENS = flow.MOST_TOKENS
MS = 1e3

_numbers = itertools.count()


@dataclass
class Round:
    """What was measured with one number of speakers. Times are in seconds.

    Attributes:
        answers, first_sounds: of each answer that began and ended in the measured time.
        silences: silence of each of these answers at a listener who begins at the first sound.
        steps: number of talker steps; of each, the time from the end of the step before, and the device's part.
        frames: number of frames in the answers' messages to this process.
        received: time from a step's end until this process had its message.
        handled: time in which this process worked on all messages of the talker.
        own_cpu: CPU time of this process, with all threads.
        engine_cpu: CPU time of each stage's process.
    """

    speakers: int
    joined: int = 0
    seconds: float = 0.0
    answers: list[float] = field(default_factory=list)
    first_sounds: list[float] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    frames: int = 0
    steps: int = 0
    messages: int = 0
    received: list[float] = field(default_factory=list)
    handled: float = 0.0
    own_cpu: float = 0.0
    engine_cpu: dict[str, float] = field(default_factory=dict)
    load_average: float = 0.0


@dataclass
class Speakers:
    """Requests spoken answers, and records them in a round."""

    omni: AsyncOmni
    prompt: list[int]
    round: Round | None = None
    late: list[float] = field(default_factory=list)

    async def __call__(self) -> None:
        """Request one answer; the first ones of a round begin at different times."""
        if self.late:
            await asyncio.sleep(self.late.pop())
        began_in, began, first, player = self.round, time.monotonic(), 0.0, Player()
        text = SamplingParams(temperature=0, min_tokens=TOKENS, max_tokens=TOKENS, ignore_eos=True)
        frames = SamplingParams(temperature=0, min_tokens=FRAMES + 1, max_tokens=FRAMES + 1)
        options = RequestOptions(modalities=("text", "audio"), params={"talker": frames}, streamed=True)
        asked = self.omni.generate(
            {"prompt_token_ids": self.prompt}, text, f"speaker-{next(_numbers)}", options=options
        )
        async for item in asked:
            if isinstance(item, AudioChunk) and len(item.samples):
                first = first or time.monotonic()
                player.receive(len(item.samples) / item.sample_rate, time.monotonic())
        if self.round is not None and self.round is began_in:
            self.round.answers.append(time.monotonic() - began)
            self.round.first_sounds.append(first - began)
            self.round.silences.append(sum(player.silences))


def cpu(deployment: Any) -> dict[str, float]:
    """Return the CPU seconds of each stage's process so far."""
    spent = {}
    for replica, process in deployment.processes().items():
        times = psutil.Process(process.pid).cpu_times()
        spent[replica.stage] = times.user + times.system
    return spent


async def measured(speakers: Speakers, count: int, joined: int, steps: list[Step], deployment: Any, args: Any) -> Round:
    """Measure one number of speakers."""
    speakers.late = [random.Random(number).uniform(0.0, SPREAD_S) for number in range(count)]
    async with closed_loop(speakers, count):
        await asyncio.sleep(SPREAD_S + SETTLE_S)
        talker = speakers.omni.replica_connections.replicas[TALKER].client
        await talker.collective_rpc_async(TAKE_STEPS)
        speakers.round = done = Round(count, joined)
        first, own, engines, began = len(steps), time.process_time(), cpu(deployment), time.monotonic()
        await asyncio.sleep(args.seconds)
        speakers.round = None
        done.seconds = time.monotonic() - began
        done.own_cpu = time.process_time() - own
        done.engine_cpu = {stage: spent - engines[stage] for stage, spent in cpu(deployment).items()}
        messages, computed = steps[first:-1], await talker.collective_rpc_async(TAKE_STEPS)
    for (_, before, _), (_, ended, tokens) in itertools.pairwise(computed):
        done.intervals.append(ended - before)
        done.device.append(args.step_ms[1] / MS + tokens * args.token_us[1] / 1e6)
    done.received = [message.received - message.made for message in messages]
    done.handled = sum(message.handled - message.received for message in messages)
    done.messages, done.frames = len(messages), sum(message.items for message in messages)
    done.steps = len(computed)
    done.load_average = os.getloadavg()[0]
    for replica in speakers.omni.replica_connections.replicas.values():
        await replica.client.get_supported_tasks_async()
    return done


async def measure(deployment: Any, prompt: list[int], args: Any) -> list[Round]:
    """Measure all numbers of speakers."""
    omni = AsyncOmni(deployment.connections(0))
    try:
        speakers, steps = Speakers(omni, prompt), watch(omni.replica_connections.replicas[TALKER])
        await speakers()
        rounds = []
        for count, joined in itertools.product(args.speakers, args.joined):
            codec_stream.MOST_JOINED = joined
            flow.MOST_TOKENS = 1 if joined == 1 else MOST_TOKENS
            rounds.append(await measured(speakers, count, joined, steps, deployment, args))
        return rounds
    finally:
        omni.shutdown(timeout=0)


def device_s(done: Round) -> float:
    """Return the device time of an answer's talker, which takes the longest: that of its frames' steps."""
    return statistics.median(done.device) * (FRAMES + 1)


def show(rounds: Sequence[Round]) -> None:
    """Print one line for each number of speakers."""
    names = (
        "speakers",
        "joined",
        "answers/s",
        "answer, s",
        "of it device",
        "first sound",
        "step",
        "beyond",
        "received",
    )
    names += ("handled", "own CPU", "messages", "silence", "late", "load")
    print("".join(f"{name:>14}" for name in names))
    for each in rounds:
        beyond = [interval - device for interval, device in zip(each.intervals, each.device, strict=True)]
        answer = statistics.median(each.answers)
        cells: list[float] = [
            each.speakers,
            each.joined,
            each.frames / (FRAMES + 1) / each.seconds,
            answer,
            device_s(each) / answer,
        ]
        times = (each.first_sounds, each.intervals, beyond, each.received)
        cells += [MS * statistics.median(some) for some in times]
        cells += [MS * each.handled / each.steps, MS * each.own_cpu / each.steps, each.messages / each.steps]
        cells += [MS * statistics.median(each.silences)]
        cells += [sum(silence > 0.02 for silence in each.silences) / len(each.silences), each.load_average]
        print("".join(f"{cell:>14.2f}" for cell in cells))
        spent = {stage: f"{100 * seconds / each.seconds:.0f} %" for stage, seconds in each.engine_cpu.items()}
        print(f"{'':>14}CPU: this process {100 * each.own_cpu / each.seconds:.0f} %, {spent}; times of a step in ms")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--speakers", nargs="+", type=int, default=[1, 32, 64], help="answers at once")
    joined = [codec_stream.MOST_JOINED]
    arguments.add_argument(
        "--joined",
        nargs="+",
        type=int,
        default=joined,
        help="most frames in a talker's output; 1: one text token in each message to the talker too",
    )
    arguments.add_argument("--seconds", type=float, default=20.0, help="measured time of each number")
    arguments.add_argument("--step-ms", nargs=3, type=float, default=list(STEP_MS.values()), help="of each stage")
    arguments.add_argument("--token-us", nargs=3, type=float, default=list(TOKEN_US.values()), help="of each stage")
    arguments.add_argument("--json", type=Path, help="write the figures here too")
    args = arguments.parse_args(argv)
    activate()
    stages: dict[str, dict[str, Any]] = {}
    for stage, step_ms, token_us in zip(STAGES, args.step_ms, args.token_us, strict=True):
        groups = 0 if stage == "thinker" else GROUPS
        stages[stage] = {"engine": idle(step_ms / MS, token_us / 1e6, groups=groups)}
        stages[stage]["engine"]["max_num_seqs"] = max(args.speakers)
    with checkpoint(args.model) as model:
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        plan = from_kwargs(model, max_model_len=1024, stage_overrides=stages)
        with deployed(plan, clients=1) as deployment:
            rounds = asyncio.run(measure(deployment, prompt, args))
    show(rounds)
    if args.json is not None:
        found = [asdict(each) | {"answer_device": device_s(each)} for each in rounds]
        args.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
