"""Drives a server of several processes: sends requests, reads replicas' states, and finds the processes to disturb."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import soundfile
from prometheus_client.parser import text_string_to_metric_families

from examples.server import HOST, Program, Server, command
from vllm_omni_ext.metrics import PREFIX
from vllm_omni_ext.serving.limits.bodies import SERVER_HEADER

T = TypeVar("T")
MODEL = "tiny"
STAGES = ("thinker", "talker", "code2wav")
USAGE = "usage"
LENGTH = ["--served-model-name", MODEL, "--max-model-len", "2048"]
ANSWER_S = 120.0
SETTLE_S = 60.0
LOOK_EVERY_S, LATER_EVERY_S, SOON_S = 0.02, 0.1, 1.0
"""How often `until` looks at first and later, and how long 'at first' is: each look costs a core some 10 ms."""

LARGEST_DIFFERENCE = 1
"""Between two samples of 16 bits that are the same: sums in another order round differently."""


def listening_ports(*programs: Program) -> set[int]:
    """TCP ports on which programs and their processes listen."""
    found = [each for program in programs for process in program.processes() for each in process.net_connections("tcp")]
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


@dataclass(frozen=True)
class Answer:
    """The answer at a client: text, int16 samples, the first replica of each stage, the API server, and the numbers of
    tokens: those of the text by the usage as `USAGE`, and those of each stage.
    """

    text: str
    samples: np.ndarray
    where: Mapping[str, str]
    server: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return (
            self.text == other.text
            and self.samples.shape == other.samples.shape
            and bool((np.abs(self.samples.astype(np.int32) - other.samples) <= LARGEST_DIFFERENCE).all())
        )


class Headless(Program):
    """Replicas that join a head. Use as a context manager; entering does not wait for anything.

    They compute with one thread each: threads of one operation wait for each other by spinning, and the head's replicas
    need the cores. With two threads, answers took 40 times the CPU time.
    """

    def __init__(self, model: Path, log: Path, stage: str, port: int, *flags: str, host: str = HOST) -> None:
        words = [*command(), "serve", str(model), "--omni", "--headless", "--stage", stage, "--max-model-len", "2048"]
        super().__init__([*words, "-oma", host, "-omp", str(port), *_with_one_thread(stage, flags)], log)

    def __enter__(self) -> Headless:
        self.start()
        return self


def _with_one_thread(stage: str, flags: Sequence[str]) -> list[str]:
    if stage.partition(".")[0] not in STAGES:
        return [*flags]
    words, given = list(flags), {}
    if (flag := "--stage-overrides") in words:
        at = words.index(flag)
        given = json.loads(words[at + 1])
        del words[at : at + 2]
    return [*words, flag, json.dumps({**given, stage: {**given.get(stage, {}), "cpu_threads": 1}})]


_chance = random.SystemRandom()  # another test process may have seeded the common one alike


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports without a listener now, which the system gives to no connection."""
    while True:
        port = _chance.randrange(10_000, 32_000)
        if all(_free(port + i) for i in range(count)):
            return port


def _free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
        return True


def overrides(**stages: dict[str, Any]) -> list[str]:
    """`--stage-overrides` of these stages."""
    return ["--stage-overrides", json.dumps(stages)]


def until(true: Callable[[], Any], seconds: float = SETTLE_S) -> bool:
    """Wait until something is true; false if it is not in time."""
    began = time.monotonic()
    while not true():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        time.sleep(LOOK_EVERY_S if waited < SOON_S else LATER_EVERY_S)
    return True


KEY = "a-key"
"""API key of those servers that have one."""


def get(server: Server, path: str) -> tuple[int, bytes]:
    """Status and body; (0, b"") without an answer."""
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        asked = urllib.request.Request(f"http://{HOST}:{server.port}{path}", headers=headers)
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def status(server: Server) -> dict[str, Any]:
    """The body of `/v1/omni/status`."""
    code, body = get(server, "/v1/omni/status")
    assert code == 200, (code, server.tail())
    return json.loads(body)


def replicas(server: Server) -> dict[str, dict[str, Any]]:
    """Every replica by its name."""
    return {each["id"]: each for stage in status(server)["stages"] for each in stage["replicas"]}


def states(server: Server) -> dict[str, str]:
    """The state of every replica by its name."""
    return {name: each["state"] for name, each in replicas(server).items()}


def all_up(server: Server, count: int) -> bool:
    """Whether there are so many replicas, all of them up with a heartbeat."""
    found = replicas(server).values()
    return len(found) == count and all(r["state"] == "UP" and r["heartbeat_age_s"] is not None for r in found)


def coordinator(server: Server) -> psutil.Process:
    """The head's child that is neither a replica nor an API server."""
    said = status(server)
    known = {each["pid"] for each in (*replicas(server).values(), *said["api_servers"])}
    (found,) = (
        child
        for child in psutil.Process(server.pid).children()
        if child.pid not in known and child.status() != psutil.STATUS_ZOMBIE
    )
    return found


