"""Times at which sound is sent to a client that interrupts it, exactly: the test sets the clock."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from fastapi import WebSocket
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.support.loop_clock import settle, stopped_clock
from tests.support.realtime import OFFER, PCM_MS, Checker, Driver, Speech
from vllm_omni_ext.connectors.playback import Player
from vllm_omni_ext.metrics import Metrics
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.serving.realtime import answering
from vllm_omni_ext.serving.realtime.answering import PACERS, PIECE_MS, Answers
from vllm_omni_ext.serving.realtime.connection import Connection
from vllm_omni_ext.serving.realtime.limits import Limits
from vllm_omni_ext.serving.realtime.pacing import AHEAD_MS

RATE = 24_000
MOST_AHEAD_MS = AHEAD_MS + PIECE_MS
STEP_S = 0.02
SPEECH = base64.b64encode(b"\x20" * (PCM_MS * 100)).decode()
CANCEL = {"type": "response.cancel"}
SPEAK = {"type": "input_audio_buffer.append", "audio": SPEECH}

CHUNKS = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 900)), min_size=1, max_size=12)
"""Milliseconds before a chunk of the model's sound, and of the chunk."""


class Chat:
    """A model whose answers have chunks of sound at given times."""

    def __init__(self, chunks: list[tuple[int, int]]) -> None:
        self._chunks = chunks

    async def create_parts(self, request: Any, **_: Any) -> AsyncIterator[Any]:
        return self._parts()

    async def _parts(self) -> AsyncIterator[Any]:
        yield {"choices": [{"delta": {"content": "one two three"}}]}
        for at, (gap_ms, ms) in enumerate(self._chunks):
            await asyncio.sleep(gap_ms / 1000)
            samples = np.zeros(ms * RATE // 1000, np.float32)
            last = at == len(self._chunks) - 1
            yield AudioChunk(
                request_id="r", samples=samples, sample_rate=RATE, frames=np.zeros((at, 4), np.int64), last=last
            )
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}


