"""An API server that shuts down waits for the requests in flight and refuses new ones."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from tests.support.fakes import Bench
from vllm_omni_ext.errors import StageUnavailable
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.runtime.client.text_client import TextClient

LONG_S = 20.0
SPEAK = RequestOptions(modalities=("text", "audio"))


def client() -> TextClient:
    orchestrator: Any = SimpleNamespace(replicas={}, pools={}, frontend="thinker")
    config: Any = None
    return TextClient(config, orchestrator, admission=orchestrator)


def outputs() -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])])


@pytest.fixture
def omni() -> Any:
    """The part of an `AsyncOmni` that shuts down."""
    made: Any = AsyncOmni.__new__(AsyncOmni)
    made.bench = Bench(lambda event: [])
    made.orchestrator = made.bench.orchestrator
    made.engine_core = client()
    yield made
    made._fleet_open = None


async def opened(omni: Any, *request_ids: str) -> None:
    """Begin requests for text and sound."""
    for request_id in request_ids:
        await omni.bench.start(request_id)


async def drained(omni: Any, timeout: float = LONG_S) -> asyncio.Task[None]:
    task = asyncio.create_task(omni._drain(timeout))
    await asyncio.sleep(0.05)
    return task


async def test_drain_waits_for_every_request_until_its_limit(omni: Any) -> None:
    assert (await drained(omni)).done(), "no request"
    await opened(omni, "a", "b")
    await asyncio.wait_for(omni._drain(0.1), 2)
    draining = await drained(omni)
    await omni.bench.produce("text", "a", 1, end="stop")
    await omni.orchestrator.abort(["b"])
    await asyncio.sleep(0.05)
    assert not draining.done(), "the text of a has ended, its sound has not"
    await omni.orchestrator.text_only(["a"])
    await asyncio.wait_for(draining, 5)
    await asyncio.wait_for(omni._drain(LONG_S), 2)


async def test_drain_waits_for_work_that_outlasts_the_requests(omni: Any) -> None:
    over = asyncio.Event()
    omni.when_stopping(lambda: None, over.wait)
    await asyncio.wait_for(omni._drain(0.1), 2)
    draining = await drained(omni)
    assert not draining.done()
    over.set()
    await asyncio.wait_for(draining, 5)


async def test_the_beginning_of_a_shutdown_is_announced_once_before_it_waits(omni: Any) -> None:
    calls: list[bool] = []
    omni.when_stopping(lambda: calls.append(omni.draining))
    await opened(omni, "r")
    draining = await drained(omni)
    assert calls == [True] and not draining.done()
    await omni.orchestrator.abort(["r"])
    await asyncio.wait_for(draining, 5)
    await asyncio.wait_for(omni._drain(0.1), 2)
    assert calls == [True]


async def test_drain_waits_until_outputs_are_handled(omni: Any) -> None:
    await opened(omni, "r")
    omni.engine_core.deliver(outputs())
    draining = await drained(omni)
    await omni.orchestrator.abort(["r"])
    await asyncio.sleep(0.05)
    assert not draining.done()
    await omni.engine_core.get_output_async()
    await asyncio.sleep(0.05)
    assert not draining.done(), "it is being handled"
    handler = asyncio.create_task(omni.engine_core.get_output_async())
    await asyncio.wait_for(draining, 5)
    handler.cancel()


async def test_new_requests_are_refused_during_drain(omni: Any) -> None:
    await opened(omni, "r")
    draining = await drained(omni)
    with pytest.raises(StageUnavailable, match="shutting down"):
        omni.generate("hello", SamplingParams(), "new")
    with pytest.raises(StageUnavailable, match="shutting down"):
        omni.start(Rendered(), SPEAK, "new")
    await omni.orchestrator.abort(["r"])
    await asyncio.wait_for(draining, 5)


async def test_shutdown_from_another_thread_waits_for_requests_and_then_closes(
    omni: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the loop removes a lost replica while the connections are closed."""
    from vllm_omni_ext.runtime.client.calls import TargetedLLM

    happened: list[str] = []
    monkeypatch.setattr(TargetedLLM, "shutdown", lambda self, timeout: happened.append("closed"))
    replicas: dict[str, Any] = {}

    def close(timeout: float) -> None:
        happened.append("connection closed")
        replicas.pop("b", None)

    replicas |= dict.fromkeys("ab", SimpleNamespace(close=close))
    omni._fleet_open = SimpleNamespace(loop=asyncio.get_running_loop(), replicas=replicas)
    monkeypatch.setattr(omni, "_stop", lambda: happened.append("stopped"), raising=False)
    await opened(omni, "r")
    thread = threading.Thread(target=omni.shutdown, args=(LONG_S,))
    thread.start()
    async with asyncio.timeout(LONG_S):
        while not omni.draining:
            await asyncio.sleep(0.01)
    assert happened == []
    await omni.orchestrator.abort(["r"])
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert sorted(happened) == ["closed", *["connection closed"] * 2, "stopped"]
