"""Sends mixed requests for a long time while processes are killed, and counts lost requests and leftover resources.

A server with two replicas of each stage and two API servers answers texts, spoken answers, read-aloud texts, pictures
and sounds. The clients abort some requests in the middle or at once. Seven of its processes are killed once within
`--settle` seconds, and then one every `--kill-every` seconds. Each answer is compared with the first one to the same
request, from before the first kill. A request whose connection broke, because its API server was killed, is sent again.

After `--settle` seconds, and at the end, the clients pause. Many requests are sent at once, among them pictures and
sounds that are new to each process. Then memory (PSS and RSS), file descriptors, threads, shared memory and blocks are
counted.

    python benchmarks/soak.py [MODEL] [--seconds 1200] [--settle 120] [--kill-every 60] [--clients 6] [--json FILE]

The exit status is 1 if a request was lost, or descriptors, threads, shared memory or blocks were left over.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
import numpy as np
import psutil
import soundfile
from checkpoint import checkpoint, parser
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from examples.server import Server, alive

MODEL = "model"
TRIES = 5
"""Number of attempts for a request whose connection breaks."""
ANSWER_S = 120.0
QUIET_S = 120.0
"""Longest wait, in seconds, until no request runs and all killed processes have been started again."""
LOOK_EVERY_S = 0.5
EACH_AT_ONCE = 4
"""Number of requests of each kind that are sent at once before resources are counted: more than the clients send.

So every process reaches its largest memory before it is counted. A process keeps its memory, and would otherwise reach
the largest size at a random time.
"""
NEW_MEDIA = 16
"""Number of requests with new media that are sent at once before resources are counted.

They reach every process, which then has opened all files that it needs for media.
"""
POOLED_THREADS = 20
"""Threads that an API server may start later: its pools (media, files, AnyIO) start one when none is idle.

The threads of connections, from ZeroMQ, are not included.
"""
MESSAGE_THREADS = 2
"""Threads of a ZeroMQ context that pyzmq creates in a process with the first large message."""
SOURCES, SOURCE_CONNECTIONS, SOURCE_THREADS = 2, 2, 3
"""Number of thinker processes from which a talker may read its first hidden states between two levels, and the threads
for each of them: of ZeroMQ, and all.

The threads of an ended thinker process stay until a talker has more than 8 unused ones
(`vllm_omni_ext.engine.edge_receiver`).
"""
VICTIMS = ("talker/1", "code2wav/1", "thinker/0", "talker/0", "api_server/1", "coordinator", "api_server/0")
"""Processes to kill, in this order: engines need the longest time to reach their final level, so they come first."""
FLAGS = ("--served-model-name", MODEL, "--max-model-len", "2048", "--api-server-count", "2")
TWO = json.dumps({stage: {"replicas": 2} for stage in ("thinker", "talker", "code2wav")})


class Wrong(Exception):
    """An answer is an error, or differs from the first answer to the same request; or the server stays busy."""


def chat(content: Any, **more: Any) -> dict[str, Any]:
    """Return the body of a chat request without sampling, with fixed lengths; `more` are further fields."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_completion_tokens": 24,
        "ignore_eos": True,
        "talker": {"temperature": 0, "min_tokens": 32, "max_tokens": 33},
        **more,
    }


def picture(seed: int = 0) -> dict[str, Any]:
    """Return a part of a message with a small picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sound(seed: int = 1) -> dict[str, Any]:
    """Return a part of a message with half a second of noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, 8000).astype("f4")
    soundfile.write(file := io.BytesIO(), noise, 16_000, format="wav")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


