"""Compares prefill/decode disaggregation with as many plain replicas; device time is simulated, transfers are real.

Clients with long answers (`writers`) never pause, long prompts with short answers (`readers`) arrive at random. A step
takes `--step` seconds and `--token` more for each token, so a long prompt delays all answers of the same engine. The
program compares two replicas that do both with one prefill and one decode replica. At the end it prints the transfer
rate of KV caches, and that of a copy of as many bytes in memory.

Mooncake listens on all interfaces: run it in a network namespace with only loopback.

    unshare --map-root-user --net sh -c 'ip link set lo up; exec "$@"' sh \\
        python benchmarks/pd.py [MODEL] [--writers 6] [--rate 1.5] [--prompt 1500] [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import checkpoint, parser
from simulated import engine
from vllm import LLM, SamplingParams

PREFILL = "thinker.prefill"
SHORT = 20
"""Tokens of a writer's prompt."""
LONG_ANSWER, SHORT_ANSWER = 200, 4
SETTLE_S = 3.0
MS, MIB, GB = 1e3, 1 << 20, 1e9
COPIES = 20


@dataclass
class Seen:
    """Times of answers at the clients, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        """Return a line with the number of answers, and percentiles in milliseconds: first token, then gaps."""
        first = [f"{np.percentile(self.first, at) * MS:9.0f}" for at in (50, 95)]
        gaps = [f"{np.percentile(self.gaps, at) * MS:9.0f}" for at in (50, 99)] + [f"{max(self.gaps) * MS:9.0f}"]
        return f"{name:<22}{len(self.first):>6}{''.join(first)}{''.join(gaps)}"


async def ask(omni: Any, name: str, prompt: list[int], tokens: int, seen: Seen) -> None:
    """Send one request, and record the times of its outputs."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    last = began = time.monotonic()
    async for _ in omni.generate({"prompt_token_ids": prompt}, params, name):
        now = time.monotonic()
        (seen.first if last == began else seen.gaps).append(now - last)
        last = now


async def load(omni: Any, args: Any, rng: random.Random) -> dict[str, Seen]:
    """Run both kinds of clients for `args.seconds`, and wait for the running requests; return the times by kind."""
    seen = {"writers": Seen(), "readers": Seen()}
    end = time.monotonic() + args.seconds

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, 250) for _ in range(length)]

    async def writer(number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            await ask(omni, f"writer-{number}-{turn}", prompt(SHORT), LONG_ANSWER, seen["writers"])
            turn += 1

    async def readers() -> None:
        async with asyncio.TaskGroup() as under_way:
            number = 0
            while time.monotonic() < end:
                await asyncio.sleep(rng.expovariate(args.rate))
                work = ask(omni, f"reader-{number}", prompt(args.prompt), SHORT_ANSWER, seen["readers"])
                under_way.create_task(work)
                number += 1

    async with asyncio.TaskGroup() as everybody:
        everybody.create_task(readers())
        for number in range(args.writers):
            everybody.create_task(writer(number))
            await asyncio.sleep(SETTLE_S / args.writers)
    return seen


def measure(model: str, args: Any, thinker: dict[str, Any]) -> tuple[dict[str, Seen], dict[str, float]]:
    """Measure one topology.

    Args:
        thinker: settings of the text stage that make the topology.

    Returns:
        (times by kind of client, counters of KV transfers; these are empty without a prefill replica).
    """
    timed = engine(args.step, args.token)
    stages = {"thinker": {**timed, **thinker}}
    size = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    with LLM(model, omni=True, stage_overrides=stages, **size) as llm:
        work = load(llm._omni, args, random.Random(args.seed))
        seen = asyncio.run_coroutine_threadsafe(work, llm._loop).result()
        moved: dict[str, float] = {}
        if "prefill_decode" in thinker:
            (reply,) = llm.collective_rpc("transfer_counters", targets=[PREFILL]).values()
            moved = reply.value[0]
        return seen, moved


def copy_rate(size: int) -> float:
    """Return the bytes a second of the fastest of `COPIES` copies of `size` bytes in memory."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return size / min(times)


def main() -> None:
    """Run this benchmark from the command line: measure both topologies and print a table."""
    flags = parser(__doc__ or "")
    flags.add_argument("--writers", type=int, default=6)
    flags.add_argument("--rate", type=float, default=1.5, help="long prompts a second")
    flags.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    flags.add_argument("--step", type=float, default=0.02, help="seconds a step takes")
    flags.add_argument("--token", type=float, default=0.0002, help="seconds that each token of a step adds")
    flags.add_argument("--seconds", type=float, default=20.0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path)
    args = flags.parse_args()
    topologies = {"2 do both": {"replicas": 2}, "1 prefills, 1 decodes": {"prefill_decode": {}}}
    found: dict[str, Any] = {}
    print(f"{'ms':<22}{'asked':>6}{'first 50':>9}{'95':>9}{'gap 50':>9}{'99':>9}{'max':>9}")
    with checkpoint(args.model) as model:
        for name, thinker in topologies.items():
            seen, moved = measure(model, args, thinker)
            found[name] = {kind: asdict(each) for kind, each in seen.items()} | {"moved": moved}
            print(name)
            for kind, each in seen.items():
                print(each.row(f"  {kind}"))
    each = moved["bytes"] / moved["transfers"]
    rate, copied = moved["bytes"] / moved["seconds"], copy_rate(round(each))
    print(f"moved {moved['bytes'] / MIB:.0f} MiB in {moved['transfers']:.0f} transfers of {each / MIB:.2f} MiB: "
          f"{rate / GB:.2f} GB/s; a copy of as much in memory {copied / GB:.2f} GB/s")  # fmt: skip
    found |= {"transfer_bytes_s": rate, "copy_bytes_s": copied}
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