def in_flight(server: Server) -> Counter[str]:
    """Requests that the API servers hold open in each replica, by its name.

    Unlike `running` in the status, which comes with heartbeats, this also shows requests that take milliseconds.
    """
    found = Counter[str]()
    for family in text_string_to_metric_families(get(server, "/metrics")[1].decode()):
        for sample in family.samples:
            if sample.name == PREFIX + "replica_requests_in_flight":
                found[sample.labels["replica"]] += int(sample.value)
    return found


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of the series of one of this package's metrics that have these labels."""
    families = text_string_to_metric_families(get(server, "/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == PREFIX + name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def busy(server: Server, stage: str) -> str:
    """The busiest replica of a stage, or the one of that name, that has a request; "" if there is none."""
    most = in_flight(server).most_common()
    return next((name for name, n in most if n and stage in (name, name.partition("/")[0])), "")


def wait_busy(server: Server, stage: str, asked: Future[Any] | None = None) -> str:
    """Wait until a replica of a stage has a request, and return its name; a second look could find none.

    Args:
        stage: a stage, or the name of a replica.
        asked: ends only after the replica was found; its error is raised if it has one.
    """
    found: list[str] = []

    def look() -> bool:
        found.append(busy(server, stage))
        return bool(found[-1]) or (asked is not None and asked.done())

    seen = until(look, ANSWER_S)
    assert seen, f"no replica of {stage} has a request: {replicas(server)}"
    assert found[-1], f"it was over before {stage} had a request: {asked and asked.result()}"
    return found[-1]


@contextmanager
def asked_again(ask: Callable[[], T]) -> Iterator[Future[list[T]]]:
    """Send requests in a thread, again and again until the block is left; the future has all answers."""
    over = threading.Event()

    def ask_on() -> list[T]:
        answers = []
        while not (over.is_set() and answers):
            answers.append(ask())
        return answers

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask_on)
        try:
            yield asked
        finally:
            over.set()
    asked.result()


def load(
    server: Server, bodies: Sequence[dict[str, Any]], expected: list[Answer], at_once: int
) -> AbstractContextManager[Future[list[list[Answer]]]]:
    """Send all of them again and again until the block is left; the answers must be the expected ones each time."""

    def ask_them() -> list[Answer]:
        answers = ask_all(server, bodies, at_once)
        assert answers == expected
        return answers

    return asked_again(ask_them)


def idle(server: Server) -> bool:
    """Whether nothing is held, in engines and in API servers."""
    return not in_flight(server).total() and not any(r["running"] + r["waiting"] for r in replicas(server).values())


@contextmanager
def stopped(server: Server, stage: str) -> Iterator[None]:
    """All replicas of a stage are stopped by SIGSTOP and seen as down; afterwards they are up again."""
    before = states(server)
    found = {name: each["pid"] for name, each in replicas(server).items() if name.startswith(f"{stage}/")}
    for pid in found.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: all(states(server)[name] != "UP" for name in found), 60)
        yield
    finally:
        for pid in found.values():
            os.kill(pid, signal.SIGCONT)
        assert until(lambda: all_up(server, len(before)), 120)


def kill(server: Server, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a replica's process a signal; its process id."""
    pid = int(replicas(server)[name]["pid"])
    os.kill(pid, number)
    return pid


def body(content: Any, words: int = 24, frames: int = 40, **more: Any) -> dict[str, Any]:
    """A greedy request for so many tokens and frames, text and sound.

    The codec stage has several parts of it, so that it is lost between two of them.
    """
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
        "temperature": 0,
        "max_completion_tokens": words,
        "ignore_eos": True,
        "return_stage_metrics": True,
        "talker": {"temperature": 0, "min_tokens": frames, "max_tokens": frames + 1},
        "chunks": {"frames": [10], "adaptive": False},
        **more,
    }


def ask(server: Server, fields: dict[str, Any], client: httpx.Client | None = None) -> Answer:
    """The answer, over a new connection or a client's; AssertionError with the error if it is one."""
    post = httpx.post if client is None else client.post
    answer = post(f"{server.base_url}/chat/completions", json=fields, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text[:500]
    said = answer.json()
    message = said["choices"][0]["message"]
    sound = base64.b64decode(message["audio"]["data"])
    samples = soundfile.read(io.BytesIO(sound), dtype="int16")[0].astype(np.int32)
    where = {stage: course["replica"] for stage, course in said["metrics"]["stages"].items()}
    tokens = {stage: course["tokens"] for stage, course in said["metrics"]["stages"].items()}
    sound_tokens = said["usage"]["completion_tokens_details"]["audio_tokens"]
    tokens[USAGE] = said["usage"]["completion_tokens"] - sound_tokens
    return Answer(message["content"], samples, where, answer.headers.get(SERVER_HEADER, ""), tokens)


def ask_all(server: Server, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Answer]:
    """All of them answered, at most so many at a time, in order."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda fields: ask(server, fields), bodies))


def used(answers: Sequence[Answer]) -> Counter[str]:
    """The number of these requests that each replica received."""
    return Counter(replica for answer in answers for replica in answer.where.values())
