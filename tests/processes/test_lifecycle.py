"""What happens to requests when clients leave and when a stage's process dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from examples.server import HOST, Server

pytestmark = pytest.mark.engine

MODEL = "tiny"
STAGES = ("thinker", "talker", "code2wav")
TOLD_S = 1.0  # a client hears of a lost stage within this time
SETTLE_S = 10.0
ABORTS = 200
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
ENDLESS: dict[str, Any] = {
    **EXACT,
    "max_completion_tokens": 1900,
    "extra_body": {"ignore_eos": True, "talker": {"max_tokens": 4000, "min_tokens": 3900}},
}


@contextmanager
def serving(tiny: Path, log: Path) -> Iterator[Server]:
    with Server(tiny, log, ["--served-model-name", MODEL, "--max-model-len", "2048"]) as running:
        yield running


def get(server: Server, path: str) -> tuple[int, Any]:
    """Status and JSON body."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{server.port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def replica(server: Server, stage: str) -> dict[str, Any]:
    _, status = get(server, "/v1/omni/status")
    return next(s for s in status["stages"] if s["name"] == stage)["replicas"][0]


def until(true: Callable[[], bool], seconds: float = SETTLE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def idle(server: Server) -> bool:
    return all(replica(server, stage)[count] == 0 for stage in STAGES for count in ("running", "waiting"))


async def killed_under(server: Server, stage: str, modalities: list[str]) -> tuple[float, Exception]:
    """Kill a stage's process under a request; seconds until the client hears of it, and what it hears."""
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
    asking = asyncio.create_task(client.chat.completions.create(**ENDLESS, modalities=modalities))
    await asyncio.to_thread(until, lambda: replica(server, "thinker")["running"] > 0)
    if stage == "talker":
        await asyncio.to_thread(until, lambda: replica(server, "talker")["running"] > 0)
    pid = (await asyncio.to_thread(replica, server, stage))["pid"]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIStatusError) as told:
        await asking
    return time.monotonic() - killed, told.value


def check_lost(server: Server, stage: str, told: tuple[float, Any]) -> None:
    seconds, error = told
    assert seconds < TOLD_S
    assert error.status_code == 503 and stage in error.message
    code, health = get(server, "/health")
    assert code == 503 and stage in json.dumps(health)
    assert replica(server, stage)["state"] == "DOWN"


def test_a_killed_talker_ends_spoken_requests_only(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log") as server:
        told = asyncio.run(killed_under(server, "talker", ["text", "audio"]))
        check_lost(server, "talker", told)
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
        assert client.chat.completions.create(**EXACT, modalities=["text"]).choices[0].message.content
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**EXACT, modalities=["audio"])
        assert refused.value.status_code == 503
        assert until(lambda: replica(server, "thinker")["running"] == 0)
        assert not server.stop(signal.SIGTERM)


def test_a_killed_vocoder_and_then_a_killed_thinker(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log") as server:
        check_lost(server, "code2wav", asyncio.run(killed_under(server, "code2wav", ["text", "audio"])))
        assert until(lambda: replica(server, "talker")["running"] == 0)
        check_lost(server, "thinker", asyncio.run(killed_under(server, "thinker", ["text"])))
        assert not server.stop()


def measure(server: Server) -> tuple[dict[int, int], dict[int, int], set[str]]:
    """Resident bytes and open files by process, and what is in /dev/shm."""
    memory, files = {}, {}
    for process in server.processes():
        memory[process.pid] = process.memory_info().rss
        files[process.pid] = process.num_fds()
    return memory, files, set(os.listdir("/dev/shm"))


async def leave_early(client: openai.AsyncOpenAI, chance: random.Random) -> None:
    modalities = chance.choice([["text"], ["audio"], ["text", "audio"]])
    asking = asyncio.create_task(_use(client, modalities, stream=chance.random() < 0.7))
    await asyncio.wait({asking}, timeout=chance.uniform(0, LONGEST_WAIT_S))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _use(client: openai.AsyncOpenAI, modalities: list[str], *, stream: bool) -> None:
    fields = {**ENDLESS, "modalities": modalities}
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


def test_requests_aborted_anywhere_leave_nothing(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=60)
        before = client.chat.completions.create(**EXACT, modalities=["text", "audio"]).choices[0].message
        asyncio.run(abort_many(server, ABORTS // 4, seed=1))  # caches and pools grow to their size
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
        assert after.content == before.content and after.audio.data == before.audio.data
