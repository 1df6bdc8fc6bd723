"""The text stage's replicas as `AsyncLLM` sees them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import CallFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.client.replica import StockReplica
from vllm_omni_ext.runtime.client.text_client import TextClient

NAMES = [ReplicaId("thinker", i) for i in range(3)]


class Client:
    """vLLM's client of one replica."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.vllm_config = f"config {number}"
        self.calls: list[tuple[Any, ...]] = []
        self.resources = SimpleNamespace(engine_dead=False, ctx=zmq.Context(), output_queue_task=None)

    async def reset_prefix_cache_async(self, *args: Any) -> int:
        self.calls.append(args)
        await asyncio.sleep(0)
        return self.number

    async def collective_rpc_async(self, method: str) -> list[str]:
        await asyncio.sleep(0)
        return [f"{method} {self.number}"]

    async def failing_async(self) -> None:
        if self.number == 1:
            raise ValueError("no")

    def get_kv_event_sources(self) -> dict[int, str]:
        return {0: f"source {self.number}"}


class Orchestrator:
    frontend = "thinker"

    def __init__(self, replicas: dict[ReplicaId, StockReplica]) -> None:
        self.replicas = dict(replicas)
        self.pools = {"thinker": StagePool("thinker", replicas)}


CONFIG: Any = "config of the stage"


class Bench:
    def __init__(self, count: int = 3) -> None:
        self.clients: list[Any] = [Client(i) for i in range(count)]
        self.replicas = {name: StockReplica(name, c) for name, c in zip(NAMES, self.clients, strict=False)}
        self.orchestrator: Any = Orchestrator(self.replicas)
        self.text = TextClient(CONFIG, self.orchestrator, admission=self.orchestrator)

    def lose(self, name: ReplicaId) -> None:
        del self.orchestrator.replicas[name]
        self.orchestrator.pools["thinker"].remove(name)


def outputs(request_id: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [1])])


async def test_outputs_are_delivered_in_order_after_the_last_replica_is_lost() -> None:
    bench = Bench()
    text = bench.text
    waiting = asyncio.create_task(text.get_output_async())
    await asyncio.sleep(0)
    assert not waiting.done()
    for request_id in "cab":
        text.deliver(outputs(request_id))
    for name in NAMES:
        bench.lose(name)
    assert not text.resources.engine_dead
    got = [await waiting, await text.get_output_async(), await text.get_output_async()]
    assert [each.outputs[0].request_id for each in got] == ["c", "a", "b"]
    with pytest.raises(StageUnavailable):
        await text.reset_prefix_cache_async()


async def test_other_tasks_run_while_a_replica_has_a_backlog_of_outputs() -> None:
    """`asyncio.Queue.get` does not suspend its task while the queue has items: health probes would wait for the end."""
    client: Any = Client(0)
    client.outputs_queue = asyncio.Queue()

    async def get_output_async() -> Any:
        return await client.outputs_queue.get()

    client.get_output_async = get_output_async
    replica, turns, others = StockReplica(NAMES[0], client), [], 0

    async def read() -> None:
        for _ in range(5):
            await replica.outputs()
            turns.append(others)

    for _ in range(5):
        client.outputs_queue.put_nowait(outputs("a"))
    reading = asyncio.create_task(read())
    while not reading.done():
        others += 1
        await asyncio.sleep(0)
    assert len(set(turns)) == len(turns) == 5


def queued(number: int) -> Any:
    """A client with so many outputs that nothing has taken yet."""
    client: Any = Client(0)
    client.outputs_queue = asyncio.Queue()
    for _ in range(number):
        client.outputs_queue.put_nowait(outputs("a"))

    async def get_output_async() -> Any:
        found = await client.outputs_queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def get_supported_tasks_async() -> tuple[str, ...]:
        return ()

    client.get_output_async, client.get_supported_tasks_async = get_output_async, get_supported_tasks_async
    return client


async def test_a_fence_waits_until_the_outputs_before_it_were_taken() -> None:
    """vLLM's client resolves a call at once; outputs in its queue would count for the next run of a request."""
    replica, taken = StockReplica(NAMES[0], queued(3)), 0

    async def read() -> None:
        nonlocal taken
        while True:
            await replica.outputs()
            await asyncio.sleep(0)
            taken += 1

    reading = asyncio.create_task(read())
    await asyncio.wait_for(replica.fence(), 5)
    assert taken == 3
    reading.cancel()


@pytest.mark.parametrize("taken", [0, 2])
async def test_a_fence_fails_if_the_replica_ends_before_it(taken: int) -> None:
    replica = StockReplica(NAMES[0], queued(taken))
    fence = asyncio.create_task(replica.fence())
    replica.fail("killed")
    for _ in range(taken):
        await replica.outputs()
    with pytest.raises(EngineDeadError):
        await replica.outputs()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(fence, 5)


async def test_a_replica_that_joins_is_called_and_a_lost_one_is_not() -> None:
    bench = Bench(2)
    late: Any = Client(2)
    bench.lose(NAMES[0])
    bench.orchestrator.replicas[NAMES[2]] = StockReplica(NAMES[2], late)
    bench.orchestrator.pools["thinker"].add(NAMES[2])
    assert await bench.text.collective_rpc_async("f") == ["f 1", "f 2"]
    assert bench.text.engine_ranks_managed == [1, 2]


async def test_utilities_reach_every_live_replica_and_fail_if_one_fails() -> None:
    bench = Bench()
    with pytest.raises(CallFailed, match=r"thinker/1: no$"):
        await bench.text.failing_async()
    bench.lose(NAMES[1])
    assert await bench.text.reset_prefix_cache_async(True, False) is False  # replica 0 answers 0
    assert [client.calls for client in bench.clients] == [[(True, False)], [], [(True, False)]]


async def test_attributes_that_vllm_reads_of_a_client() -> None:
    text = Bench().text
    assert text.engine_ranks_managed == [0, 1, 2] and text.vllm_config == CONFIG
    assert text.get_kv_event_sources() == {0: "source 0", 1: "source 1", 2: "source 2"}
    assert text.dp_engines_running() is False
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = text.nothing
