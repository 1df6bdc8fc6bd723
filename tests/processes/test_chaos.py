"""Two replicas a stage under load: no request is lost when processes are killed, and each of them is restarted."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.server import Server
from tests.processes.test_api_servers import restart_counts
from tests.support.cluster import (
    LENGTH,
    STAGES,
    all_up,
    ask,
    ask_all,
    body,
    coordinator,
    get,
    idle,
    kill,
    overrides,
    replicas,
    status,
    until,
    used,
    wait_busy,
)
from tests.support.media import audio, image, openai_messages

pytestmark = pytest.mark.engine

REQUESTS, AT_ONCE = 32, 8
WORDS, FRAMES, SAMPLED_FRAMES = 40, 60, 24
TIMEOUT_S = 2
COORDINATOR = "coordinator"
AFTER = {4: "talker", 10: "code2wav", 16: "thinker", 22: COORDINATOR}
"""The process to kill after so many answers."""

KEPT_ALIVE = 8
"""Connections a process may keep open between requests."""


def question(number: int) -> Any:
    """Every request is another one; some with sound, an image or both."""
    parts: list[Any] = [{"type": "text", "text": f"Question {number}: what is a replica of stage {number % 7}?"}]
    if number % 5 == 1:
        parts.insert(0, {"type": "audio", "audio": audio(0.5 + number / 40, number)})
    if number % 5 in (1, 3) and number % 2:
        parts.insert(0, {"type": "image", "image": image(64 + 32 * (number % 3), 64, number)})
    return openai_messages([{"role": "user", "content": parts}])[0]["content"]


def sampled(number: int) -> dict[str, Any]:
    """Fields of every fourth request: sampling with seeds, of thinker and talker.

    These are few and short: a random draw can be so close that the rounding of a CPU's kernels, which varies with the
    other requests of a step, decides it. The 30,000 draws of 20 requests with 91 frames had one on one of two CPUs.
    """
    if number % 4 != 1:
        return {}
    few = {"min_tokens": SAMPLED_FRAMES, "max_tokens": SAMPLED_FRAMES + 1}
    talker = {"temperature": 0.9, "top_k": 50, "seed": number, **few}
    return {"temperature": 1.0, "top_p": 0.9, "seed": number, "talker": talker}


BODIES = [body(question(number), WORDS, FRAMES, **sampled(number)) for number in range(REQUESTS)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.extended), 2, pytest.param(3, marks=pytest.mark.extended)],
    ids="{} API servers".format,
)
def api_servers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory, api_servers: int) -> Iterator[Server]:
    two = overrides(**{stage: {"replicas": 2} for stage in STAGES})
    flags = [*LENGTH, *two, "--omni-heartbeat-timeout", str(TIMEOUT_S), "--api-server-count", str(api_servers)]
    with Server(tiny, tmp_path_factory.mktemp("server") / "log", flags) as running:
        yield running


def folder(server: Server) -> Path:
    """The private folder of the server."""
    (line,) = (line for line in server.log.read_text().splitlines() if line.startswith("starting"))
    return Path(line.partition("; logs in ")[2]).parent


def check_served_by(answers: list[Any], count: int) -> None:
    """Every API server has answered; a single one does not report its number."""
    assert {each.server for each in answers} == ({""} if count == 1 else {str(which) for which in range(count)})


def strike(server: Server, target: str, killed: list[str]) -> None:
    """Kill a replica of a stage, one that works."""
    killed.append(wait_busy(server, target))
    kill(server, killed[-1])


def test_no_request_is_lost_when_processes_are_killed(server: Server, api_servers: int) -> None:
    undisturbed = ask_all(server, BODIES, AT_ONCE)
    assert set(used(undisturbed)) == {f"{stage}/{i}" for stage in STAGES for i in range(2)}
    assert until(lambda: all_up(server, 6) and idle(server))
    head, files = psutil.Process(server.pid), sorted(os.listdir(folder(server)))
    shared = set(os.listdir("/dev/shm"))
    serving = [psutil.Process(each["pid"]) for each in status(server)["api_servers"]]
    processes, open_files = len(server.processes()), {each: each.num_fds() for each in (head, *serving)}
    first_coordinator = coordinator(server)

    answered, killed = 0, []
    lock, strikes = threading.Lock(), []

    def one(fields: dict[str, Any]) -> Any:
        nonlocal answered
        answer = ask(server, fields)
        with lock:
            answered += 1
            if answered in AFTER:
                target = AFTER[answered]
                kill_it = first_coordinator.kill if target == COORDINATOR else partial(strike, server, target, killed)
                strikes.append(threads.submit(kill_it))
        return answer

    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(AT_ONCE) as clients:
        got = list(clients.map(one, BODIES))
        while not all(struck.done() for struck in strikes):  # the stage to kill may have had its part of all requests
            assert list(clients.map(partial(ask, server), BODIES[:AT_ONCE])) == undisturbed[:AT_ONCE]
        for struck in strikes:
            struck.result()
    assert [n for n in range(REQUESTS) if got[n] != undisturbed[n]] == []
    check_served_by(undisturbed, api_servers)
    check_served_by(got, api_servers)

    assert [name.partition("/")[0] for name in killed] == ["talker", "code2wav", "thinker"]
    assert until(lambda: all_up(server, 6) and idle(server))
    assert {name: each["restarts"] for name, each in replicas(server).items()} == {
        f"{stage}/{i}": int(f"{stage}/{i}" in killed) for stage in STAGES for i in range(2)
    }
    for stage in STAGES:  # the API server that counts the restart may be the later one
        assert until(lambda stage=stage: restart_counts(server, stage) == {0.0, 1.0})
    assert get(server, "/health")[0] == 200
    assert coordinator(server).pid != first_coordinator.pid
    now = status(server)["coordinator"]
    assert now["state"] == "UP" and now["view_age_s"] < TIMEOUT_S
    ages = {name: each["heartbeat_age_s"] for name, each in replicas(server).items()}
    assert max(ages.values()) < TIMEOUT_S, ages
    assert len(server.processes()) == processes
    for process, before in open_files.items():
        assert process.num_fds() <= before + KEPT_ALIVE
    assert len(os.listdir(folder(server))) <= len(files), (files, os.listdir(folder(server)))
    assert set(os.listdir("/dev/shm")) <= shared


def test_all_replicas_serve_after_the_restarts(server: Server) -> None:
    answers = ask_all(server, BODIES[:12], AT_ONCE)
    assert set(used(answers)) == {f"{stage}/{i}" for stage in STAGES for i in range(2)}


def test_the_server_leaves_nothing_behind_but_the_logs_of_replicas_that_ended(server: Server) -> None:
    """Last."""
    where = folder(server)
    assert not server.stop()
    assert [each.name for each in where.iterdir()] == ["logs"]
    shutil.rmtree(where)