TEXT = {"modalities": ["text"], "talker": None}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
STREAMED = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}, "stream": True}
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "text": ("/chat/completions", chat("Tell me about the moon.", **TEXT)),
    "spoken": ("/chat/completions", chat("What is this?", **SPOKEN)),
    "streamed": ("/chat/completions", chat("Sing me a song.", **STREAMED)),
    "read aloud": ("/audio/speech", {"model": MODEL, "input": "The blue cat.", "voice": "ethan"}),
    "picture": ("/chat/completions", chat([picture(), {"type": "text", "text": "What is it?"}], **TEXT)),
    "sound": ("/chat/completions", chat([sound(), {"type": "text", "text": "What is it?"}], **SPOKEN)),
}
GIVEN_UP = ("given up in the middle", "given up at once")
READ_ALOUD = {"talker": {"temperature": 0, "min_tokens": 32, "max_tokens": 33}}


@dataclass(frozen=True)
class Level:
    """Resources of an idle server.

    Attributes:
        pss, rss: bytes of memory by process.
        descriptors: open file descriptors by process.
        threads, zmq_threads: all threads, and those of ZeroMQ, by process.
        shared_bytes, shared_names: bytes and files in /dev/shm.
        requests: open requests of all replicas.
        blocks: sum of the shares of used KV cache blocks of all replicas.
    """

    pss: dict[str, int]
    rss: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    zmq_threads: dict[str, int]
    shared_bytes: int
    shared_names: int
    requests: float
    blocks: float

    def left_over(self, before: Level) -> list[str]:
        """Return a text for each resource, except memory, of which this level has more than an earlier level.

        Threads that a process may start later (`late_threads`) are allowed.
        """
        kinds = {
            "descriptors": (self.descriptors, before.descriptors),
            "threads of connections": (self.zmq_threads, before.zmq_threads),
            "threads": (self.threads, before.threads),
        }
        found = [
            f"{name}: {now[name] - was.get(name, 0)} more {kind}"
            for kind, (now, was) in kinds.items()
            for name in now
            if now[name] > was.get(name, 0) + late_threads(kind, name)
        ]
        if self.shared_names > before.shared_names:
            found.append(f"{self.shared_names - before.shared_names} more names in /dev/shm")
        return found + ["requests are held"] * bool(self.requests) + ["blocks are held"] * bool(self.blocks)


def late_threads(kind: str, name: str) -> int:
    """Return the number of threads of a kind that a process may start between two levels.

    Args:
        kind: "threads", "threads of connections" or another resource.
        name: of the process.
    """
    late = {
        "api_server": {"threads": POOLED_THREADS + MESSAGE_THREADS, "threads of connections": MESSAGE_THREADS},
        "talker": {"threads": SOURCES * SOURCE_THREADS, "threads of connections": SOURCES * SOURCE_CONNECTIONS},
    }
    return late.get(name.partition("/")[0], {}).get(kind, 0)


