"""Compares the decode speed of the text stage with stock vLLM, on the same checkpoint with the same settings.

Both engines stay up, one is busy at a time, and they take turns: A B, B A, A B, ... The stock engine has the engine
arguments and the environment of our thinker's replica; only the worker class is vLLM's own.

    python benchmarks/thinker_decode.py [MODEL] [--tokens 256] [--concurrency 1] [--rounds 8]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint import checkpoint, parser
from vllm import LLM, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args
from vllm_omni_ext.runtime.launch.launcher import environment

QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
_numbers = itertools.count()


async def stock_engine(plan: Any) -> AsyncLLM:
    """Start stock vLLM with the settings of our text stage's first replica."""
    stage = plan.frontend()
    args = stage_engine_args(plan, stage.replicas[0].id)
    with environment({}, defaults=stage.env):
        return AsyncLLM.from_engine_args(replace(args, worker_cls="auto", disable_log_stats=True))


async def decode(engine: Any, prompt: Any, tokens: int) -> tuple[float, float]:
    """Request one answer; return (time of its first token, time of its last), on the clock of `time.perf_counter`."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    first = None
    async for _ in engine.generate(prompt, params, str(next(_numbers))):
        first = first or time.perf_counter()
    assert first is not None
    return first, time.perf_counter()


async def speed(engine: Any, prompt: Any, tokens: int, concurrency: int) -> float:
    """Request `concurrency` answers at once; return the tokens a second of all together, from the first token on."""
    spans = await asyncio.gather(*(decode(engine, prompt, tokens) for _ in range(concurrency)))
    took = max(last for _, last in spans) - min(first for first, _ in spans)
    return concurrency * (tokens - 1) / took


def compare(omni: Any, stock: Any, args: Any) -> tuple[list[float], list[float]]:
    """Return (our tokens a second, stock vLLM's), each by round; the first round of each warms up and is left out."""
    prompt = omni._preprocess_chat_one(QUESTION)
    speeds: tuple[list[float], list[float]] = ([], [])
    turns = [(0, omni._omni), (1, stock)]
    for _ in range(args.rounds + 1):
        for index, engine in turns:
            speeds[index].append(omni._run(speed(engine, prompt, args.tokens, args.concurrency)))
        turns.reverse()
    return speeds[0][1:], speeds[1][1:]


def report(name: str, values: list[float], form: str = "8.1f") -> None:
    """Print median, smallest and largest."""
    print(f"{name:20}{statistics.median(values):{form}}  ({min(values):{form}} to {max(values):{form}})")


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    flags.add_argument("--concurrency", type=int, default=1, help="answers at the same time")
    flags.add_argument("--rounds", type=int, default=8, help="measured rounds of each")
    flags.add_argument("--json", type=Path, help="file that takes every round")
    args = flags.parse_args()
    with checkpoint(args.model) as model, LLM(model, omni=True, max_model_len=args.tokens + 512) as omni:
        stock = omni._run(stock_engine(omni.plan))
        try:
            ours, theirs = compare(omni, stock, args)
        finally:
            omni._run(_shut(stock))
    report("ours, tokens/s", ours)
    report("stock, tokens/s", theirs)
    report("ours / stock", [a / b for a, b in zip(ours, theirs, strict=True)], "8.3f")
    if args.json is not None:
        args.json.write_text(json.dumps({"ours": ours, "stock": theirs}, indent=1))


async def _shut(engine: AsyncLLM) -> None:
    engine.shutdown()


if __name__ == "__main__":
    main()
