"""Requests whose clients disconnect or whose stage loses its process, and the API server's totals."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import psutil
import pytest
import soundfile

from examples.server import Server, alive
from tests.processes.test_api_servers import gone_back, made_by_replicas, received, restarted, scrape
from tests.support.cluster import (
    ANSWER_S,
    LENGTH,
    MODEL,
    USAGE,
    all_up,
    ask,
    body,
    busy,
    get,
    idle,
    kill,
    load,
    replicas,
    status,
    until,
    wait_busy,
)
from tests.support.pace import pace, waited
from vllm_omni_ext.runtime.launch.folders import PrivateFolder

pytestmark = pytest.mark.engine

TOLD_S = 1.0  # a client receives the error of a lost stage within this time
ABORTS = 40
AT_ONCE = 8
LONGEST_WAIT_S = 0.6
GROWTH = 1.05
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
EXACT: dict[str, Any] = {
    "model": MODEL,
    "messages": HELLO,
    "temperature": 0,
    "max_completion_tokens": 24,
    "audio": {"voice": "ethan", "format": "wav"},
    "extra_body": {"ignore_eos": True, "talker": {"temperature": 0, "max_tokens": 32}},
}
EXACT_TEXT: dict[str, Any] = {**EXACT, "modalities": ["text"], "extra_body": {"ignore_eos": True}}
ENDLESS: dict[str, Any] = {
    **EXACT,
    "max_completion_tokens": 1900,
    "extra_body": {"ignore_eos": True, "talker": {"max_tokens": 4000, "min_tokens": 3900}},
}


def endless(modalities: list[str]) -> dict[str, Any]:
    """The fields of a request that does not end by itself."""
    text_only = {"extra_body": {"ignore_eos": True}} if "audio" not in modalities else {}
    return {**ENDLESS, "modalities": modalities, **text_only}


LONG = body("Tell me a very long story about the blue cat.", 150, 250)
NEVER_AGAIN = ("--omni-restart-limit", "0")
GONE_S = 30.0
"""A killed head's processes are gone within this time."""

WAIT_S = 0.5


@contextmanager
def serving(tiny: Path, log: Path, *flags: str) -> Iterator[Server]:
    with Server(tiny, log, [*LENGTH, *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def recovering(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one replica a stage, of which each is started again, once."""
    with serving(tiny, tmp_path_factory.mktemp("recovering") / "log", "--omni-restart-limit", "1") as running:
        yield running


def replica(server: Server, stage: str) -> dict[str, Any]:
    return replicas(server)[f"{stage}/0"]


class Told(NamedTuple):
    """The error of a lost stage at a client.

    Attributes:
        after_s: seconds since the loss.
        waited_s: how many of them the head, the API server or this client was ready and had no core.
    """

    after_s: float
    waited_s: float
    error: Any


async def killed_under(server: Server, stage: str, modalities: list[str]) -> Told:
    """Kill a stage's process under a request."""
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=ANSWER_S)
    asking = asyncio.create_task(client.chat.completions.create(**endless(modalities)))
    works = "talker" if stage == "talker" else "thinker"
    seen = await asyncio.to_thread(until, lambda: busy(server, works))
    assert seen, f"{works} does not have the request; {asking=}, {replicas(server)}\n{server.tail()}"
    pid = (await asyncio.to_thread(replica, server, stage))["pid"]
    [asked] = (await asyncio.to_thread(status, server))["api_servers"]
    processes = [psutil.Process(), *map(psutil.Process, (server.pid, asked["pid"]))]
    waits = sum(waited(processes))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIStatusError) as told:
        await asking
    return Told(time.monotonic() - killed, sum(waited(processes)) - waits, told.value)


def check_lost(server: Server, stage: str, told: Told) -> None:
    assert told.after_s < TOLD_S + told.waited_s
    assert told.error.status_code == 503 and stage in told.error.message
    code, health = get(server, "/health")
    assert code == 503 and stage in health.decode()
    assert replica(server, stage)["state"] == "DOWN"


def test_without_a_restart_a_killed_talker_fails_spoken_requests_only(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", *NEVER_AGAIN) as server:
        told = asyncio.run(killed_under(server, "talker", ["text", "audio"]))
        check_lost(server, "talker", told)
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
        assert client.chat.completions.create(**EXACT_TEXT).choices[0].message.content
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**EXACT, modalities=["audio"])
        assert refused.value.status_code == 503
        assert until(lambda: replica(server, "thinker")["running"] == 0)
        assert not server.stop(signal.SIGTERM)


@pytest.mark.extended
def test_without_a_restart_a_killed_code2wav_and_thinker_fail_their_requests(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", *NEVER_AGAIN) as server:
        check_lost(server, "code2wav", asyncio.run(killed_under(server, "code2wav", ["text", "audio"])))
        assert until(lambda: replica(server, "talker")["running"] == 0)
        check_lost(server, "thinker", asyncio.run(killed_under(server, "thinker", ["text"])))
        assert not server.stop()


@pytest.mark.extended
def test_totals_do_not_decrease_when_the_only_api_server_is_killed(recovering: Server) -> None:
    got = [ask(recovering, LONG)]
    before = scrape(recovering)
    [first] = status(recovering)["api_servers"]
    os.kill(first["pid"], signal.SIGKILL)
    assert until(lambda: get(recovering, "/health")[0] == 200 and restarted(recovering, 0) == 1, pace() * ANSWER_S)
    assert gone_back(before, scrape(recovering)) == []
    got.append(ask(recovering, LONG))
    assert until(lambda: idle(recovering))
    after = scrape(recovering)
    assert gone_back(before, after) == []
    for stage, tokens in (("thinker", USAGE), ("talker", "talker")):
        assert made_by_replicas({}, after, stage) == {f"{stage}/0": received(got, tokens)}


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("thinker", marks=pytest.mark.extended),
        "talker",
        pytest.param("code2wav", marks=pytest.mark.extended),
    ],
)
def test_requests_wait_for_a_killed_replica(stage: str, recovering: Server) -> None:
    """A request that the replica had, and one that arrives while it is down."""
    undisturbed = ask(recovering, LONG)
    with load(recovering, [LONG], [undisturbed], 1) as asked, ThreadPoolExecutor(1) as threads:
        wait_busy(recovering, "thinker" if stage == "thinker" else "talker", asked)  # code2wav's parts come from it
        kill(recovering, f"{stage}/0")
        assert until(lambda: get(recovering, "/health")[0] == 503, TOLD_S)
        assert stage in json.loads(get(recovering, "/health")[1])["reason"]
        assert replica(recovering, stage)["state"] == "DOWN"
        came = threads.submit(ask, recovering, LONG)
        assert came.result() == undisturbed
    assert until(lambda: all_up(recovering, 3) and idle(recovering))
    assert get(recovering, "/health")[0] == 200
    assert replica(recovering, stage)["restarts"] == 1


