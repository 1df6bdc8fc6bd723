"""Several API servers: each reaches every replica, and each may die without the others' requests noticing."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.server import HOST, Server, alive
from tests.processes.test_headless import check_parity
from tests.support.cluster import (
    ANSWER_S,
    LOOK_EVERY_S,
    MODEL,
    STAGES,
    USAGE,
    Answer,
    Headless,
    all_up,
    ask_all,
    asked_again,
    body,
    busy,
    free_ports,
    get,
    idle,
    load,
    overrides,
    replicas,
    status,
    until,
    used,
)
from tests.support.oracle import Golden, Oracle
from vllm_omni_ext.metrics import PREFIX
from vllm_omni_ext.serving.limits.bodies import SERVER_HEADER

pytestmark = pytest.mark.engine

AT_ONCE = 8
BODIES = [body(f"What is number {number}?", 30, 40) for number in range(12)]
STORIES = [body(f"Tell me a story of number {number}.", 100, 200) for number in range(4)]
LONG = [body(f"Tell me a long story of number {number}.", 100, 1000) for number in range(1, 3)]

ENDLESS = body("Never stop.", 7000, 4000)
LENGTH = ["--served-model-name", MODEL, "--max-model-len", "8192"]
CASES = ["text", "turns", "audio", "image", "short_answer"]
TIMEOUT_S = 1.5
GONE_S = 1.0 + TIMEOUT_S / 5
"""Requests of a dead API server end within a second; schedulers report it with their next heartbeat."""

LONGEST_LOOK_S = 0.1
"""The longest time that one look counts: where other programs run, everything may stand still for seconds."""

DRAIN_S = 120
"""Longer than 1,000 frames take on a busy machine."""

ENDED_S = 30.0
WAITED_S = 1.0
UP_S = 120.0
ONE_CONNECTION = httpx.Limits(max_connections=1, keepalive_expiry=None)
"""httpx closes connections that are unused for 5 s by default."""

KEEP_ALIVE_S = 120
"""A connection is to stay with its API server while others are made; vLLM's variable for it."""

REFUSED = 503
RESTARTS = PREFIX + "replica_restarts_total"
TOKENS, RUNNING = "vllm:generation_tokens_total", "vllm:num_requests_running"
ONCE = ("ready: ", "Available routes", "Application startup complete", "API servers, each with its own")


