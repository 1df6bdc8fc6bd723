"""A talker that waits for the thinker's next token uses no CPU, and continues when the token arrives."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.processes.test_parity import CASES, prompt
from tests.support.oracle import Oracle
from vllm_omni_ext.orchestrator.messages import Opened
from vllm_omni_ext.plugins.flow import Forward, Produced
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

pytestmark = pytest.mark.engine

REPLY = [40, 41, 42, 43, 44, 45, 46, 47]
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 30}
QUIET_S, QUIET_BY_S = 1.0, 30
MOST_MS = 2.0
"""Of CPU time of a replica in a quiet second, which must begin within `QUIET_BY_S`: the frames of the first tokens come
before. A loop that polls has no such second."""

NOT_OURS = "gloo_tcp_loop"
"""Threads of the process groups that stock vLLM makes in every CPU engine: each looks at its socket every 10 ms."""


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, all threads but those of `NOT_OURS`."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    counted = [thread for thread in threads if (thread / "comm").read_text().strip() != NOT_OURS]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in counted) / 1e6


async def opened(omni: Any, name: str, ids: list[int]) -> asyncio.Queue[Any]:
    """Begin a request whose thinker is the test."""
    params = {"talker": SamplingParams(**GREEDY)}
    options = RequestOptions(modalities=("audio",), fields={"voice": "ethan"}, params=params)
    planned = omni._omni.runtime.plan(Rendered(prompt=ids), options)
    actions = tuple(action for action in planned.flow.begin() if not isinstance(action, Forward))
    sink: asyncio.Queue[Any] = asyncio.Queue()
    ids_of = {"request_id": name, "external_id": name}
    given = {"flow": planned.flow, "options": options, "actions": actions, "budgets": planned.budgets}
    await omni._omni.orchestrator.open(Opened(**ids_of, **given, sink=sink))
    return sink


async def think(omni: Any, name: str, *tokens: int, done: bool = False) -> None:
    machine = omni._omni.orchestrator.machine
    state = machine.requests[name]
    machine._handlers[Produced] = lambda event: machine._decide(state, "thinker", event)
    at = asyncio.get_running_loop().time()
    await omni._omni.orchestrator._apply(Produced("thinker", tokens, finish="stop" if done else None, at=at))


async def frames_of(sink: asyncio.Queue[Any]) -> list[list[int]]:
    while not (piece := await asyncio.wait_for(sink.get(), 30)).last:
        pass
    return piece.frames.tolist()


def test_a_talker_that_waits_for_text_uses_no_cpu(omni: Any, oracle: Oracle) -> None:
    ids = omni.get_tokenizer().encode(prompt(oracle, CASES["text"])["prompt"])
    replicas = {str(replica): process.pid for replica, process in omni._deployment.processes().items()}

    async def whole() -> list[list[int]]:
        sink = await opened(omni, "whole", ids)
        await think(omni, "whole", *REPLY, done=True)
        return await frames_of(sink)

    async def busy() -> dict[str, float]:
        before = {name: cpu_ms(pid) for name, pid in replicas.items()}
        await asyncio.sleep(QUIET_S)
        spent = {name: cpu_ms(pid) - before[name] for name, pid in replicas.items()}
        return {name: cpu for name, cpu in spent.items() if cpu > MOST_MS}

    async def starved() -> tuple[list[list[int]], int, dict[str, float]]:
        sink = await opened(omni, "starved", ids)
        for token in REPLY[:3]:
            await think(omni, "starved", token)
        until = time.monotonic() + QUIET_BY_S
        while (spent := await busy()) and time.monotonic() < until:
            pass
        said = len(omni._omni.orchestrator.machine.requests["starved"].flow._voice.frames.between(0, 1000))
        for token in REPLY[3:-1]:
            await think(omni, "starved", token)
        await think(omni, "starved", REPLY[-1], done=True)
        return await frames_of(sink), said, spent

    frames, said, spent = omni._run(starved())
    assert frames == omni._run(whole())
    assert 0 < said < len(frames)
    assert spent == {}
    assert omni._omni.orchestrator.held() == 0
