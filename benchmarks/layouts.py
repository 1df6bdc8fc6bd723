"""Measures the whole pipeline with 1 and 2 talkers: spoken answers a second, first token and first sound.

Device time is simulated: each stage's steps take a stated time. The talker's steps are the longest, so the talker
limits the number of answers at once. Each client requests one spoken answer after the other (closed loop); with
`--rate`, requests begin at random times that are the same for all layouts, also while earlier ones are unanswered (open
loop). The layouts take turns on the same engines: a talker outside the current layout receives no requests. The table
shows the effect of more replicas of one stage on whole answers and on their beginning.

    python benchmarks/layouts.py [MODEL] [--talkers 1 2] [--clients 8 | --rate R] [--rounds 3] [--seconds 15]
        [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import checkpoint, parser
from simulated import engine
from stage_load import Work, closed_loop, deployed, open_loop, open_only
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.cli.options import more_than_0
from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.compat import activate
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.runtime import RequestOptions

STEPS_S = {"thinker": 0.01, "talker": 0.04, "code2wav": 0.01}
SLOTS = 4
"""Requests that a talker runs at once."""
TOKENS, FRAMES = 16, 50
SETTLE_S = 4.0
"""Warm-up before the measured time, since the first answers of a round begin all at once."""

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]

_numbers = itertools.count()


@dataclass
class Round:
    """Results of one round of a layout.

    Attributes:
        seconds: the measured time.
        ended: number of answers that ended in it.
        first_token, first_sound: seconds to the first token and to the first sound of each of these answers.
    """

    seconds: float
    ended: int = 0
    first_token: list[float] = field(default_factory=list)
    first_sound: list[float] = field(default_factory=list)


@dataclass
class Answers:
    """Requests spoken answers, and records them in `round`; None: answers are not recorded."""

    omni: AsyncOmni
    prompt: list[int]
    round: Round | None = None

    async def __call__(self, due: float | None = None) -> None:
        """Request one answer; its times count from `due` on the monotonic clock, or from now."""
        text = SamplingParams(temperature=0, min_tokens=TOKENS, max_tokens=TOKENS, ignore_eos=True)
        frames = SamplingParams(temperature=0, min_tokens=FRAMES + 1, max_tokens=FRAMES + 1)
        options = RequestOptions(modalities=("text", "audio"), params={"talker": frames}, streamed=True)
        began, first_token, first_sound = due or time.monotonic(), 0.0, 0.0
        asked = self.omni.generate({"prompt_token_ids": self.prompt}, text, f"layout-{next(_numbers)}", options=options)
        async for item in asked:
            if isinstance(item, AudioChunk):
                first_sound = first_sound or time.monotonic()
            else:
                first_token = first_token or time.monotonic()
        if self.round is not None:
            self.round.ended += 1
            self.round.first_token.append(first_token - began)
            self.round.first_sound.append(first_sound - began)


async def measured(answers: Answers, talkers: int, number: int, args: Any) -> Round:
    """Measure one round of the layout with `talkers` talkers.

    Args:
        number: of the round. With `--rate`, rounds of the same number have the same times of requests.
    """
    work = Work(answers.omni, "talker", FRAMES)
    open_only(work, talkers)
    async with open_loop(answers, args.rate, number) if args.rate else closed_loop(answers, args.clients):
        await asyncio.sleep(SETTLE_S)
        answers.round = done = Round(args.seconds)
        await asyncio.sleep(args.seconds)
        answers.round = None
    await work.over()
    return done


async def measure(deployment: Any, prompt: list[int], args: Any) -> dict[int, list[Round]]:
    """Measure all rounds of all layouts; return the rounds by number of talkers."""
    omni = AsyncOmni(deployment.connections(0))
    try:
        answers, rounds = Answers(omni, prompt), {talkers: list[Round]() for talkers in args.talkers}
        await answers()
        order = list(args.talkers)
        for number in range(args.rounds):
            for talkers in order:
                rounds[talkers].append(await measured(answers, talkers, number, args))
            order.reverse()
        return rounds
    finally:
        omni.shutdown(timeout=0)


def show(rounds: dict[int, list[Round]]) -> None:
    """Print one line for each layout."""
    names = "talkers", "answers/s", "smallest", "largest", "first token", "sound, ms"
    print("".join(f"{name:>12}" for name in names))
    for talkers, done in rounds.items():
        rates = [each.ended / each.seconds for each in done]
        first = [[value for each in done for value in getattr(each, name)] for name in ("first_token", "first_sound")]
        token, sound = (1e3 * statistics.median(values) for values in first)
        cells = "".join(f"{rate:>12.2f}" for rate in (statistics.median(rates), min(rates), max(rates)))
        print(f"{talkers:>12}{cells}{token:>12.0f}{sound:>12.0f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run this benchmark from the command line, and print its results."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--talkers", nargs="+", type=int, default=[1, 2], help="numbers to compare, 1 first")
    load = arguments.add_mutually_exclusive_group()
    load.add_argument("--clients", type=int, default=8, help="closed loop: answers at once")
    load.add_argument("--rate", type=more_than_0, help="open loop: requests a second, at random times (Poisson)")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each layout")
    arguments.add_argument("--seconds", type=float, default=15.0, help="measured time of a round")
    arguments.add_argument("--json", type=Path, help="write the figures here too")
    args = arguments.parse_args(argv)
    activate()
    stages: dict[str, dict[str, Any]] = {stage: engine(step) for stage, step in STEPS_S.items()}
    stages["talker"] |= {"replicas": max(args.talkers), "max_num_seqs": SLOTS}
    with checkpoint(args.model) as model:
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        plan = from_kwargs(model, max_model_len=1024, stage_overrides=stages)
        with deployed(plan, clients=1) as deployment:
            rounds = asyncio.run(measure(deployment, prompt, args))
    show(rounds)
    if args.json is not None:
        args.json.write_text(json.dumps({n: [asdict(each) for each in done] for n, done in rounds.items()}, indent=2))


if __name__ == "__main__":
    main()
