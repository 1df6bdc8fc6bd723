"""vLLM's client of one engine, also without an engine or after another client; the engine is a socket of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.engine import EngineCoreReadyResponse, EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client import replica as module
from vllm_omni_ext.runtime.client.replica import ENGINE, Client, StockReplica, addresses, bootstrap_client_addresses

TERM_S = 0.1
"""A thread that terminates the context has begun after this time."""

LATE_S = 0.3
ANSWER_MS = 5000
FACTS: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks": 7, "block_size": 16, "dp_stats_address": None}
SAID = msgspec.msgpack.encode(
    {field.name: 1 for field in fields(EngineCoreReadyResponse) if field.default is field.default_factory}
    | FACTS
    | {"dtype": "float32", "vllm_version": "x", "instance_id": "x", "supports_lora": False}
)


def config() -> Any:
    """As much of a vLLM config as its client reads."""
    parallel = SimpleNamespace(
        enable_elastic_ep=False,
        enable_fault_tolerance=False,
        data_parallel_size=1,
        data_parallel_index=0,
        data_parallel_size_local=1,
        data_parallel_rank_local=None,
        local_engines_only=False,
    )
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(max_model_len=128, multimodal_config=None),
        cache_config=SimpleNamespace(num_gpu_blocks=None),
        shutdown_timeout=0,
    )


class Engine:
    """The engine's sockets, connected as vLLM's engine connects its own."""

    def __init__(self, context: zmq.Context[Any], listeners: tuple[ZmqListener, ZmqListener]) -> None:
        self.input = context.socket(zmq.DEALER)
        self.input.setsockopt(zmq.IDENTITY, ENGINE)
        self.input.connect(listeners[0].address)

    def received(self) -> bytes:
        """The kind of the next message; empty if none comes."""
        return self.input.recv_multipart()[0] if self.input.poll(ANSWER_MS) else b""


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[ZmqListener, ZmqListener]]:
    """As the head keeps them."""
    made = (
        make_zmq_listener(f"ipc://{tmp_path}/i", zmq.ROUTER),
        make_zmq_listener(f"ipc://{tmp_path}/o", zmq.PULL),
    )
    yield made
    for listener in made:
        listener.socket.close()


def copies(listeners: tuple[ZmqListener, ZmqListener]) -> dict[str, Any]:
    """As they come into an API server's process."""
    given, taken = (ZmqListener(each.address, each.socket.dup()) for each in listeners)
    return addresses((given, taken))


def connected(listeners: tuple[ZmqListener, ZmqListener], ready_response: bytes | None) -> Client:
    return Client(config(), object, False, client_addresses=copies(listeners), ready_response=ready_response)


def test_later_client_reuses_the_ready_response_and_reaches_the_engine(context: Any, listeners: Any) -> None:
    engine = Engine(context, listeners)
    engine.input.send(SAID)
    first = connected(listeners, None)
    assert first.ready_response == SAID and first.core_engines == [ENGINE] and first.connected
    assert first.vllm_config.model_config.max_model_len == 64
    first.shutdown(timeout=0)
    second = connected(listeners, first.ready_response)
    assert second.ready_response == SAID
    assert second.vllm_config.model_config.max_model_len == 64
    assert second.vllm_config.cache_config.num_gpu_blocks == 7
    asyncio.run(second.abort_requests_async(["r"]))
    assert engine.received() == EngineCoreRequestType.ABORT.value
    second.shutdown(timeout=0)


def test_messages_sent_before_the_engine_connects_reach_it(context: Any, listeners: Any) -> None:
    """A ROUTER drops undeliverable messages: the abort of a dead API server's requests would be lost."""
    engines: list[Engine] = []
    late = threading.Timer(LATE_S, lambda: engines.append(Engine(context, listeners)))
    late.start()
    client = connected(listeners, SAID)
    assert client.connected
    asyncio.run(client.abort_requests_async(["r"]))
    late.join()
    assert engines[0].received() == EngineCoreRequestType.ABORT.value
    client.shutdown(timeout=0)


