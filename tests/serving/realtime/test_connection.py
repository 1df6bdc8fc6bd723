"""Connections of clients without sockets: the order of reading, detecting and sending, and clients that do not read."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import WebSocket
from prometheus_client import CollectorRegistry

from tests.support.loop_clock import settle, stopped_clock
from tests.support.realtime import MANUAL, OFFER, PCM_MS, Speech, silence
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.serving import server
from vllm_omni_ext.serving.realtime import answering
from vllm_omni_ext.serving.realtime.connection import CLOSE_S, DETECT_BYTES, Connection
from vllm_omni_ext.serving.realtime.limits import Limits

IDLE_S = 10.0
TOO_SLOW = (1008, "client_too_slow")


class Client:
    """A client whose events are there at once, and which reads while `reads` is set."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.log: list[str] = []
        """Types of the events that the server has read, and of those that the client has read, in order."""
        self.events: list[dict[str, Any]] = []
        self.closed: tuple[int, str] | None = None
        self.reads = asyncio.Event()
        self.reads.set()
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_server.put_nowait({"type": "websocket.connect"})
        for event in events:
            self.send(event)

    def send(self, event: dict[str, Any]) -> None:
        self.to_server.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    async def read_by_server(self) -> dict[str, Any]:
        message = await self.to_server.get()
        if "text" in message:
            self.log.append(json.loads(message["text"])["type"])
        return message

    async def receive(self, message: dict[str, Any]) -> None:
        if message["type"] == "websocket.accept":
            return
        await self.reads.wait()
        if message["type"] == "websocket.close":
            self.closed = (message["code"], message["reason"])
            return
        self.events.append(json.loads(message["text"]))
        self.log.append(self.events[-1]["type"])


class AllSpeech(Speech):
    """Turn detection in which all sound is speech. It records the pieces, and whether a turn has begun before each."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.speaking: list[bool] = []

    async def push(self, data: bytes, detector: Any) -> list[tuple[float, float]]:
        self.pieces.append(data)
        self.speaking.append(detector.speaking)
        self.ms += len(data) / PCM_MS
        return [(self.ms, 1.0)]


class Chat:
    """A model that answers with many pieces of text."""

    async def create_parts(self, request: Any, **_: Any) -> AsyncIterator[Any]:
        return self._parts()

    async def _parts(self) -> AsyncIterator[Any]:
        for _ in range(30):
            await asyncio.sleep(0)
            yield {"choices": [{"delta": {"content": "word "}}]}
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@asynccontextmanager
async def served(client: Client, speech: Any = None, **limits: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Serve a client; yields the task of its connection, after all tasks have come to a wait."""
    websocket = WebSocket({"type": "websocket", "headers": []}, client.read_by_server, client.receive)
    connection = Connection(
        websocket,
        OFFER,
        Limits(**{"idle_s": IDLE_S, "session_s": 1e6} | limits),
        Chat(),  # type: ignore[arg-type]
        Metrics("tiny", CollectorRegistry()),
        speech=speech or AllSpeech(),
    )
    await websocket.accept()
    serving = asyncio.create_task(connection.run())
    await settle()
    yield serving
    client.to_server.put_nowait({"type": "websocket.disconnect", "code": 1000})
    client.reads.set()
    await serving


def update() -> dict[str, Any]:
    return {"type": "session.update", "session": MANUAL}


def retrieves(count: int, ms: float) -> list[dict[str, Any]]:
    """Events that create items with sound, and then retrieve all of them."""
    sound = {"type": "input_audio", "audio": silence(ms)}
    items = [{"id": f"i{at}", "type": "message", "role": "user", "content": [sound]} for at in range(count)]
    return [
        update(),
        *({"type": "conversation.item.create", "item": item} for item in items),
        *({"type": "conversation.item.retrieve", "item_id": item["id"]} for item in items),
    ]


async def test_large_sound_passes_turn_detection_in_pieces_and_each_begins_after_the_turns_of_the_others() -> None:
    speech = AllSpeech()
    sound = bytes(range(250)) * (3 * DETECT_BYTES // 250 + 2)
    client = Client({"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()})
    async with served(client, speech):
        assert b"".join(speech.pieces) == sound
        assert speech.speaking == [False, True, True, True]
        assert all(len(each) <= DETECT_BYTES and len(each) % 2 == 0 for each in speech.pieces)


async def test_events_are_sent_between_the_events_of_a_client_that_are_there_at_once() -> None:
    client = Client(update(), *[{"type": "conversation.item.delete", "item_id": "x"}] * 30)
    async with served(client):
        last = len(client.log) - client.log[::-1].index("conversation.item.delete")
        assert client.log[:last].count("error") >= 25
        assert client.log.count("error") == 30


async def test_a_client_that_reads_gets_all_events_that_its_own_events_cause() -> None:
    client = Client(*retrieves(6, 200))
    async with served(client, unsent_bytes=10_000):
        assert client.log.count("conversation.item.retrieved") == 6
        assert client.closed is None


async def test_the_next_event_is_read_when_the_client_has_read_the_events_before() -> None:
    with stopped_clock() as advance:
        client = Client(*retrieves(6, 200))
        client.reads.clear()
        async with served(client, unsent_bytes=40_000):
            await advance(IDLE_S - 1)
            assert client.log.count("conversation.item.retrieve") == 2, "half of the limit is reached with the second"
            client.reads.set()
            await settle()
            assert client.log.count("conversation.item.retrieved") == 6 and client.closed is None


async def test_a_client_that_reads_nothing_for_the_idle_time_is_too_slow() -> None:
    with stopped_clock() as advance:
        client = Client(*retrieves(6, 200))
        client.reads.clear()
        async with served(client, unsent_bytes=40_000):
            await advance(IDLE_S)
            client.reads.set()
            await settle()
            assert client.closed == TOO_SLOW
            assert client.events[-1]["error"]["code"] == "client_too_slow"


@pytest.mark.parametrize("reads", [True, False])
async def test_an_answer_does_not_wait_for_a_client_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    async def at_once(work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(answering.asyncio, "to_thread", at_once)
    client = Client(update())
    async with served(client, unsent_bytes=3000):
        if not reads:
            client.reads.clear()
        client.send({"type": "response.create", "response": {"output_modalities": ["text"], "instructions": "Talk."}})
        await settle()
        client.reads.set()
        await settle()
        assert client.closed == (None if reads else TOO_SLOW)


async def test_a_client_that_never_reads_leaves_no_error() -> None:
    with stopped_clock() as advance:
        client = Client(update())
        client.reads.clear()
        async with served(client) as serving:
            await advance(IDLE_S)
            assert not serving.done(), "the queued events may still be sent"
            await advance(CLOSE_S)
            assert serving.done() and not serving.cancelled() and serving.exception() is None


def test_linux_ends_a_connection_whose_client_does_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.end_unread(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == server.UNREAD_S * 1000
    with socket.socket(socket.AF_UNIX) as local:
        server.end_unread(local)
