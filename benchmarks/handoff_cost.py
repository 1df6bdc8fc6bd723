"""Measures one more message between stages: bytes, system calls, copies and microseconds, for a token and a frame.

Answers of fixed lengths are made twice on the same engines: once with a message for every token (then: every frame),
once with one message for all. The cost of a message is the difference divided by the number of additional messages.
Both kinds take turns.

    bytes      of the messages, as vLLM encodes them for its socket
    add, us    time in `Replica.add`: encoding a message and sending it to ZeroMQ
    CPU, us    of the API server (this process) and of the stage that receives the messages: with chunks it runs more
               and smaller steps, and they are included (for code2wav they are most of it)
    calls      system calls, counted by strace in separate rounds without time figures
    naming     calls that make, open or remove something in a file system, or make memory that is a file
    copies     of the ids, by construction: two when a message is encoded and decoded, two in the kernel's socket

    python benchmarks/handoff_cost.py [MODEL] [--length 200] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import syscalls
from checkpoint import checkpoint, parser
from handoff_bytes import sent_to
from spoken import QUESTION
from vllm import LLM, SamplingParams

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.plugins.runtime import RequestOptions

ALL = "all"
EDGES = {"text": ReplicaId("talker", 0), "frames": ReplicaId("code2wav", 0)}
"""Measured edges (connections between two stages): name in `chunks` -> replica that receives the messages.

The items of a message are tokens of the answer ("text") or frames ("frames").
"""

COPIES = "2 + 2"
US = 1e6
API = "API server"

_numbers = itertools.count()


@dataclass
class Turn:
    """Measurements of one kind of messages over one edge.

    Attributes:
        messages, bytes: number of messages to the receiving stage, and their bytes, for one answer.
        add: seconds of each call of `Replica.add`.
        cpu: CPU seconds of one answer by process: `API` and the receiver.
        calls: system calls of one answer by process and name of the call; empty if they were not counted.
    """

    messages: int = 0
    bytes: int = 0
    add: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    calls: dict[str, Counter[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The cost of one more message over an edge.

    Attributes:
        messages: number of additional messages from which the costs were computed.
        bytes: bytes of a message.
        add_us: median time of a call of `Replica.add`.
        cpu_us: CPU time by process.
        calls: system calls by process.
        naming: those of the calls that name something in a file system.
        often: the frequent system calls, by name.
    """

    edge: str
    messages: int
    bytes: float
    add_us: float
    cpu_us: Mapping[str, float]
    calls: Mapping[str, float]
    naming: float
    often: Mapping[str, float]


def chunks(edge: str, *, one_by_one: bool) -> dict[str, Any]:
    """Return chunk sizes for a request.

    Each edge gets one message with all items, except that `edge` gets one message per item if `one_by_one`.
    """
    made: dict[str, Any] = dict.fromkeys(EDGES, ALL)
    return made | ({edge: [1], "adaptive": False} if one_by_one else {})


async def answer(omni: Any, prompt: Any, length: int, sizes: Mapping[str, Any]) -> None:
    """Run one request without sampling, with `length` tokens, `length` frames, and these chunk sizes."""
    talker = SamplingParams(temperature=0, max_tokens=length + 1, min_tokens=length + 1)
    text = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    options = RequestOptions(modalities=("text", "audio"), params={"talker": talker}, chunks=sizes, streamed=True)
    async for _ in omni._omni.generate(prompt, text, f"cost-{next(_numbers)}", options=options):
        pass


@contextmanager
def timed(omni: Any, replica: ReplicaId) -> Iterator[list[float]]:
    """Yield a list of the seconds of each call of `Replica.add` of a replica inside the block."""
    target = omni._omni.orchestrator.replicas[replica]
    add, took = target.add, []

    async def timing(request: Any) -> None:
        began = time.perf_counter()
        await add(request)
        took.append(time.perf_counter() - began)

    target.add = timing
    try:
        yield took
    finally:
        del target.add


