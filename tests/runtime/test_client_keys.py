"""Connections between vLLM's client and vLLM's engine over TCP: peers without the keys have no effect."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from tests.runtime.test_client import ENGINE, SAID, config
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.patches import engine_sockets
from vllm_omni_ext.runtime.client.replica import Client, addresses

pytestmark = pytest.mark.slow

PATIENCE_S = 30.0
QUIET_S = 0.5
KEYS = Keys.derive(b"correct horse battery staple")
OTHER = Keys.derive(b"another horse, another staple")

Listeners = tuple[ZmqListener, ZmqListener]


@pytest.fixture(params=["tcp://127.0.0.1:0", "tcp://[::1]:0"])
def listeners(request: pytest.FixtureRequest) -> Iterator[Listeners]:
    """As the head keeps them."""
    try:
        made = make_zmq_listener(request.param, zmq.ROUTER), make_zmq_listener(request.param, zmq.PULL)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    yield made
    for listener in made:
        listener.socket.close()


@pytest.fixture(autouse=True)
def engine_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's engine has the keys."""
    monkeypatch.setattr(engine_sockets, "_options", {})
    engine_sockets.use(KEYS.connecting)


class Engine(EngineCoreProc):
    """The input and output threads of vLLM's engine as the patches make them, and nothing behind them."""

    process_input_sockets = engine_sockets.with_options(EngineCoreProc.process_input_sockets)
    process_output_sockets = engine_sockets.with_options(EngineCoreProc.process_output_sockets)

    def __init__(self, listeners: Listeners) -> None:
        self.input_queue: Any = queue.Queue()
        self.output_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.tensor_ipc_receiver = None
        given, taken = (listener.address for listener in listeners)
        begun = threading.Event()
        threading.Thread(target=self.process_input_sockets, args=([given], None, ENGINE, begun), daemon=True).start()
        threading.Thread(target=self.process_output_sockets, args=([taken], None, 0), daemon=True).start()

    def _make_ready_response(self) -> Any:
        return msgspec.msgpack.decode(SAID)


def outputs(request: str) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=request, new_token_ids=[1])])


@contextmanager
def stranger(listeners: Listeners, options: dict[int, Any]) -> Iterator[zmq.Socket[Any]]:
    """A peer that connects first, claims to be the engine and sends outputs; yields its input socket."""
    given, taken = (listener.address for listener in listeners)
    context = zmq.Context()
    context.sockopts.update({zmq.LINGER: 0, zmq.IPV6: 1, **options})
    dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    dealer.setsockopt(zmq.IDENTITY, ENGINE)
    dealer.connect(given)
    push.connect(taken)
    with suppress(zmq.Again):
        dealer.send(msgspec.msgpack.encode(msgspec.msgpack.decode(SAID) | {"max_model_len": 1}), zmq.NOBLOCK)
        push.send_multipart(MsgpackEncoder().encode(outputs("false")), zmq.NOBLOCK)
    try:
        yield dealer
    finally:
        context.destroy(linger=0)


@contextmanager
def connecting(listeners: Listeners, keys: Keys | None) -> Iterator[Future[Client]]:
    """A client that an API server makes in a thread, as for a replica that joins."""
    given, taken = (ZmqListener(each.address, each.socket.dup()) for each in listeners)

    def make() -> Client:
        return Client(config(), object, False, client_addresses=addresses((given, taken)), keys=keys)

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(make)
        try:
            yield made
        finally:
            made.result(PATIENCE_S).shutdown(timeout=0)


def first_output(client: Client, wait_s: float) -> str:
    """Request of the first outputs that come in time."""

    async def wait() -> str:
        async with asyncio.timeout(wait_s):
            return (await client.get_output_async()).outputs[0].request_id

    return asyncio.run(wait())


WITHOUT = {
    "no keys": {},
    "other keys": OTHER.connecting,
    "a wrong key of the listening side": {**KEYS.connecting, zmq.CURVE_SERVERKEY: KEYS.client.public},
}
"""Socket options of strangers."""


def test_strangers_that_connect_first_are_not_read_and_receive_nothing(listeners: Listeners) -> None:
    with ExitStack() as open_, connecting(listeners, KEYS) as made:
        inputs = {name: open_.enter_context(stranger(listeners, options)) for name, options in WITHOUT.items()}
        with pytest.raises(TimeoutError):
            made.result(QUIET_S)
        engine = Engine(listeners)
        client = made.result(PATIENCE_S)
        assert client.ready_response == SAID and client.vllm_config.model_config.max_model_len == 64
        asyncio.run(client.abort_requests_async(["r"]))
        assert engine.input_queue.get(timeout=PATIENCE_S) == (EngineCoreRequestType.ABORT, ["r"])
        engine.output_queue.put((0, outputs("true")))
        assert first_output(client, PATIENCE_S) == "true", "the false one was there before"
        assert [name for name, its_input in inputs.items() if its_input.poll(0)] == []
        engine.output_queue.put(EngineCoreProc.ENGINE_CORE_DEAD)


def test_an_engine_sends_nothing_to_a_listener_without_the_keys(listeners: Listeners) -> None:
    given, taken = listeners
    context = zmq.Context()
    context.sockopts.update({zmq.LINGER: 0, zmq.IPV6: 1})
    router, pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    for made, listener in ((router, given), (pull, taken)):
        made.setsockopt(zmq.USE_FD, listener.socket.dup().detach())
        made.bind(listener.address)
    engine = Engine(listeners)
    engine.output_queue.put((0, outputs("true")))
    assert not router.poll(QUIET_S * 1000) and not pull.poll(0)
    context.destroy(linger=0)


def test_unix_sockets_have_no_keys() -> None:
    context = zmq.Context()
    stock = EngineCoreProc.process_input_sockets.__globals__[engine_sockets.MAKER]
    made = engine_sockets.with_options(EngineCoreProc.process_input_sockets).__globals__[engine_sockets.MAKER]
    socket = made(context, "ipc:///nowhere/at/all", zmq.DEALER, bind=False)
    assert socket.mechanism == zmq.NULL
    assert EngineCoreProc.process_input_sockets.__globals__[engine_sockets.MAKER] is stock, "vLLM's own is untouched"
    context.destroy(linger=0)
