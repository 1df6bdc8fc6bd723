"""Measures a spoken answer: first sound, whole answer, several at once, and the parts of the stages' steps.

The lengths are those of `spoken.py`. The printed reference is vllm-omni 0.30 over HTTP, with the same lengths and
checkpoint (released vocabulary, float32) on 2 cores, on an unofficial CPU platform.

Without `--http` the program calls the engines from Python. With it, the program starts `vllm serve MODEL --omni`, and a
client streams chat completions with sound (pcm16). It then prints the client's own CPU time too, and no times of steps.

    python benchmarks/speech.py [MODEL] [--http] [--rounds 10] [--requests 8] [--concurrency 4] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from checkpoint import checkpoint, parser
from spoken import QUESTION, STAGES, Answer, Ask, Lengths, inside, several
from spoken_http import over_http, served
from step_times import EXTENSION, parts_of
from vllm import LLM

from vllm_omni_ext.ids import ReplicaId

REFERENCE = {"first sound, ms": (113, 176), "answer, s": (1.73, 1.89), "8 answers, 4 at once, s": (7.2, 7.2)}


async def rpc(omni: Any, method: str) -> dict[str, Any]:
    """Call a method of the worker extension (`step_times.py`) in the first replica of each stage.

    Returns:
        The result by stage.
    """
    replicas = omni._omni.orchestrator.replicas
    first = {stage: replicas[ReplicaId(stage, 0)].client for stage in STAGES}
    return {stage: (await client.collective_rpc_async(method))[0] for stage, client in first.items()}


class Clock:
    """Measures the CPU seconds of processes between two calls of `take`; the processes are given by name."""

    def __init__(self, processes: Mapping[str, list[psutil.Process]]) -> None:
        self._processes = processes
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(sum(p.cpu_times()[:2]) for p in each) for name, each in self._processes.items()}

    def take(self) -> dict[str, float]:
        """Return the CPU seconds by name since the last call."""
        now, before = self._now(), self._last
        self._last = now
        return {name: now[name] - before[name] for name in now}


@dataclass
class Round:
    """Measurements of one round.

    Attributes:
        alone: an answer without other requests.
        steps: milliseconds of a step by stage and part (`step_times.parts_of`) meanwhile; empty if not measured.
        cpu: CPU seconds by process meanwhile.
        several_s: seconds of several answers, some of them at once.
        several_steps: milliseconds of a step by stage and part meanwhile.
    """

    alone: Answer
    steps: Mapping[str, Mapping[str, float]]
    cpu: Mapping[str, float]
    several_s: float
    several_steps: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Subject:
    """A measured deployment.

    Attributes:
        ask: sends a request with a seed.
        run: runs a coroutine such as `ask(0)` to its end, and returns its result.
        clock: CPU seconds of all processes.
        steps: returns milliseconds of a step by stage and part since its last call; {} if steps are not measured.
    """

    ask: Ask
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    clock: Clock
    steps: Callable[[], dict[str, dict[str, float]]] = dict

    def round(self, requests: int, concurrency: int) -> Round:
        """Measure one answer alone, then `requests` answers, `concurrency` at a time."""
        self.steps(), self.clock.take()
        alone = self.run(self.ask(0))
        cpu, steps = self.clock.take(), self.steps()
        seconds, _ = self.run(several(self.ask, requests, concurrency))
        return Round(alone, steps, cpu, seconds, self.steps())


@contextmanager
def in_python(model: str, *, detailed: bool) -> Iterator[Subject]:
    """Start an `LLM` in this process, and yield it as a subject; `detailed`: measure the parts of engine steps too."""
    overrides = {s: {"engine": {"worker_extension_cls": EXTENSION}} for s in STAGES} if detailed else {}
    with LLM(model, omni=True, stage_overrides=overrides) as omni:
        print(f"prompt: {len(omni._preprocess_chat_one(QUESTION)['prompt_token_ids'])} tokens")
        if detailed:
            omni._run(rpc(omni, "start_step_times"))

        def steps() -> dict[str, dict[str, float]]:
            taken = omni._run(rpc(omni, "take_step_times")) if detailed else {}
            return {stage: parts_of(seconds) for stage, seconds in taken.items()}

        processes = {"API server": [psutil.Process(os.getpid())]}
        processes |= {str(r): [psutil.Process(p.pid)] for r, p in omni._deployment.processes().items()}
        yield Subject(inside(omni, Lengths()), omni._run, Clock(processes), steps)


@contextmanager
def in_server(model: str) -> Iterator[Subject]:
    """Start a server, and yield it as a subject, with requests over HTTP."""
    with served(model, []) as server, over_http(server, Lengths()) as (ask, runner):
        with urllib.request.urlopen(f"{server.base_url}/omni/status") as answer:
            said = json.load(answer)
        names = {each["pid"]: "API server" for each in said["api_servers"]}
        names |= {replica["pid"]: replica["id"] for stage in said["stages"] for replica in stage["replicas"]}
        processes: dict[str, list[psutil.Process]] = {}
        for process in server.processes():
            processes.setdefault(names.get(process.pid, "head, coordinator"), []).append(process)
        processes["client"] = [psutil.Process(os.getpid())]
        yield Subject(ask, runner.run, Clock(processes))


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the smallest and the largest value."""
    return statistics.median(values), min(values), max(values)


def table(rounds: list[Round], requests: int, concurrency: int) -> Iterator[str]:
    """Yield the printed lines."""
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
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--http", action="store_true", help="ask a server over HTTP")
    flags.add_argument("--rounds", type=int, default=10, help="measured rounds, after one that warms up")
    flags.add_argument("--requests", type=int, default=8, help="answers of the run with several at once")
    flags.add_argument("--concurrency", type=int, default=4, help="how many of them at a time")
    flags.add_argument("--no-steps", action="store_true", help="leave the engines as they are: no times of steps")
    flags.add_argument("--json", type=Path, help="file that takes every round")
    args = flags.parse_args()
    with checkpoint(args.model) as model:
        measured = in_server(model) if args.http else in_python(model, detailed=not args.no_steps)
        with measured as subject:
            rounds = [subject.round(args.requests, args.concurrency) for _ in range(args.rounds + 1)][1:]
    print(*table(rounds, args.requests, args.concurrency), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1))


if __name__ == "__main__":
    main()