def test_a_replica_that_dies_too_often_is_given_up(recovering: Server) -> None:
    assert replica(recovering, "talker")["restarts"] == 1
    check_lost(recovering, "talker", asyncio.run(killed_under(recovering, "talker", ["text", "audio"])))
    assert "talker/0 is gone: its process was killed by SIGKILL; it is not started again" in recovering.tail()


def test_a_killed_head_ends_all_processes(recovering: Server) -> None:
    """Last of this server."""
    (line,) = (line for line in recovering.log.read_text().splitlines() if line.startswith("starting"))
    folder = Path(line.partition("; logs in ")[2]).parent
    assert folder.is_dir()
    theirs = [process for process in recovering.processes() if process.pid != recovering.pid]
    assert len(theirs) >= 4  # two replicas, an API server, the coordinator
    os.kill(recovering.pid, signal.SIGKILL)
    assert until(lambda: not any(map(alive, theirs)), GONE_S)

    def removed() -> bool:
        PrivateFolder().remove()  # as the next start does; the last thread of the killed head may still be ending
        return not folder.exists()

    assert until(removed, GONE_S)


def measure(server: Server) -> tuple[dict[int, int], dict[int, int], set[str]]:
    """Resident bytes and open files by process, and the names in /dev/shm."""
    memory, files = {}, {}
    for process in server.processes():
        memory[process.pid] = process.memory_info().rss
        files[process.pid] = process.num_fds()
    return memory, files, set(os.listdir("/dev/shm"))


def alike(one: Any, other: Any) -> bool:
    """Whether two answers are equal, samples up to rounding: in which pieces sound is made is a matter of time."""
    a, b = (
        soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="int16")[0].astype(np.int32)
        for message in (one, other)
    )
    return one.content == other.content and a.shape == b.shape and int(np.abs(a - b).max()) <= 1


async def leave_early(client: openai.AsyncOpenAI, chance: random.Random) -> None:
    modalities = chance.choice([["text"], ["audio"], ["text", "audio"]])
    asking = asyncio.create_task(_use(client, modalities, stream=chance.random() < 0.7))
    await asyncio.wait({asking}, timeout=chance.uniform(0, LONGEST_WAIT_S))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _use(client: openai.AsyncOpenAI, modalities: list[str], *, stream: bool) -> None:
    fields = endless(modalities)
    if stream:
        fields["audio"] = {"voice": "ethan", "format": "pcm16"}
        async for _ in await client.chat.completions.create(**fields, stream=True):
            pass
    else:
        await client.chat.completions.create(**fields)


async def abort_many(server: Server, count: int, seed: int) -> None:
    chance = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60) as client:
        for _ in range(count // AT_ONCE):
            await asyncio.gather(*(leave_early(client, chance) for _ in range(AT_ONCE)))


def test_requests_aborted_anywhere_leave_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # oneDNN keeps up to 1024 compiled convolutions, one a shape: 50 MB of code2wav that are no request's.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    with serving(tiny, tmp_path / "log", "--omni-replica-wait-timeout", str(WAIT_S)) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
        before = client.chat.completions.create(**EXACT, modalities=["text", "audio"]).choices[0].message
        asyncio.run(abort_many(server, ABORTS, seed=1))  # caches and pools grow to their size
        assert until(lambda: idle(server))
        memory, files, shared = measure(server)
        asyncio.run(abort_many(server, ABORTS, seed=2))
        assert until(lambda: idle(server))
        time.sleep(1)
        memory_after, files_after, shared_after = measure(server)
        assert shared_after == shared
        assert set(memory_after) == set(memory), "a process was replaced"
        for pid in memory:
            assert memory_after[pid] <= memory[pid] * GROWTH, psutil.Process(pid).cmdline()
            assert files_after[pid] <= files[pid] + AT_ONCE, "kept-alive connections at most"
        after = client.chat.completions.create(**EXACT, modalities=["text", "audio"]).choices[0].message
        assert alike(after, before)
        told = asyncio.run(killed_under(server, "talker", ["text", "audio"]))
        assert WAIT_S <= told.after_s < WAIT_S + TOLD_S + told.waited_s, told
        assert isinstance(told.error, openai.APIStatusError) and told.error.status_code == 503
        assert "talker" in told.error.message and "replica_wait_timeout_s" in told.error.message
        assert until(lambda: all_up(server, 3))
        again = client.chat.completions.create(**EXACT, modalities=["text", "audio"]).choices[0].message
        assert alike(again, before)
