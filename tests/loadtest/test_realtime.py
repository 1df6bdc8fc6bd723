"""Realtime against a websocket in this process that answers from a script."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from aiohttp import web

from tests.loadtest.test_figures import Clock
from tests.loadtest.test_http import SECOND, audio, one, serving
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.loadtest.answers import BROKEN, ERROR, MALFORMED, SOUNDLESS, Answer
from vllm_omni_ext.loadtest.client import Request
from vllm_omni_ext.loadtest.realtime import PIECE_BYTES, Realtime, Turn, read_turn

TURN = Turn(np.arange(7_200, dtype="<i2").tobytes(), speech_s=0.2)
"""0.3 s, of which the last 0.1 s are silence."""

SPOKEN_ANSWER = [
    {"type": "response.created", "response": {}},
    {"type": "response.output_audio_transcript.delta", "delta": "Hi"},
    {"type": "response.output_audio.delta", "delta": audio(SECOND)},
    {"type": "response.output_audio.delta", "delta": audio(SECOND[:24_000])},
    {"type": "response.output_audio.done"},
    {"type": "response.done", "response": {"status": "completed"}},
]


class Scripted:
    """Accepts one session, records its events, and answers with `reply` at the event `answered`."""

    def __init__(self, answered: str = "response.create", reply: list[Any] = SPOKEN_ANSWER, appends: int = 0) -> None:
        self.answered, self.reply, self.appends = answered, reply, appends
        self.query: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.query = dict(request.query)
        socket = web.WebSocketResponse(autoclose=False)
        await socket.prepare(request)
        await socket.send_json({"type": "session.created"})
        async for message in socket:
            self.events.append(message.json())
            if self.events[-1]["type"] == "session.update":
                await socket.send_json({"type": "session.updated"})
            if self.events[-1]["type"] == self.answered and self.kinds().count(self.answered) > self.appends:
                self.answered = ""
                for event in self.reply:
                    if event is None:
                        await socket.close(code=1011, message=b"lost")
                        return socket
                    await (socket.send_str(event) if isinstance(event, str) else socket.send_json(event))
        await self.ended(socket)
        return socket

    async def ended(self, socket: web.WebSocketResponse) -> None:
        await socket.close()

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def heard(self) -> bytes:
        appended = [event["audio"] for event in self.events if event["type"] == "input_audio_buffer.append"]
        return b"".join(map(base64.b64decode, appended))


async def run(script: Scripted, request: Request, speed: float = 0.0, turn_detection: str = "none") -> Answer:
    clock = asyncio.get_running_loop().time
    async with serving(realtime=script.serve) as url:
        return await one(Realtime(url, request, speed=speed, turn_detection=turn_detection, clock=clock))


async def test_a_spoken_turn_is_sent_committed_and_answered() -> None:
    script = Scripted()
    got = await run(
        script, Request(model="m m", sounds=(TURN,), voice="v", max_tokens=9, extra={"instructions": "Be."})
    )
    assert (got.failure, got.sound_s) == (None, 1.5)
    assert 0 < got.first_text_s <= got.first_sound_s <= got.whole_s
    assert got.ready_s > 0
    assert script.query == {"model": "m m"}
    assert script.heard() == TURN.data
    pieces = ["input_audio_buffer.append"] * 3
    assert script.kinds() == ["session.update", *pieces, "input_audio_buffer.commit", "response.create"]
    pcm = {"type": "audio/pcm", "rate": 24_000}
    assert script.events[0]["session"] == {
        "type": "realtime",
        "output_modalities": ["audio"],
        "audio": {"input": {"format": pcm, "turn_detection": None}, "output": {"format": pcm, "voice": "v"}},
        "max_output_tokens": 9,
        "instructions": "Be.",
    }


async def test_a_spoken_turn_lasts_as_long_as_its_sound_and_times_count_from_its_end() -> None:
    got = await run(Scripted(), Request(model="m", sounds=(TURN,)), speed=1.0)
    assert got.ended_at - got.began_at >= 0.3
    assert got.whole_s < got.ended_at - got.began_at - 0.3
    twice = await run(Scripted(), Request(model="m", sounds=(TURN,)), speed=2.0)
    assert twice.ended_at - twice.began_at >= 0.15


@pytest.mark.slow
@pytest.mark.parametrize("turn_detection", ["server_vad", "semantic_vad"])
async def test_a_server_that_detects_turns_gets_silence_until_it_has_answered(turn_detection: str) -> None:
    script = Scripted("input_audio_buffer.append", appends=5)
    got = await run(script, Request(model="m", sounds=(TURN,)), speed=1.0, turn_detection=turn_detection)
    assert got.failure is None
    assert script.events[0]["session"]["audio"]["input"]["turn_detection"] == {"type": turn_detection}
    assert set(script.kinds()[1:]) == {"input_audio_buffer.append"}
    heard = script.heard()
    assert heard[: len(TURN.data)] == TURN.data
    assert len(heard) >= 6 * PIECE_BYTES
    assert not any(heard[len(TURN.data) :])
    assert got.whole_s >= 0.6 - TURN.speech_s, "from the end of the speech, not of the sound"


async def test_a_written_turn_is_an_item() -> None:
    script = Scripted()
    assert (await run(script, Request(model="m", prompts=("Hi",)))).failure is None
    assert script.kinds() == ["session.update", "conversation.item.create", "response.create"]
    content = [{"type": "input_text", "text": "Hi"}]
    assert script.events[1]["item"] == {"type": "message", "role": "user", "content": content}


async def test_an_answer_of_the_greatest_allowed_length_is_whole() -> None:
    full = {"status": "incomplete", "status_details": {"type": "incomplete", "reason": "max_output_tokens"}}
    reply = [*SPOKEN_ANSWER[:-1], {"type": "response.done", "response": full}]
    got = await run(Scripted(reply=reply), Request(model="m", prompts=("Hi",), max_tokens=2))
    assert (got.failure, got.sound_s) == (None, 1.5)


def done(status: str, reason: str) -> dict[str, Any]:
    return {"type": "response.done", "response": {"status": status, "status_details": {"reason": reason}}}


@pytest.mark.parametrize(
    ("reply", "kind", "detail"),
    [
        ([None], BROKEN, "code 1011"),
        ([{"type": "error", "error": {"message": "wrong"}}], ERROR, "wrong"),
        ([*SPOKEN_ANSWER[:4], {"type": "response.done", "response": {"status": "failed"}}], ERROR, "status failed"),
        ([*SPOKEN_ANSWER[:4], done("incomplete", "content_filter")], ERROR, "content_filter"),
        ([*SPOKEN_ANSWER[:4], done("cancelled", "turn_detected")], ERROR, "turn_detected"),
        ([{"type": "response.done"}], ERROR, "status None"),
        (["no"], MALFORMED, "no JSON"),
        (["{}"], MALFORMED, "no type"),
        ([{"type": "response.output_audio.delta"}], MALFORMED, "no base64"),
        ([SPOKEN_ANSWER[-1]], SOUNDLESS, "without sound"),
    ],
)
async def test_a_failure_of_a_session_has_its_kind_and_message(reply: list[Any], kind: str, detail: str) -> None:
    got = await run(Scripted(reply=reply), Request(model="m", prompts=("Hi",)))
    assert got.failure == kind
    assert detail in got.detail


async def test_the_end_of_the_connection_is_no_part_of_an_answer() -> None:
    class SlowToClose(Scripted):
        async def ended(self, socket: web.WebSocketResponse) -> None:
            clock.now = 9.0
            await socket.close()

    clock, script = Clock(0.0), SlowToClose()
    async with serving(realtime=script.serve) as url:
        request = Request(model="m", prompts=("Hi",))
        got = await one(Realtime(url, request, speed=0.0, turn_detection="none", clock=clock), clock=clock)
    assert (got.failure, got.whole_s, got.ended_at, clock.now) == (None, 0.0, 0.0, 9.0)


async def test_an_error_while_the_turn_is_spoken_ends_the_request() -> None:
    script = Scripted("input_audio_buffer.append", [{"type": "error", "error": {"message": "too much"}}])
    got = await run(script, Request(model="m", sounds=(Turn(SECOND * 60, 60.0),)), speed=1.0)
    assert got.failure == ERROR
    assert got.ended_at - got.began_at < 30


async def test_a_server_without_the_route_is_a_status() -> None:
    async with serving() as url:
        clock = asyncio.get_running_loop().time
        got = await one(
            Realtime(url, Request(model="m", prompts=("Hi",)), speed=0.0, turn_detection="none", clock=clock)
        )
    assert got.failure == "status 404"


def test_a_sound_file_of_any_rate_becomes_a_turn(tmp_path: Path) -> None:
    speech = 0.5 * np.sin(np.arange(8_000) * 0.3)
    sound = np.concatenate([speech, np.zeros(4_000)])
    soundfile.write(tmp_path / "a.wav", np.stack([sound, sound], axis=1), 8_000)
    turn = read_turn(tmp_path / "a.wav")
    assert len(turn.data) == 2 * 36_000
    assert turn.speech_s == pytest.approx(1.0, abs=0.01)


def test_a_file_that_is_no_speech_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silent.wav", np.zeros(100), 8_000)
    (tmp_path / "text.wav").write_text("no sound")
    for name, reason in (("silent", "is silent"), ("text", "cannot be read"), ("missing", "cannot be read")):
        with pytest.raises(ConfigError, match=rf"--audio .*{name}\.wav: {reason}"):
            read_turn(tmp_path / f"{name}.wav")
