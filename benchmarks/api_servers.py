"""Compares 1 and 2 API servers, of this package and of stock vLLM; device time is simulated.

Each step of the text stage takes `--step` seconds. Requests arrive at random times (Poisson), `--rate` a second, and
are streamed: text prompts, then prompts with a sound. "ours" (three stages, text output) and "stock vLLM" (the text
stage's model alone) receive the same requests at the same times.

The program prints completed requests a second, the time to the first token from the moment a request is due, the mean
time between tokens, and CPU seconds a request by kind of process. All processes share the cores of one machine, so a
second API server saves time only where cores are free for it. CPU seconds a request do not depend on that.

    python benchmarks/api_servers.py [MODEL] [--rate 40] [--seconds 20] [--servers 1 2] [--json FILE]
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
import numpy as np
import soundfile
from checkpoint import checkpoint, parser
from simulated import PYTHONPATH, engine, flags

from examples.server import HOST, Server, command

MODEL = "model"
WORDS = [str(number) for number in range(1000)]
SOUND_RATE = 16_000
SEED = 7
WARM_UP = 4
"""Requests of each kind that are not measured."""

LATEST_S = 120.0
"""Time limit of a request, in seconds in addition to `--seconds`."""

CACHE_BYTES = 64 << 20
"""KV cache of a text stage: room for all requests that it runs at once."""

OURS, STOCK = "ours", "stock vLLM"
STOCK_PROGRAM = str(Path(__file__).with_name("stock.py"))
SERVER_HEADER = "X-Api-Server"


@dataclass
class Run:
    """Results of one load on one server.

    Attributes:
        name: `OURS` or `STOCK`.
        servers: number of API servers.
        kind: prompts: "text" or "audio".
        sent: number of requests.
        seconds: from the first due time to the last answer.
        first: seconds from the due time of a request to its first token, for each request.
        gaps: seconds between two successive tokens of a request, of all requests.
        cpu: CPU seconds by kind of process.
        by_server: number of answered requests by API server.
        failed: number of failed requests by error.
    """

    name: str
    servers: int
    kind: str
    sent: int
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    by_server: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """Return the figures of this run as JSON data."""
        done = len(self.first)
        return {
            "who": self.name,
            "servers": self.servers,
            "kind": self.kind,
            "sent": self.sent,
            "failed": dict(self.failed),
            "requests_per_s": done / self.seconds,
            "first_s": self.first,
            "gaps_s": self.gaps,
            "per_token_mean_s": float(np.mean(self.gaps)) if self.gaps else None,
            "ttft_mean_s": float(np.mean(self.first)),
            "ttft_p99_s": float(np.percentile(self.first, 99)),
            "cpu_ms_per_request": {kind: seconds / done * 1e3 for kind, seconds in sorted(self.cpu.items())},
            "by_server": dict(self.by_server),
        }


def bodies(kind: str, count: int, args: Any) -> list[dict[str, Any]]:
    """Return the bodies of `count` different requests of a kind ("text" or "audio")."""
    chance = random.Random(SEED)
    made = []
    for number in range(count):
        text = f"{number} " + " ".join(chance.choices(WORDS, k=args.words))
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if kind == "audio":
            parts.insert(
                0, {"type": "input_audio", "input_audio": {"data": sound(number, args.sound), "format": "wav"}}
            )
        made.append(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": parts}],
                "modalities": ["text"],  # the default of ours includes sound
                "max_completion_tokens": args.tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )
    return made


def sound(seed: int, seconds: float) -> str:
    """Return noise as base64 of a WAV file; it differs for each request, so no cache contains it."""
    noise = np.random.default_rng(seed).normal(0, 0.1, round(seconds * SOUND_RATE)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, noise, SOUND_RATE, format="WAV", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode("ascii")


def serving(name: str, servers: int, model: str, log: Path, args: Any) -> Server:
    """Return a server of ours or of stock vLLM that is not started yet.

    Args:
        name: `OURS` or `STOCK`.
        servers: number of API servers.
    """
    length = ["--served-model-name", MODEL, "--max-model-len", "1024", "--max-num-seqs", str(args.slots)]
    quiet = ["--disable-uvicorn-access-log", "--api-server-count", str(servers)]
    made = Server(model, log)
    where = ["--host", HOST, "--port", str(made.port), "--dtype", "float32", "--enforce-eager"]
    where += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
    if name == OURS:
        stages = json.dumps({"thinker": engine(args.step)})
        extra = ["--omni", "--stage-overrides", stages]
    else:
        extra = [*flags(args.step), "--limit-mm-per-prompt", '{"audio": 1, "image": 1, "video": 1}']
    program = command() if name == OURS else [sys.executable, STOCK_PROGRAM]
    made.words = [*program, "serve", model, *where, *length, *quiet, *extra]
    return made


def kinds(server: Server, name: str) -> dict[int, str]:
    """Return "engines" or "API servers" by process id.

    Ours reports the ids in `/omni/status`; stock vLLM writes them at the beginning of each log line.
    """
    if name == OURS:
        with urllib.request.urlopen(f"{server.base_url}/omni/status") as answer:
            said = json.load(answer)
        api = {each["pid"] for each in said["api_servers"]}
        engines = {replica["pid"] for stage in said["stages"] for replica in stage["replicas"]}
    else:
        logged = re.findall(r"\((\w+) pid=(\d+)\)", server.log.read_text(errors="replace"))
        engines = {int(pid) for title, pid in logged if title.startswith("EngineCore")}
        api = {int(pid) for title, pid in logged if title.lower().startswith("apiserver")}
    return dict.fromkeys(engines, "engines") | dict.fromkeys(api, "API servers")


def cpu(server: Server, known: dict[int, str]) -> Counter[str]:
    """Return the CPU seconds so far of a server's processes, by kind (see `kinds`, else "the rest")."""
    spent: Counter[str] = Counter()
    for process in server.processes():
        times = process.cpu_times()
        spent[known.get(process.pid, "the rest")] += times.user + times.system
    return spent


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], due: float, run: Run | None) -> None:
    """Send one request when it is due, and record its times in `run`; None: the request only warms up."""
    await asyncio.sleep(due - time.monotonic())
    times: list[float] = []
    try:
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if b'"content":"' in line.replace(b'"content":""', b""):
                    times.append(time.monotonic())
            server = answer.headers.get(SERVER_HEADER, "")
    except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
        if run is None:
            raise
        run.failed[str(error)[:100]] += 1
        return
    if run is not None and times:
        run.first.append(times[0] - due)
        run.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        run.by_server[server] += 1