class Bench:
    """Measures answers of `length` tokens and frames on one deployment."""

    def __init__(self, omni: Any, length: int) -> None:
        self._omni, self._length = omni, length
        self._prompt = omni._preprocess_chat_one(QUESTION)
        self._pids = {str(replica): process.pid for replica, process in omni._deployment.processes().items()}

    def turn(self, edge: str, *, one_by_one: bool, count: bool) -> Turn:
        """Measure one kind of messages over an edge: sizes of one answer, times of another, system calls of a third.

        Args:
            one_by_one: one message per item; False: one message with all items.
            count: whether to count system calls.
        """
        sizes, replica, made = chunks(edge, one_by_one=one_by_one), EDGES[edge], Turn()
        pids = {API: os.getpid(), str(replica): self._pids[str(replica)]}

        def run() -> None:
            self._omni._run(answer(self._omni, self._prompt, self._length, sizes))

        with sent_to(self._omni, replica) as sent:
            run()
        made.messages, made.bytes = len(sent), sum(sent)
        before = cpu(pids)
        with timed(self._omni, replica) as made.add:
            run()
        made.cpu = {name: after - before[name] for name, after in cpu(pids).items()}
        if count:
            with syscalls.counted(pids) as made.calls:
                run()
        return made


def cpu(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the CPU seconds of each process so far."""
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


def cost(edge: str, single: list[Turn], whole: list[Turn]) -> Cost:
    """Return the cost of one more message, from the medians of both kinds of messages.

    Args:
        single: rounds with one message per item.
        whole: rounds with one message for all items.
    """
    more = single[0].messages - whole[0].messages

    def each(value: Any) -> float:
        one, other = (statistics.median(value(turn) for turn in turns) for turns in (single, whole))
        return (one - other) / more

    names = list(single[0].cpu)
    called = sorted({call for turn in single for counts in turn.calls.values() for call in counts})
    by_call = {call: each(lambda turn, c=call: sum(counts[c] for counts in turn.calls.values())) for call in called}
    return Cost(
        edge=edge,
        messages=more,
        bytes=each(lambda turn: turn.bytes),
        add_us=US * statistics.median(seconds for turn in single for seconds in turn.add),
        cpu_us={name: US * each(lambda turn, n=name: turn.cpu[n]) for name in names},
        calls={name: each(lambda turn, n=name: turn.calls[n].total()) for name in names if single[0].calls},
        naming=sum(value for call, value in by_call.items() if call in syscalls.NAMING),
        often={call: value for call, value in by_call.items() if abs(value) >= 0.1},
    )


def sizes(turn: Turn) -> dict[str, Any]:
    """Return the figures of a turn for the file."""
    return {"messages": turn.messages, "bytes": turn.bytes, "add": turn.add, "cpu": turn.cpu}


def table(costs: list[Cost]) -> Iterator[str]:
    """Yield the printed lines."""
    for each in costs:
        receiver = str(EDGES[each.edge])
        yield f"{each.edge}, one more message ({each.messages} were sent more), to {receiver}"
        yield f"  bytes {each.bytes:.1f}, copies {COPIES}, add {each.add_us:.0f} us"
        yield "  CPU, us: " + ", ".join(f"{name} {value:.0f}" for name, value in each.cpu_us.items())
        if each.calls:
            yield "  system calls: " + ", ".join(f"{name} {value:.1f}" for name, value in each.calls.items())
            yield "    " + ", ".join(f"{call} {value:.1f}" for call, value in sorted(each.often.items()))
            yield f"  of these, naming something in a file system: {each.naming:.3f}"
        else:
            yield "  system calls: strace is not installed"


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--length", type=int, default=200, help="tokens, and frames, of an answer")
    flags.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    flags.add_argument("--json", type=Path, help="file that takes the figures")
    args = flags.parse_args()
    costs, turns = [], []
    with checkpoint(args.model) as model, LLM(model, omni=True, max_model_len=args.length + 512) as omni:
        bench = Bench(omni, args.length)
        for edge in EDGES:
            single: list[Turn] = []
            whole: list[Turn] = []
            for round_ in range(args.rounds + 1):
                count = bool(round_) and syscalls.available()
                single.append(bench.turn(edge, one_by_one=True, count=count))
                whole.append(bench.turn(edge, one_by_one=False, count=count))
            costs.append(cost(edge, single[1:], whole[1:]))
            turns.append({"single": [*map(sizes, single[1:])], "whole": [*map(sizes, whole[1:])]})
    print(*table(costs), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(c) | t for c, t in zip(costs, turns, strict=True)], indent=1))


if __name__ == "__main__":
    main()