def test_waiting_for_a_hung_engine_has_a_limit(listeners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_MS", 50)
    client = connected(listeners, b"")
    assert not client.connected
    assert client.ready_response == b"" and client.vllm_config.model_config.max_model_len == 128
    asyncio.run(client.abort_requests_async(["r"]))  # is dropped without an error
    client.shutdown(timeout=0)


async def test_the_connection_of_a_late_engine_can_be_awaited(
    context: Any, listeners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_MS", 10)
    replica = StockReplica(ReplicaId("talker", 0), connected(listeners, SAID))
    waiting = asyncio.create_task(replica.connection())
    await asyncio.sleep(0)
    assert not replica.connected
    engine = Engine(context, listeners)
    await asyncio.wait_for(waiting, ANSWER_MS / 1000)
    assert replica.connected
    await replica.abort(["r"])
    assert engine.received() == EngineCoreRequestType.ABORT.value
    replica.close(timeout=0)


async def test_a_connection_that_is_awaited_can_be_closed(listeners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_MS", 10)
    replica = StockReplica(ReplicaId("talker", 0), connected(listeners, SAID))
    waiting = asyncio.create_task(replica.connection())
    await asyncio.sleep(0)
    waiting.cancel()
    replica.close(timeout=0)
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(("response", "max_model_len"), [(SAID, 64), (b"", 128)], ids=["ready", "no response yet"])
def test_stock_client_starts_without_an_engine(tmp_path: Path, response: bytes, max_model_len: int) -> None:
    made = config()
    with bootstrap_client_addresses(str(tmp_path), response) as where:
        client = AsyncMPClient(made, object, False, client_addresses=where, client_count=3, client_index=2)
    assert made.model_config.max_model_len == max_model_len and client.client_index == 2
    client.shutdown(timeout=0)
    assert list(tmp_path.iterdir()) == []


def test_the_start_limit_of_the_package_replaces_that_of_vllm(
    context: Any, listeners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.engine.core_client.VLLM_ENGINE_READY_TIMEOUT_S", LATE_S / 3)
    engine = Engine(context, listeners)
    late = threading.Timer(LATE_S, engine.input.send, [SAID])
    late.start()
    client = Client(config(), object, False, client_addresses=copies(listeners), ready_within_s=ANSWER_MS / 1000)
    late.join()
    assert client.ready_response == SAID
    client.shutdown(timeout=0)


def test_an_engine_that_is_not_ready_in_time_fails(listeners: Any) -> None:
    with pytest.raises(TimeoutError, match=r"not ready within 0\.3 s \(timeouts.startup_timeout_s\)"):
        Client(config(), object, False, client_addresses=copies(listeners), ready_within_s=LATE_S)


def test_closing_a_connection_with_an_unsent_message_does_not_block() -> None:
    context = zmq.Context()
    unsent = context.socket(zmq.PUSH)
    unsent.connect("tcp://127.0.0.1:9")
    unsent.send(b"no receiver")
    resources = SimpleNamespace(ctx=context, output_queue_task=None)
    client: Any = SimpleNamespace(resources=resources, shutdown=lambda timeout: None)
    before, began = threading.enumerate(), time.monotonic()
    try:
        StockReplica(ReplicaId("talker", 0), client).close()
        assert time.monotonic() - began < 10
        (ending,) = [each for each in threading.enumerate() if each.name == "end-zmq" and each not in before]
        assert ending.daemon and ending.is_alive(), "it waits for the message, as garbage collection would"
    finally:
        unsent.close(linger=0)  # garbage collection would wait for ever
    ending.join(30)
    assert context.closed


@pytest.mark.slow
async def test_closing_from_another_thread_does_not_disturb_the_sockets_in_the_loop(listeners: Any) -> None:
    """The loop reads the state of its sockets until it has closed them; a terminated context would raise an error."""
    client = connected(listeners, SAID)
    client._ensure_output_queue_task()
    sockets = client.resources.output_socket, client.resources.input_socket
    closing = threading.Thread(target=StockReplica(ReplicaId("talker", 0), client).close)
    closing.start()
    closing.join()  # the loop has not closed the sockets yet
    time.sleep(TERM_S)
    assert all(isinstance(socket.get(zmq.EVENTS), int) for socket in sockets)
    await asyncio.sleep(0)
    assert all(socket.closed for socket in sockets)
