"""Load client of `/v1/realtime`: each request opens a connection and sends one turn."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.loadtest.answers import BROKEN, ERROR, MALFORMED, Clock, Failure, Timeline
from vllm_omni_ext.loadtest.client import RATE_HZ, SAMPLE_BYTES, Request, base64_bytes, seconds
from vllm_omni_ext.modalities.sound import pcm16
from vllm_omni_ext.serving.realtime.pcm import Resampler, SoundFormat

PIECE_S = 0.1
PIECE_BYTES = int(PIECE_S * RATE_HZ) * SAMPLE_BYTES
QUIET = 0.01
"""Fraction of the largest amplitude below which samples at the end of a sound are silence."""

TURN_DETECTION = ("none", "server_vad", "semantic_vad")
TEXTS = ("response.output_text.delta", "response.output_audio_transcript.delta")
SOUND = "response.output_audio.delta"
DONE = "response.done"


@dataclass(frozen=True)
class Turn:
    """A spoken turn.

    Attributes:
        data: mono 16-bit samples at 24 kHz.
        speech_s: seconds from the start to the last sample that is not silence.
    """

    data: bytes
    speech_s: float


def read_turn(file: Path) -> Turn:
    """Read a spoken turn from a sound file of any sample rate and number of channels.

    Raises:
        ConfigError: the file cannot be read, or is silent.
    """
    import soundfile

    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as err:  # RuntimeError: soundfile's own
        raise ConfigError(f"--audio {file}: cannot be read: {err}") from None
    mono = Resampler(rate, RATE_HZ).write(samples.mean(axis=1), last=True)
    loud = np.flatnonzero(np.abs(mono) > QUIET * np.abs(mono).max(initial=0.0))
    if not len(loud):
        raise ConfigError(f"--audio {file}: is silent")
    return Turn(pcm16(mono), float(loud[-1] + 1) / RATE_HZ)


class Realtime:
    """Load client of the Realtime API. Each request sends one spoken `Turn`, or one text if `request` has no sounds.

    Args:
        speed: speed at which input sound is sent; 1.0: real time; 0: without waiting.
        turn_detection: one of `TURN_DETECTION`; "none": the client commits the turn at its end.
        clock: returns the time of a monotonic clock in seconds.
    """

    def __init__(self, url: str, request: Request, *, speed: float, turn_detection: str, clock: Clock) -> None:
        self._url, self._request, self._speed, self._clock = f"{url}/realtime", request, speed, clock
        self._detection = None if turn_detection == "none" else {"type": turn_detection}

    def session(self) -> dict[str, Any]:
        """Return the session settings, sent as `session.update`."""
        request, sound = self._request, SoundFormat().as_json()
        voice = {} if request.voice is None else {"voice": request.voice}
        limit = {} if request.max_tokens is None else {"max_output_tokens": request.max_tokens}
        return {
            "type": "realtime",
            "output_modalities": ["audio"],
            "audio": {
                "input": {"format": sound, "turn_detection": self._detection},
                "output": {"format": sound, **voice},
            },
            **limit,
            **request.extra,
        }

    async def send(self, session: aiohttp.ClientSession, number: int, timeline: Timeline) -> None:
        """Send one request, and record the times of its answer in `timeline`; see `client.Api.send`."""
        parameters = {"model": self._request.model}
        async with session.ws_connect(self._url, params=parameters, max_msg_size=0) as socket:
            await _until(socket, "session.created")
            await socket.send_json({"type": "session.update", "session": self.session()})
            await _until(socket, "session.updated")
            timeline.ready()
            sender = asyncio.create_task(self._input(socket, number, timeline))
            receiver = asyncio.create_task(_output(socket, timeline))
            try:
                await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
                if not receiver.done():
                    sender.result()  # raises its error
                await receiver
            finally:
                sender.cancel()
                receiver.cancel()
                await asyncio.gather(sender, receiver, return_exceptions=True)

    async def _input(self, socket: aiohttp.ClientWebSocketResponse, number: int, timeline: Timeline) -> None:
        turn: Turn | None = self._request.sound(number)
        if turn is None:
            content = [{"type": "input_text", "text": self._request.prompt(number)}]
            item = {"type": "message", "role": "user", "content": content}
            await socket.send_json({"type": "conversation.item.create", "item": item})
            timeline.spoken()
            await socket.send_json({"type": "response.create"})
        elif self._detection is None:
            await self._speak(socket, turn.data, self._speed)
            timeline.spoken()
            await socket.send_json({"type": "input_audio_buffer.commit"})
            await socket.send_json({"type": "response.create"})
        else:
            began = self._clock()
            timeline.spoken(began + turn.speech_s / self._speed if self._speed else began)
            await self._speak(socket, turn.data, self._speed)
            while True:  # sends silence, which ends the turn, until `send` cancels this task
                await self._speak(socket, bytes(PIECE_BYTES), self._speed or 1.0)

    async def _speak(self, socket: aiohttp.ClientWebSocketResponse, data: bytes, speed: float) -> None:
        """Send sound in pieces of `PIECE_S` seconds.

        A piece that ends at second t of the sound is sent t / `speed` seconds after the call.

        Args:
            data: 16-bit samples at `RATE_HZ`.
            speed: 1.0: real time; 0: all pieces are sent at once.
        """
        began = self._clock()
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            if speed:
                due = began + seconds(at + len(piece)) / speed
                await asyncio.sleep(max(0.0, due - self._clock()))
            audio = base64.b64encode(piece).decode("ascii")
            await socket.send_json({"type": "input_audio_buffer.append", "audio": audio})


async def _until(socket: aiohttp.ClientWebSocketResponse, kind: str) -> None:
    """Receive and discard events until an event of type `kind` arrives."""
    while (await _event(socket))["type"] != kind:
        continue


async def _output(socket: aiohttp.ClientWebSocketResponse, timeline: Timeline) -> None:
    """Receive the events of one response, and record the times of its text and sound."""
    while True:
        event = await _event(socket)
        if event["type"] in TEXTS:
            timeline.text()
        elif event["type"] == SOUND:
            timeline.sound(seconds(base64_bytes(event.get("delta"))))
        elif event["type"] == DONE:
            _refuse_partial(event.get("response"))
            timeline.done()
            return


def _refuse_partial(response: Any) -> None:
    """Raise Failure if a response is neither complete nor ended by `max_output_tokens`."""
    found = response if isinstance(response, Mapping) else {}
    status, details = found.get("status"), found.get("status_details")
    full = status == "incomplete" and isinstance(details, Mapping) and details.get("reason") == "max_output_tokens"
    if status != "completed" and not full:
        raise Failure(ERROR, f"{DONE} with status {status}: {json.dumps(details)}")


async def _event(socket: aiohttp.ClientWebSocketResponse) -> Mapping[str, Any]:
    """Receive and return an event. Raises Failure: the event is an error or malformed, or the connection has ended."""
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise Failure(BROKEN, f"the connection ended with code {socket.close_code}: {message.extra or ''}".rstrip(": "))
    try:
        event = json.loads(message.data)
    except ValueError as err:
        raise Failure(MALFORMED, f"an event is no JSON: {err}") from None
    if not isinstance(event, Mapping) or not isinstance(event.get("type"), str):
        raise Failure(MALFORMED, "an event has no type")
    if event["type"] == "error":
        raise Failure(ERROR, json.dumps(event.get("error")))
    return event