@dataclass
class Result:
    """The result of a run.

    Attributes:
        outcomes: number of answered, given up and repeated requests by kind.
        lost: a text for each request without its right answer.
        killed: number of killed processes by kind.
        levels: resources after `--settle` seconds, and at the end.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    levels: list[Level] = field(default_factory=list)

    def growth(self) -> dict[str, float]:
        """Return the growth of all processes' memory between the levels, as a share of the first.

        "pss" counts a page once, and again when a process that shares it writes to it; "rss" counts a page in every
        process that has it, shared or not.
        """
        first, last = self.levels[0], self.levels[-1]
        kinds = {"pss": (first.pss, last.pss), "rss": (first.rss, last.rss)}
        return {kind: sum(now.values()) / sum(was.values()) - 1 for kind, (was, now) in kinds.items()}

    def left_over(self) -> list[str]:
        """Return a text for each resource of which the server has more at the end than after `--settle` seconds."""
        return self.levels[-1].left_over(self.levels[0])


class Soak:
    """Clients of one server, the task that kills its processes, and their result."""

    def __init__(self, server: Server, seed: int = 0) -> None:
        self._server = server
        self._chance = random.Random(seed)
        self._expected: dict[str, Any] = {}
        self._going = asyncio.Event()
        self._asked = 0
        self._seeds = itertools.count(2)
        self.result = Result()

    # -- requests -----------------------------------------------------------------------------------------------

    async def client(self) -> None:
        """Send one request after the other, until cancelled."""
        while True:
            await self._going.wait()
            kind = self._chance.choice((*REQUESTS, *GIVEN_UP))
            self._asked += 1
            try:
                await self._answered(kind)
            finally:
                self._asked -= 1

    async def _answered(self, kind: str) -> None:
        for _ in range(TRIES):
            try:
                outcome = await (self._give_up(kind) if kind in GIVEN_UP else self.ask(kind))
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                self.result.outcomes["connections that broke"] += 1
                await asyncio.sleep(LOOK_EVERY_S)  # until the next API server accepts connections
                continue
            except (Wrong, TimeoutError) as error:
                self.result.lost.append(f"{kind}: {error!r}")
                return
            self.result.outcomes[outcome] += 1
            return
        self.result.lost.append(f"{kind}: the connection broke {TRIES} times")

    async def ask(self, kind: str) -> str:
        """Send a request, and compare its answer with the first answer of this kind; return the kind.

        Raises:
            Wrong: the answer is an error, or differs.
        """
        path, fields = REQUESTS[kind]
        if kind == "read aloud":
            fields = fields | READ_ALOUD
        async with self._post(path, fields) as reply:
            if reply.status != 200:
                raise Wrong(f"status {reply.status}: {(await reply.text())[:300]}")
            answer = heard(kind, await reply.read())
        if not same(self._expected.setdefault(kind, answer), answer):
            raise Wrong("another answer than the first one")
        return kind

    async def _give_up(self, kind: str) -> str:
        path, fields = REQUESTS["streamed"]
        async with self._post(path, fields) as reply:
            if kind == GIVEN_UP[0]:
                async for _ in reply.content:
                    break
            reply.close()
        return kind

    @asynccontextmanager
    async def _post(self, path: str, fields: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request over a connection of its own, which any API server may accept."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        connector = aiohttp.TCPConnector(force_close=True)
        url = self._server.base_url + path
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limit) as session,
            session.post(url, json=fields) as reply,
        ):
            yield reply

    # -- processes ----------------------------------------------------------------------------------------------

    async def killer(self, settle_s: float, every_s: float) -> None:
        """Kill one process after the other, until cancelled.

        Each process of `VICTIMS` is killed once within `settle_s`, because a restarted process has more descriptors
        than the first one: it is forked from a head that has connections by then. So both levels count restarted
        processes. Afterwards a process is killed every `every_s` seconds.
        """
        for number, victim in enumerate(itertools.cycle(VICTIMS)):
            await asyncio.sleep(settle_s / (len(VICTIMS) + 1) if number < len(VICTIMS) else every_s)
            await self._going.wait()
            os.kill((await self.processes())[victim], signal.SIGKILL)
            self.result.killed[victim.partition("/")[0]] += 1

    async def processes(self) -> dict[str, int]:
        """Return process ids by name, from the server's status."""
        said = json.loads(await self._get("/v1/omni/status"))
        found = {each["id"]: each["pid"] for stage in said["stages"] for each in stage["replicas"]}
        found |= {f"api_server/{each['index']}": each["pid"] for each in said["api_servers"]}
        return {**found, "coordinator": said["coordinator"]["pid"], "head": self._server.pid}

    async def _get(self, path: str) -> str:
        url = self._server.base_url.removesuffix("/v1") + path
        for _ in range(TRIES):
            try:
                async with aiohttp.ClientSession() as session, session.get(url) as reply:
                    return await reply.text()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(LOOK_EVERY_S)
        raise ConnectionError(f"{url} does not answer")

    # -- levels -------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Let the clients send requests."""
        self._going.set()

    async def level(self) -> Level:
        """Pause the clients, wait until the server is idle and has all its processes, and count."""
        self._going.clear()
        await until_nothing(self._busy)
        many = [self._answered(kind) for kind in REQUESTS for _ in range(EACH_AT_ONCE)]
        await asyncio.gather(*many, *(self._ask_about_new_media() for _ in range(NEW_MEDIA)))
        await until_nothing(self._busy)
        return counted(await self.processes(), *await self._held())

    async def _ask_about_new_media(self) -> None:
        """Send a request with a new picture or sound: a repeated one goes to the replica that had it before."""
        path, fields = REQUESTS["sound"]
        seed = next(self._seeds)
        content = [picture(seed) if seed % 2 else sound(seed), {"type": "text", "text": "What is it?"}]
        async with self._post(path, fields | {"messages": [{"role": "user", "content": content}]}) as reply:
            if reply.status != 200:
                raise Wrong(f"status {reply.status}: {(await reply.text())[:300]}")
            await reply.read()

    async def _busy(self) -> str:
        """Return a text with the reasons why the server is not idle or lacks a process; "" if there is none."""
        said = json.loads(await self._get("/v1/omni/status"))
        replicas = [each for stage in said["stages"] for each in stage["replicas"]]
        states = {each["state"] for each in (*replicas, *said["api_servers"])}
        held = any(each["running"] + each["waiting"] for each in replicas)
        requests, blocks = await self._held()
        facts = {"asked": self._asked, "running": held, "requests": requests, "blocks": blocks}
        return " ".join([f"{name}={fact}" for name, fact in facts.items() if fact] + sorted(states - {"UP"}))

    async def _held(self) -> tuple[float, float]:
        """Return (open requests, sum of the shares of used KV cache blocks) of all replicas."""
        sums: Counter[str] = Counter()
        for family in text_string_to_metric_families(await self._get("/metrics")):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return sums["vllm_omni_ext:replica_requests_in_flight"], sums["vllm:kv_cache_usage_perc"]