async def load(server: Server, run: Run, args: Any) -> None:
    """Send all requests of a run, after some that warm up, and record the results in `run`."""
    asked = bodies(run.kind, WARM_UP + run.sent, args)
    chance = random.Random(SEED)
    limits = aiohttp.TCPConnector(limit=0, force_close=True)  # one connection a request, as from separate clients
    timeout = aiohttp.ClientTimeout(total=args.seconds + LATEST_S)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        now = time.monotonic()
        await asyncio.gather(*(ask(session, server.base_url, body, now, None) for body in asked[:WARM_UP]))
        known = kinds(server, run.name)
        before, mine, began = cpu(server, known), time.process_time(), time.monotonic()
        due, tasks = began, []
        for body in asked[WARM_UP:]:
            due += chance.expovariate(args.rate)
            tasks.append(asyncio.create_task(ask(session, server.base_url, body, due, run)))
        await asyncio.gather(*tasks)
        run.seconds = time.monotonic() - began
        run.cpu = {kind: spent - before[kind] for kind, spent in cpu(server, known).items()}
        run.cpu["this program"] = time.process_time() - mine


def show(runs: Iterable[Run]) -> None:
    """Print one line for each run."""
    print(f"{'':<26}{'requests/s':>11}{'TTFT mean':>11}{'p99, ms':>10}{'a token':>9}   CPU ms a request")
    for run in runs:
        figures = run.figures()
        spent = ", ".join(f"{kind} {ms:.1f}" for kind, ms in figures["cpu_ms_per_request"].items())
        shares = " / ".join(str(count) for _, count in sorted(run.by_server.items()))
        failed = f"; FAILED {dict(run.failed)}" if run.failed else ""
        print(
            f"{f'{run.kind}, {run.name}, {run.servers}':<26}{figures['requests_per_s']:>11.1f}"
            f"{figures['ttft_mean_s'] * 1e3:>11.0f}{figures['ttft_p99_s'] * 1e3:>10.0f}"
            f"{(figures['per_token_mean_s'] or 0) * 1e3:>9.1f}   {spent}"
            f"{f'; requests {shares}' if run.servers > 1 and run.name == OURS else ''}{failed}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Start each server, send each load to it, and print the results."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--servers", nargs="+", type=int, default=[1, 2], help="numbers of API servers to compare")
    arguments.add_argument("--kinds", nargs="+", default=["text", "audio"], choices=["text", "audio"])
    arguments.add_argument("--who", nargs="+", default=[OURS, STOCK], choices=[OURS, STOCK])
    arguments.add_argument("--rate", type=float, default=40.0, help="requests a second")
    arguments.add_argument("--audio-rate", type=float, help="the same with a sound; default: a quarter of --rate")
    arguments.add_argument("--seconds", type=float, default=20.0, help="for how long requests are sent")
    arguments.add_argument("--step", type=float, default=0.02, help="seconds of a step of the text stage")
    arguments.add_argument("--slots", type=int, default=64, help="requests the text stage runs at once")
    arguments.add_argument("--words", type=int, default=100, help="words of a prompt")
    arguments.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    arguments.add_argument("--sound", type=float, default=2.0, help="seconds of a sound")
    arguments.add_argument("--json", type=Path, help="write the figures here too")
    args = arguments.parse_args(argv)
    rates = {"text": args.rate, "audio": args.audio_rate or args.rate / 4}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PYTHONPATH, os.environ.get("PYTHONPATH"))))
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # as for our text stage here
    runs = []
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as folder:
        for servers in args.servers:
            for name in args.who:
                with serving(name, servers, model, Path(folder, f"{name}-{servers}.log"), args) as server:
                    for kind in args.kinds:
                        args.rate = rates[kind]
                        runs.append(Run(name, servers, kind, sent=round(args.rate * args.seconds)))
                        asyncio.run(load(server, runs[-1], args))
                        show(runs[-1:])
    print(f"\n{args.step * 1e3:g} ms a step, {args.slots} at once, {args.words} words in, {args.tokens} tokens out")
    show(sorted(runs, key=lambda run: (run.kind, run.servers, run.name)))
    if args.json is not None:
        args.json.write_text(json.dumps([run.figures() for run in runs], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