class Caller:
    """One connection, and so one API server; a connection to another one is not used."""

    def __init__(self, server: Server, which: int) -> None:
        self.server = server
        self.which = str(which)
        deadline = time.monotonic() + UP_S
        with ExitStack() as others:  # kept until it is found: a new one goes to the API server with the fewest
            while True:
                self.http = httpx.Client(base_url=server.base_url, timeout=ANSWER_S, limits=ONE_CONNECTION)
                if self._named() == self.which:
                    return
                others.callback(self.http.close)
                assert time.monotonic() < deadline, f"no connection to API server {which}"

    def _named(self) -> str | None:
        try:
            return self.http.get(f"http://{HOST}:{self.server.port}/health").headers.get(SERVER_HEADER)
        except httpx.TransportError:  # it died with the connection
            return None

    def stream(self, fields: dict[str, Any], begun: threading.Event | None = None) -> Answer:
        """An answer as it comes; httpx.TransportError if it breaks off."""
        text, sound = "", b""
        asked = {**fields, "stream": True, "audio": {"voice": "ethan", "format": "pcm16"}}
        with self.http.stream("POST", "/chat/completions", json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers[SERVER_HEADER] == self.which
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    sound += base64.b64decode((choice["delta"].get("audio") or {}).get("data") or "")
                if begun is not None and sound:
                    begun.set()
        return Answer(text, np.frombuffer(sound, np.int16).astype(np.int32), {})


Asked = list[tuple[Future[Any], threading.Event]]


def ask_through(threads: ThreadPoolExecutor, callers: list[Caller], bodies: list[dict[str, Any]]) -> Asked:
    """One request through each connection; returns when sound comes through all of them."""
    asked = []
    for caller, fields in zip(callers, bodies, strict=True):
        begun = threading.Event()
        asked.append((threads.submit(caller.stream, fields, begun), begun))
    for future, begun in asked:
        assert until(lambda begun=begun, future=future: begun.is_set() or future.done()), replicas(callers[0].server)
        assert not future.done(), future.exception()
    return asked


def pids(server: Server) -> dict[int, int]:
    return {each["index"]: each["pid"] for each in status(server)["api_servers"]}


def again(server: Server, which: int, restarts: int) -> bool:
    """Whether an API server has been started again so often, and all are up."""
    known = status(server)["api_servers"]
    return all(each["state"] == "UP" for each in known) and known[which]["restarts"] == restarts


def both_answer(server: Server, expected: list[Any]) -> bool:
    """Whether connections made now go to both; their answers are the undisturbed ones in any case."""
    answers = ask_all(server, BODIES, AT_ONCE)
    assert answers == expected
    return {each.server for each in answers} == {"0", "1"}


def restarted(server: Server, which: int) -> int:
    """How often an API server has been started again."""
    return int(status(server)["api_servers"][which]["restarts"])


def running(server: Server) -> int:
    """Requests in all schedulers."""
    return sum(each["running"] + each["waiting"] for each in replicas(server).values())


def scrape(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[str, float]]:
    """Every series once: its kind and value."""
    found = {}
    for family in text_string_to_metric_families(get(server, "/metrics")[1].decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found and "pid" not in sample.labels, key
            found[key] = family.type, sample.value
    return found


ROUNDING = 1e-9
"""Relative difference of two sums of the same numbers."""


def gone_back(before: Any, after: Any) -> list[Any]:
    """Totals that are missing, or smaller by more than rounding: sums over processes are added in any order."""
    totals = {key: value for key, (kind, value) in before.items() if kind in ("counter", "histogram")}
    assert totals
    pairs = [(key, value, after.get(key, ("", -1.0))[1]) for key, value in totals.items()]
    return [(key, value, now) for key, value, now in pairs if now < value * (1 - ROUNDING)]


def total(series: Any, name: str, **labels: str) -> float:
    return sum(value for (found, given), (_, value) in series.items() if found == name and labels.items() <= set(given))


def restart_counts(server: Server, stage: str) -> set[float]:
    """The totals of restarts that the replicas of a stage have in the metrics."""
    shown = scrape(server).items()
    counts = {labels: value for (name, labels), (_, value) in shown if name == RESTARTS and ("stage", stage) in labels}
    return set(counts.values())


def ended(server: Server, processes: list[psutil.Process]) -> bool:
    """Whether all of them end soon without another signal."""
    return until(lambda: server.status() is not None and not any(map(alive, processes)), ENDED_S)


@pytest.fixture(scope="module", autouse=True)
def keep_alive() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", str(KEEP_ALIVE_S))
        yield


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(3)


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Server]:
    """Two API servers before two replicas of each stage, and others may join."""
    flags = ["--stage-config", "qwen3_omni_replicas", *overrides(thinker={"replicas": 2}), "--api-server-count", "2"]
    flags += ["-oma", HOST, "-omp", str(port), "--omni-heartbeat-timeout", str(TIMEOUT_S)]
    flags += ["--shutdown-timeout", str(DRAIN_S)]
    with Server(tiny, tmp_path_factory.mktemp("two") / "log", [*LENGTH, *flags]) as started:
        assert until(lambda: all_up(started, 6))
        yield started


@pytest.fixture(scope="module")
def undisturbed(two: Server) -> list[Answer]:
    return ask_all(two, BODIES, AT_ONCE)


@pytest.fixture(scope="module")
def stories(two: Server) -> list[Answer]:
    return ask_all(two, STORIES, AT_ONCE)


def test_both_api_servers_reach_every_replica(two: Server, undisturbed: list[Answer]) -> None:
    """The API server of a connection and the free replicas depend on time: requests are sent until all are reached."""
    reached: set[tuple[str, str]] = set()

    def all_reached(answers: list[Answer]) -> bool:
        assert answers == undisturbed
        reached.update((each.server, each.where[stage]) for each in answers for stage in STAGES)
        return reached == {(server, f"{stage}/{index}") for server in "01" for stage in STAGES for index in (0, 1)}

    assert all_reached(undisturbed) or until(lambda: all_reached(ask_all(two, BODIES, AT_ONCE)), UP_S), reached


@pytest.mark.parametrize("which", [0, 1])
def test_each_api_server_answers_like_transformers(
    which: int, two: Server, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """Over one connection, which stays with its API server."""
    caller = Caller(two, which)
    answers = check_parity(two, oracle, expected, CASES, caller.http)
    assert {each.server for each in answers} == {str(which)}


def test_lines_common_to_all_api_servers_are_logged_once(two: Server) -> None:
    log = two.log.read_text(errors="replace")
    assert {words: log.count(words) for words in ONCE} == dict.fromkeys(ONCE, 1)
    assert "(ApiServer_0" in log and "(ApiServer_1" not in log.partition("ready: ")[0]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_a_killed_one_takes_its_own_requests_only(
    victim: int, two: Server, undisturbed: list[Answer], stories: list[Answer]
) -> None:
    other = 1 - victim
    before, restarts = scrape(two), restarted(two, victim)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        callers = [Caller(two, victim) for _ in range(3)], [Caller(two, other) for _ in STORIES]
        lost = ask_through(threads, callers[0], [ENDLESS] * 3)
        with ExitStack() as stack:
            begun, kept = [threading.Event() for _ in stories], []
            for each in zip(callers[1], STORIES, begun, strict=True):
                kept.append(stack.enter_context(asked_again(partial(Caller.stream, *each))))
            assert until(lambda: all(event.is_set() for event in begun) or any(future.done() for future in kept))
            os.kill(pids(two)[victim], signal.SIGKILL)
            for future, _ in lost:
                with pytest.raises(httpx.TransportError):
                    future.result(ENDED_S)
    for future, story in zip(kept, stories, strict=True):
        assert all(told == story for told in future.result())
    assert until(lambda: again(two, victim, restarts + 1), UP_S) and until(lambda: idle(two))
    after = scrape(two)
    assert gone_back(before, after) == []
    finished = "vllm_omni_ext:requests_total"
    done = total(after, finished, outcome="finished") - total(before, finished, outcome="finished")
    assert done == sum(len(future.result()) for future in kept)
    assert until(lambda: both_answer(two, undisturbed), UP_S), "the one that follows takes connections too"
    assert gone_back(after, scrape(two)) == []


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_requests_of_a_killed_api_server_leave_all_schedulers_at_once(two: Server, victim: int) -> None:
    """Without other requests; none of them is read to the end. The next API server reads the rest and shows none."""
    assert until(lambda: idle(two))
    restarts, took = restarted(two, victim), 0.0
    with ThreadPoolExecutor(AT_ONCE) as threads:
        watch = Caller(two, 1 - victim)
        lost = ask_through(threads, [Caller(two, victim) for _ in range(4)], [ENDLESS] * 4)
        assert until(lambda: running(two) >= 2 * len(lost))
        os.kill(pids(two)[victim], signal.SIGKILL)
        looked, path = time.monotonic(), f"http://{HOST}:{two.port}/v1/omni/status"

        def left() -> int:
            found = watch.http.get(path).json()["stages"]
            return sum(each["running"] + each["waiting"] for stage in found for each in stage["replicas"])

        while left():
            time.sleep(LOOK_EVERY_S)
            took += min(time.monotonic() - looked, LONGEST_LOOK_S)
            looked = time.monotonic()
            assert took < GONE_S
        for future, _ in lost:
            assert future.exception() is not None
    assert until(lambda: again(two, victim, restarts + 1), UP_S) and until(lambda: idle(two))
    Caller(two, victim)  # it answers, so it has read the outputs left for it
    assert until(lambda: total(scrape(two), RUNNING) == 0)


def made_by_replicas(before: Any, after: Any, stage: str) -> dict[str, float]:
    """The tokens that each replica of a stage has made between two looks at the metrics, by vLLM's counter."""
    replicas_of = {dict(labels)["replica"] for (name, labels) in after if name == TOKENS and ("stage", stage) in labels}
    grown = {
        each: total(after, TOKENS, stage=stage, replica=each) - total(before, TOKENS, stage=stage, replica=each)
        for each in replicas_of
    }
    return {each: count for each, count in grown.items() if count}


def received(answers: list[Answer], tokens: str) -> int:
    """The tokens in these answers."""
    return sum(each.tokens[tokens] for each in answers)


def test_replicas_join_and_leave(two: Server, undisturbed: list[Answer], tiny: Path, tmp_path: Path, port: int) -> None:
    """And an API server is killed in between; the metrics count every token that clients get."""
    before = scrape(two)
    with Headless(tiny, tmp_path / "log", "talker", port) as more:
        assert until(lambda: "starting talker" in more.log.read_text(), UP_S)
        with load(two, BODIES[:AT_ONCE], undisturbed[:AT_ONCE], AT_ONCE) as joining:
            assert until(lambda: all_up(two, 7), UP_S), more.tail()
        assert until(lambda: idle(two))
        restarts = restarted(two, 1)
        os.kill(pids(two)[1], signal.SIGKILL)
        assert until(lambda: again(two, 1, restarts + 1), UP_S)
        with load(two, BODIES[:AT_ONCE], undisturbed[:AT_ONCE], AT_ONCE) as leaving:
            assert until(lambda: busy(two, "talker/2") or leaving.done())
            assert not more.stop(signal.SIGTERM)
            assert until(lambda: len(replicas(two)) == 6)
    by_server = {each.server for each in leaving.result()[0] if each.where["talker"] == "talker/2"}
    assert by_server, "it has served"
    last = ask_all(two, BODIES, AT_ONCE)
    got = [*chain(*joining.result(), *leaving.result()), *last]
    assert used(last).keys() == {f"{stage}/{n}" for stage in STAGES for n in (0, 1)}
    after = scrape(two)
    for stage, tokens in (("thinker", USAGE), ("talker", "talker")):
        made = made_by_replicas(before, after, stage)
        assert sum(made.values()) == received(got, tokens), made
    assert made.keys() == {"talker/0", "talker/1", "talker/2"}
    assert gone_back(before, after) == []
    assert total(after, RUNNING) == 0
    numbers = {(dict(labels)["replica"], dict(labels)["engine"]) for name, labels in after if name == TOKENS}
    assert len(numbers) == len(dict(numbers)) == 7, "the API servers agree on the number of each replica"


def test_sigterm_lets_running_requests_end(two: Server) -> None:
    """Last of this server."""
    exact = ask_all(two, LONG, AT_ONCE)
    log = two.log.read_text()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        waiting = [Caller(two, which) for which in range(2)]
        asked = ask_through(threads, [Caller(two, which) for which in range(2)], LONG)
        processes, told = two.processes(), time.monotonic()
        os.kill(two.pid, signal.SIGTERM)
        assert until(lambda: f"have {DRAIN_S} s" in two.log.read_text()[len(log) :])

        def refused(caller: Caller) -> bool:
            answer = caller.http.post("/chat/completions", json=BODIES[0])
            return answer.status_code == REFUSED and "shutting down" in answer.text

        assert all(until(lambda caller=caller: refused(caller), ENDED_S) for caller in waiting)
        assert not any(future.done() for future, _ in asked), "they are long enough"
        assert [future.result() for future, _ in asked] == exact
    assert ended(two, processes)
    assert two.status() == 0 and time.monotonic() - told < DRAIN_S


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--api-server-count", "3"]
    with Server(tiny, tmp_path_factory.mktemp("three") / "log", [*LENGTH, *flags]) as started:
        yield started


@pytest.mark.extended
def test_three_serve(three: Server, oracle: Oracle, expected: dict[str, Golden]) -> None:
    answers = ask_all(three, BODIES, AT_ONCE)
    assert {each.server for each in answers} == {"0", "1", "2"}
    check_parity(three, oracle, expected, CASES)


@pytest.mark.extended
def test_an_api_server_and_then_the_head_are_killed(three: Server) -> None:
    """Last of this server."""
    processes = three.processes()
    os.kill(pids(three)[1], signal.SIGKILL)
    os.kill(three.pid, signal.SIGKILL)
    assert ended(three, processes)


@pytest.mark.extended
def test_ctrl_c_twice_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    """As a terminal sends it, to all processes; and each API server has an endless request."""
    flags = ["--api-server-count", "2", "--shutdown-timeout", str(DRAIN_S)]
    with Server(tiny, tmp_path / "log", [*LENGTH, *flags]) as server, ThreadPoolExecutor(2) as threads:
        asked = ask_through(threads, [Caller(server, which) for which in range(2)], [ENDLESS] * 2)
        processes = server.processes()
        os.killpg(server.pid, signal.SIGINT)
        assert until(lambda: f"have {DRAIN_S} s" in server.log.read_text())
        assert not psutil.wait_procs(processes, WAITED_S)[0], "all processes wait for the requests"
        assert not any(future.done() for future, _ in asked), [future.exception() for future, _ in asked]
        os.killpg(server.pid, signal.SIGINT)
        assert ended(server, processes)
    assert "Traceback" not in server.log.read_text()
