"""An API server that is told to end gives what is in flight its time, and takes nothing new."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import AUDIO, TEXT
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.runtime.client.text_client import TextClient

LONG_S = 20.0
SPEAK = RequestOptions(modalities=("text", "audio"))


def client() -> TextClient:
    orchestrator: Any = SimpleNamespace(replicas={}, pools={}, frontend="thinker")
    config: Any = None
    return TextClient(config, {}, orchestrator, admission=orchestrator)


def outputs() -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])])


@pytest.fixture
def omni() -> Any:
    """As much of it as ends."""
    made: Any = AsyncOmni.__new__(AsyncOmni)
    made.observer = Observer.unseen("thinker", [ReplicaId("thinker", 0)])
    made.engine_core = client()
    yield made
    made._fleet_open = None


def opened(omni: Any, request_id: str, *parts: str) -> None:
    omni.observer.opened(request_id, request_id, ("text",), parts=parts, arrival=time.time())


async def drained(omni: Any, timeout: float = LONG_S) -> asyncio.Task[None]:
    task = asyncio.create_task(omni._drain(timeout))
    await asyncio.sleep(0.05)
    return task


async def test_nothing_in_flight_takes_no_time(omni: Any) -> None:
    assert (await drained(omni)).done()


async def test_every_part_of_every_request_may_end(omni: Any) -> None:
    opened(omni, "a", TEXT, AUDIO)
    opened(omni, "b", AUDIO)
    draining = await drained(omni)
    for request_id, part in (("a", TEXT), ("b", AUDIO)):
        omni.observer.finished(request_id, part)
        await asyncio.sleep(0.05)
        assert not draining.done()
    omni.observer.aborted("a")
    await asyncio.wait_for(draining, 5)


async def test_what_has_ended_is_delivered_first(omni: Any) -> None:
    """What an engine put out is on its way to the caller; the end of everything must not overtake it."""
    opened(omni, "r", TEXT)
    omni.engine_core.deliver(outputs())
    draining = await drained(omni)
    omni.observer.finished("r", TEXT)
    await asyncio.sleep(0.05)
    assert not draining.done()
    await omni.engine_core.get_output_async()
    await asyncio.sleep(0.05)
    assert not draining.done(), "it is being handled"
    handler = asyncio.create_task(omni.engine_core.get_output_async())
    await asyncio.wait_for(draining, 5)
    handler.cancel()


async def test_the_time_is_limited(omni: Any) -> None:
    opened(omni, "r", TEXT)
    before = time.monotonic()
    await omni._drain(0.2)
    assert 0.2 <= time.monotonic() - before < 2


async def test_new_requests_are_refused_meanwhile(omni: Any) -> None:
    opened(omni, "r", TEXT)
    draining = await drained(omni)
    with pytest.raises(StageUnavailable, match="shutting down"):
        omni.generate("hello", SamplingParams(), "new")
    with pytest.raises(StageUnavailable, match="shutting down"):
        omni.start(Rendered(), SPEAK, "new")
    omni.observer.finished("r", TEXT)
    await asyncio.wait_for(draining, 5)


async def test_shutdown_from_another_thread_waits_and_then_fails_the_rest(
    omni: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's server calls it."""
    from vllm_omni_ext.runtime.client.targeted import TargetedLLM

    happened: list[str] = []
    monkeypatch.setattr(TargetedLLM, "shutdown", lambda self, timeout: happened.append("closed"))
    omni._fleet_open = SimpleNamespace(loop=asyncio.get_running_loop(), replicas={})
    monkeypatch.setattr(omni, "_stop", lambda: happened.append("stopped"), raising=False)
    opened(omni, "r", TEXT)
    thread = threading.Thread(target=omni.shutdown, args=(LONG_S,))
    thread.start()
    async with asyncio.timeout(LONG_S):
        while not omni._draining:
            await asyncio.sleep(0.01)
    assert happened == []
    omni.observer.finished("r", TEXT)
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert sorted(happened) == ["closed", "stopped"]


def test_idle_is_announced_whenever_the_last_request_ends() -> None:
    observer, said = Observer.unseen("thinker", [ReplicaId("thinker", 0)]), []
    for request_id in ("a", "b"):
        observer.opened(request_id, request_id, ("text",), parts=(TEXT,), arrival=time.time())
    observer.watch_quiet(lambda: said.append(observer.held()))
    observer.finished("a", TEXT)
    assert said == []
    observer.failed("b", "thinker", RuntimeError("no"))
    assert said == [0]
    observer.watch_quiet(lambda: said.append(7))
    assert said == [0, 7], "it is quiet already"