def heard(kind: str, body: bytes) -> Any:
    """Return (text, int16 samples) of the body of an answer; both may be empty.

    Args:
        kind: key of `REQUESTS`.

    Raises:
        Wrong: a streamed answer contains an error.
    """
    if kind == "read aloud":
        return "", soundfile.read(io.BytesIO(body), dtype="int16")[0]
    if kind != "streamed":
        message = json.loads(body)["choices"][0]["message"]
        spoken = message.get("audio")
        data = io.BytesIO(base64.b64decode(spoken["data"])) if spoken else None
        return message["content"], np.zeros(0, "i2") if data is None else soundfile.read(data, dtype="int16")[0]
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    if errors := [event["error"] for event in events if "error" in event]:
        raise Wrong(str(errors[0]))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [base64.b64decode(delta["audio"]["data"]) for delta in deltas if (delta.get("audio") or {}).get("data")]
    return "".join(delta.get("content") or "" for delta in deltas), np.frombuffer(b"".join(pieces), "<i2")


def same(one: Any, other: Any) -> bool:
    """Return whether two answers, (text, samples), are equal. Samples may differ by 1, because sums are rounded."""
    (text, samples), (others_text, others_samples) = one, other
    if text != others_text or len(samples) != len(others_samples):
        return False
    return bool((np.abs(samples.astype("i4") - others_samples.astype("i4")) <= 1).all())


def counted(processes: Mapping[str, int], requests: float, blocks: float) -> Level:
    """Measure the resources of processes, given as name -> process id; `requests` and `blocks` are passed on."""
    found = {name: psutil.Process(pid) for name, pid in processes.items()}
    memory = {name: process.memory_full_info() for name, process in found.items()}
    return Level(
        pss={name: each.pss for name, each in memory.items()},
        rss={name: each.rss for name, each in memory.items()},
        descriptors={name: process.num_fds() for name, process in found.items()},
        threads={name: process.num_threads() for name, process in found.items()},
        zmq_threads={name: zmq_threads(process.pid) for name, process in found.items()},
        shared_bytes=psutil.disk_usage("/dev/shm").used,
        shared_names=len(os.listdir("/dev/shm")),
        requests=requests,
        blocks=blocks,
    )