class Listener:
    """A client of a connection that has no socket. It plays the sound, and checks every event.

    Args:
        now: the test's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.player = Player()
        self.checker = Checker()
        self.events: list[dict[str, Any]] = []
        self.sound_at: list[float] = []
        self.interrupted_at = self.played_ms = 0.0
        self.heard_before = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_server.put_nowait({"type": "websocket.connect"})

    async def receive(self, message: dict[str, Any]) -> None:
        """Receive a message of the server, while the client reads."""
        await self.reads.wait()
        if message["type"] != "websocket.send":
            return
        event = json.loads(message["text"])
        self.checker.take(event)
        self.events.append(event)
        if event["type"] == "response.output_audio.delta":
            self.sound_at.append(self.now())
            self.player.receive(len(base64.b64decode(event["delta"])) / PCM_MS / 1000, self.now())

    def send(self, event: dict[str, Any]) -> None:
        self.to_server.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


async def interrupted(chunks: list[tuple[int, int]], at_ms: int, event: dict[str, Any], deaf_ms: int) -> Listener:
    """Return a client that interrupts an answer `at_ms` after its request, and reads no events `deaf_ms` before."""
    with stopped_clock() as advance, pytest.MonkeyPatch.context() as patch:
        clock = asyncio.get_running_loop().time

        async def at_once(work: Callable[..., Any], *args: Any) -> Any:
            return work(*args)

        patch.setattr(answering.asyncio, "to_thread", at_once)
        client = Listener(clock)
        websocket = WebSocket({"type": "websocket", "headers": []}, client.to_server.get, client.receive)
        limits, metrics = Limits(idle_s=1e6, session_s=1e6), Metrics("tiny", CollectorRegistry())
        connection = Connection(websocket, OFFER, limits, Chat(chunks), metrics, speech=Speech(50), clock=clock)  # type: ignore[arg-type]
        await websocket.accept()
        serving = asyncio.create_task(connection.run())
        client.send({"type": "response.create", "response": {"instructions": "Count."}})
        await settle()
        end = clock() + at_ms / 1000
        while clock() < end:
            if end - clock() <= deaf_ms / 1000:
                client.reads.clear()
            await advance(min(STEP_S, end - clock()))
            assert client.player.unplayed(clock()) * 1000 <= MOST_AHEAD_MS + 1e-6
        client.interrupted_at, client.heard_before = clock(), len(client.sound_at)
        client.played_ms = 1000 * (client.player.sound - client.player.unplayed(clock()))
        client.send(event)
        await settle()
        client.reads.set()
        for _ in range(100):
            await advance(0.1)
        client.to_server.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await serving
    return client


@pytest.mark.slow
@given(chunks=CHUNKS, at_ms=st.integers(0, 3000), event=st.sampled_from([CANCEL, SPEAK]))
@settings(max_examples=100, deadline=None)
def test_no_sound_is_sent_after_an_interruption_and_at_most_400_ms_are_ahead_of_playing(
    chunks: list[tuple[int, int]], at_ms: int, event: dict[str, Any]
) -> None:
    client = asyncio.run(interrupted(chunks, at_ms, event, 0))
    assert len(client.sound_at) == client.heard_before
    (done,) = client.of("response.done")
    unplayed = client.player.sound * 1000 - client.played_ms > 1
    if done["response"]["status"] == "completed":
        assert client.player.sound * 1000 == pytest.approx(sum(ms for _, ms in chunks))
    elif event is CANCEL:
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
    else:
        assert done["response"]["status_details"]["reason"] == "turn_detected"
    if event is SPEAK and unplayed:
        (truncated,) = client.of("conversation.item.truncated")
        assert truncated["audio_end_ms"] == pytest.approx(client.played_ms, abs=1)


@pytest.mark.parametrize("event", [CANCEL, SPEAK])
def test_sound_that_waits_for_a_client_that_does_not_read_is_dropped_at_an_interruption(event: dict[str, Any]) -> None:
    client = asyncio.run(interrupted([(0, 5000)], 3000, event, 2000))
    assert len(client.sound_at) - client.heard_before <= 1, "the message that was being sent"
    assert client.of("response.done")[0]["response"]["status"] == "cancelled"
    client = asyncio.run(interrupted([(0, 5000)], 3000, {"type": "input_audio_buffer.clear"}, 2000))
    assert client.player.sound == pytest.approx(5.0), "without an interruption nothing is dropped"


async def test_the_played_sound_of_a_response_is_known_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped_clock() as advance:

        async def at_once(work: Callable[..., Any], *args: Any) -> Any:
            return work(*args)

        monkeypatch.setattr(answering.asyncio, "to_thread", at_once)
        driver, chat = Driver(), Chat([])
        metrics = Metrics("tiny", CollectorRegistry())
        answers = Answers(chat, driver.take, metrics, asyncio.get_running_loop().time)  # type: ignore[arg-type]
        answers.session = driver.session

        async def answered(chunks: list[tuple[int, int]], **fields: Any) -> str:
            chat._chunks = chunks
            response = driver.respond(**fields)
            answers.start(driver.generate)
            await advance(1.0)
            return response

        apart = {"conversation": "none"}
        running = await answered([(0, 200), (10**9, 100)], **apart)
        spoken = await answered([(0, 300)])
        for _ in range(PACERS + 1):
            await answered([], **apart, output_modalities=["text"])
        assert answers.played_ms(spoken) == pytest.approx(300)
        for _ in range(PACERS + 1):
            await answered([(0, 100)], **apart)
        assert driver.session.responses == (running,)
        assert answers.played_ms(running) == pytest.approx(200), "it may be interrupted yet"
        assert answers.played_ms(spoken) == math.inf and answers.remaining_ms(spoken) == 0.0
        await answers.close()
