"""Measures how soon the sound of a realtime session ends when the client interrupts it, and how much sound is unplayed.

A client of a server plays each answer in real time and interrupts it `--rounds` times with `response.cancel`, and as
often with speech that the server's turn detection finds. "Last sound" is the time from the sending of the interrupting
event to the last sound that is received; 0: none is received after it. With speech that event is the piece of 20 ms
that completes the least length of speech. "Ahead" is the largest length of sound that the client has received and not
played.

    python benchmarks/barge_in.py [MODEL] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import numpy as np
import soundfile
import soxr
import websockets
from checkpoint import checkpoint, parser

from examples.server import Server
from vllm_omni_ext.connectors.playback import Player
from vllm_omni_ext.serving.realtime.turns import LEAST_SPEECH_MS

MODEL = "model"
SPEECH = Path(__file__).parents[1] / "tests" / "data" / "accuracy" / "held_out.flac"
RATE, BYTES_PER_MS, PIECE_MS = 24_000, 48, 20
SPEECH_S = 3
FRAMES, WORDS = 200, 12
STAGES = {
    "thinker": {"params": {"temperature": 0, "ignore_eos": True, "max_tokens": WORDS}},
    "talker": {"params": {"temperature": 0, "min_tokens": FRAMES, "max_tokens": FRAMES}},
}
"""Answers of 16 s, which are longer than a round."""
FLAGS = ("--served-model-name", MODEL, "--max-model-len", "2048", "--stage-overrides", json.dumps(STAGES))
DETECTION = {"type": "server_vad", "create_response": False, "prefix_padding_ms": 0}
"""Turn detection. Without padding, `audio_start_ms` of an event is the begin of the speech."""

EARLIEST_S, LATEST_S = 0.5, 2.5
"""Shortest and longest time from the first sound of an answer to the interruption; it is random."""
QUIET_S = 1.0
"""Time after an interruption in which the client waits for late sound."""


def speech() -> list[str]:
    """Return some seconds of speech at 24 kHz in pieces of `PIECE_MS`, as base64."""
    found, rate = soundfile.read(SPEECH, dtype="float32", frames=SPEECH_S * 16_000)
    sound = soxr.resample(found, rate, RATE)
    data = (sound * (0.6 / np.abs(sound).max()) * 32767).astype("<i2").tobytes()
    size = PIECE_MS * BYTES_PER_MS
    return [base64.b64encode(data[at : at + size]).decode() for at in range(0, len(data) - size + 1, size)]


class Client:
    """The client of a realtime session, which plays the received sound in real time.

    Attributes:
        player: state of the playback of the present answer.
        ahead_ms: largest length of sound that was received and not played.
        last_sound_at: time of the last received sound, on the monotonic clock.
        sent_at: time at which each piece of speech was sent.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.player = Player()
        self.ahead_ms = 0.0
        self.last_sound_at = 0.0
        self.sent_ms = 0.0
        self.sent_at: list[float] = []

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._socket.send(json.dumps({"type": kind, **fields}))

    def next(self, kind: str) -> asyncio.Future[dict[str, Any]]:
        """Return a future of the next event of a type."""
        return self._waiting.setdefault(kind, asyncio.get_running_loop().create_future())

    async def receive(self) -> None:
        """Receive events until the connection ends; record the times of sound, and complete the futures of `next`."""
        async for text in self._socket:
            now, event = time.monotonic(), json.loads(text)
            if event["type"] == "error":
                raise SystemExit(f"the server has sent an error: {event['error']}")
            if event["type"] == "response.output_audio.delta":
                self.last_sound_at = now
                self.player.receive(len(base64.b64decode(event["delta"])) / BYTES_PER_MS / 1000, now)
                self.ahead_ms = max(self.ahead_ms, 1000 * self.player.unplayed(now))
            if (waiting := self._waiting.pop(event["type"], None)) is not None:
                waiting.set_result(event)

    async def speak(self, pieces: list[str], until: asyncio.Future[Any]) -> None:
        """Send pieces of sound in real time, until the future `until` of an event is done."""
        began, first = time.monotonic(), len(self.sent_at)
        for piece in pieces:
            if until.done():
                return
            self.sent_at.append(time.monotonic())
            await self.send("input_audio_buffer.append", audio=piece)
            await asyncio.sleep(max(0.0, began + (len(self.sent_at) - first) * PIECE_MS / 1000 - time.monotonic()))
        raise SystemExit("the server has found no speech")


async def interruption(client: Client, pieces: list[str], kind: str) -> tuple[float, float]:
    """Request an answer and interrupt it.

    Args:
        pieces: speech in base64, for the kind "speech".
        kind: "cancel" (with `response.cancel`) or "speech".

    Returns:
        (milliseconds from the interruption to the last sound, most milliseconds of sound received and not played).
    """
    client.player, client.ahead_ms = Player(), 0.0
    sound, done = client.next("response.output_audio.delta"), client.next("response.done")
    await client.send("response.create", response={"instructions": "Count.", "tool_choice": "none"})
    await sound
    await asyncio.sleep(random.uniform(EARLIEST_S, LATEST_S))
    if kind == "cancel":
        interrupted = time.monotonic()
        await client.send("response.cancel")
        await done
    else:
        started = client.next("input_audio_buffer.speech_started")
        await client.speak(pieces, started)
        await done
        found_ms = started.result()["audio_start_ms"] + LEAST_SPEECH_MS
        interrupted = client.sent_at[math.ceil(found_ms / PIECE_MS) - 1]
    assert done.result()["response"]["status"] == "cancelled", done.result()
    await asyncio.sleep(QUIET_S)
    if kind != "cancel":
        cleared = client.next("input_audio_buffer.cleared")
        await client.send("input_audio_buffer.clear")
        await cleared
    return max(0.0, 1000 * (client.last_sound_at - interrupted)), client.ahead_ms


async def measured(url: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the results of `interruption` by kind; the kinds take turns."""
    pieces, found = speech(), dict[str, list[tuple[float, float]]]({"cancel": [], "speech": []})
    async with websockets.connect(f"{url}/realtime?model={MODEL}", max_size=None) as socket:
        client = Client(socket)
        receiving = asyncio.create_task(client.receive())
        updated = client.next("session.updated")
        session = {"type": "realtime", "audio": {"input": {"turn_detection": DETECTION}}}
        await client.send("session.update", session=session)
        await updated
        for number in range(rounds + 1):
            for kind, each in found.items():
                work = asyncio.create_task(interruption(client, pieces, kind))
                await asyncio.wait((work, receiving), return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    receiving.result()
                result = work.result()
                if number:  # the first ones warm up
                    each.append(result)
        receiving.cancel()
    return found


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--rounds", type=int, default=20, help="interruptions of each kind")
    flags.add_argument("--json", type=Path, help="file that takes every figure")
    args = flags.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(args.model))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-"))
        server = stack.enter_context(Server(model, Path(folder) / "server.log", FLAGS))
        found = asyncio.run(measured(server.base_url.replace("http", "ws", 1), args.rounds))
    print(f"{'interrupted by':>16}{'last sound, ms: median':>26}{'largest':>10}{'ahead, ms: largest':>22}")
    for kind, each in found.items():
        last, ahead = zip(*each, strict=True)
        print(f"{kind:>16}{statistics.median(last):26.1f}{max(last):10.1f}{max(ahead):22.0f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