def zmq_threads(pid: int) -> int:
    """Return the number of a process's threads from ZeroMQ, by their names."""
    names = (task.joinpath("comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(name.startswith("ZMQbg") for name in names)


async def until_nothing(look: Callable[[], Awaitable[str]]) -> None:
    """Call `look` until it returns an empty string.

    Raises:
        Wrong: the string is not empty after `QUIET_S`.
    """
    deadline = time.monotonic() + QUIET_S
    while found := await look():
        if time.monotonic() > deadline:
            raise Wrong(f"the server does not come to rest: {found}")
        await asyncio.sleep(LOOK_EVERY_S)


async def soak(server: Server, *, seconds: float, settle: float, kill_every: float, clients: int) -> Result:
    """Run clients and the killer of processes on a server for `seconds`, and return the result."""
    run, began = Soak(server), time.monotonic()
    for kind in REQUESTS:
        await run.ask(kind)
    tasks = [asyncio.create_task(run.client()) for _ in range(clients)]
    tasks.append(asyncio.create_task(run.killer(settle, kill_every)))
    try:
        for end in (settle, seconds):
            run.go()
            await asyncio.sleep(max(0.0, began + end - time.monotonic()))
            run.result.levels.append(await run.level())
            if failed := [task for task in tasks if task.done()]:
                failed[0].result()
    finally:
        for task in tasks:
            task.cancel()
    return run.result


def show(result: Result) -> None:
    """Print the result."""
    print(f"answered: {dict(result.outcomes)}; killed: {dict(result.killed)}")
    widths = {"PSS, MiB": (10, 8), "RSS, MiB": (9, 8), "fds": (6, 6), "threads": (8, 6), "ZMQ": (6, 6)}
    print(" " * 14 + "".join(f"{name:>{one}}{'later':>{two}}" for name, (one, two) in widths.items()))
    first, last = result.levels[0], result.levels[-1]
    for name in sorted(last.pss):
        mib = [each.get(name, 0) / 2**20 for each in (first.pss, last.pss, first.rss, last.rss)]
        tables = [(level.descriptors, level.threads, level.zmq_threads) for level in (first, last)]
        counts = [table.get(name, 0) for pair in zip(*tables, strict=True) for table in pair]
        cells = "".join(f"{count:>{width}}" for count, width in zip(counts, (6, 6, 8, 6, 6, 6), strict=True))
        amounts = "".join(f"{each:>{width}.1f}" for each, width in zip(mib, (10, 8, 9, 8), strict=True))
        print(f"{name:<14}{amounts}{cells}")
    growth = ", ".join(f"{kind.upper()} {share:+.2%}" for kind, share in result.growth().items())
    print(f"memory of all: {growth}; shared memory: {last.shared_bytes - first.shared_bytes:+,} bytes")
    print(f"left over: {', '.join(result.left_over()) or 'nothing'}")
    print(f"lost: {len(result.lost)}", *result.lost[:10], sep="\n  ")


def main() -> int:
    """Run this benchmark from the command line: start a server, run, print; return the exit status."""
    flags = parser(str(__doc__))
    flags.add_argument("--seconds", type=float, default=1200.0)
    flags.add_argument("--settle", type=float, default=120.0, help="seconds until the first level is taken")
    flags.add_argument("--kill-every", type=float, default=60.0, metavar="SECONDS")
    flags.add_argument("--clients", type=int, default=6)
    flags.add_argument("--json", type=Path)
    args = flags.parse_args()
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as folder:
        with Server(model, Path(folder) / "log", [*FLAGS, "--stage-overrides", TWO]) as server:
            times = {"seconds": args.seconds, "settle": args.settle, "kill_every": args.kill_every}
            result = asyncio.run(soak(server, **times, clients=args.clients))
            processes = server.processes()
        left = [process for process in processes if alive(process)]
    show(result)
    if args.json:
        levels = [asdict(level) for level in result.levels]
        args.json.write_text(json.dumps(vars(result) | {"levels": levels, "growth": result.growth()}, indent=1))
    return int(bool(result.lost or result.left_over() or left))


if __name__ == "__main__":
    sys.exit(main())
