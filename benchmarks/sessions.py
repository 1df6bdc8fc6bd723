"""Holds many realtime sessions at once while stages are killed; counts lost turns, and the API server's memory.

`--sessions` clients have one session each, in which they hold conversations of three turns, of text and of sound in
turn, with spoken answers; each client begins a new conversation by deleting the items of the last one. A replica of a
stage is killed every `--kill-every` seconds, the one with the most requests. The transcript, the length of the sound
and the status of each answer are compared with those of the same turn before the first kill.

"Memory" is the largest growth of the API server's RSS from the end of the first third of the time to the end of any
later one; both are counted while no answer is in progress.

    python benchmarks/sessions.py [MODEL] [--sessions 100] [--seconds 180] [--kill-every 15] [--json FILE]

The exit status is 1 if a turn was lost or has another answer, or memory grew by more than `MOST_GROWTH`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
import numpy as np
import psutil
import websockets
from checkpoint import checkpoint, parser

from examples.server import Server

MODEL = "model"
STAGES = ("talker", "code2wav", "thinker")
WORDS, FRAMES = 12, 16
GREEDY = {
    "thinker": {"replicas": 2, "params": {"temperature": 0, "ignore_eos": True, "max_tokens": WORDS}},
    "talker": {"replicas": 2, "params": {"temperature": 0, "min_tokens": FRAMES, "max_tokens": FRAMES}},
    "code2wav": {"replicas": 2},
}
FLAGS = ("--served-model-name", MODEL, "--max-model-len", "2048", "--stage-overrides", json.dumps(GREEDY))
SUBJECTS, TURNS = 10, 3
"""Number of different conversations, and the turns of each."""
RATE, SOUND_S = 24_000, 0.6
ANSWER_S = 120.0
PARTS = 3
"""Number of equal parts into which the measured time is divided; memory is measured at the end of each."""
MOST_GROWTH = 0.05
SESSION = {"type": "realtime", "instructions": "You are a cat.", "audio": {"input": {"turn_detection": None}}}

Answer = tuple[str, str, int]
"""The status of a response, its transcript, and the bytes of its sound."""


class Lost(Exception):
    """A turn has no answer: an error, a closed connection, or no event for `ANSWER_S`."""


def tone(subject: int, turn: int) -> str:
    """Return a sine tone as PCM16 in base64; each turn of each conversation has another frequency."""
    hz = 200 + 40 * subject + 11 * turn
    wave = np.sin(2 * np.pi * hz * np.arange(int(RATE * SOUND_S)) / RATE) * 8000
    return base64.b64encode(wave.astype("<i2").tobytes()).decode()


class Client:
    """The client of one realtime session."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._items: list[str] = []

    @classmethod
    async def begin(cls, url: str) -> Client:
        """Open a session."""
        address = f"{url}/realtime?model={MODEL}"
        # On two cores the restarts of replicas can delay the reply to a ping by more than the library's 20 s.
        client = cls(await websockets.connect(address, max_size=None, compression=None, ping_timeout=ANSWER_S))
        await client._send("session.update", session=SESSION)
        await client._until("session.updated")
        return client

    async def end(self) -> None:
        """Close the session."""
        await self._socket.close()

    async def conversation(self, subject: int) -> list[tuple[Answer, float]]:
        """Delete all items of the session, and hold a conversation.

        Args:
            subject: number of the conversation, which determines what the client says.

        Returns:
            (answer, seconds to its first sound) for each turn.
        """
        for item in self._items:
            await self._send("conversation.item.delete", item_id=item)
            await self._until("conversation.item.deleted")
        self._items.clear()
        return [await self._turn(subject, turn) for turn in range(TURNS)]

    async def _turn(self, subject: int, turn: int) -> tuple[Answer, float]:
        if (subject + turn) % 2:
            await self._send("input_audio_buffer.append", audio=tone(subject, turn))
            await self._send("input_audio_buffer.commit")
        else:
            text = [{"type": "input_text", "text": f"Question {turn}: tell me about moon {subject}."}]
            item = {"type": "message", "role": "user", "content": text}
            await self._send("conversation.item.create", item=item)
        began, first, size = time.monotonic(), 0.0, 0
        await self._send("response.create")
        while (event := await self._event())["type"] != "response.done":
            if event["type"] == "response.output_audio.delta":
                first = first or time.monotonic() - began
                size += len(base64.b64decode(event["delta"]))
        response = event["response"]
        text = " ".join(part["transcript"] for item in response["output"] for part in item["content"])
        if response["status"] not in ("completed", "incomplete"):
            raise Lost(f"{response['status']}: {response['status_details']}")
        return (response["status"], text, size), first

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))

    async def _until(self, kind: str) -> None:
        while (await self._event())["type"] != kind:
            pass

    async def _event(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                event: dict[str, Any] = json.loads(await self._socket.recv())
        except TimeoutError:
            raise Lost(f"no event for {ANSWER_S:.0f} s") from None
        except websockets.ConnectionClosed as error:
            raise Lost(f"the connection was closed: {error}") from None
        if event["type"] == "error":
            raise Lost(f"error: {event['error']}")
        if event["type"] == "conversation.item.added":
            self._items.append(event["item"]["id"])
        return event


@dataclass
class Result:
    """The result of a run.

    Attributes:
        turns: number of answered turns.
        lost: error of each turn without an answer.
        wrong: text for each turn whose answer differs from that before the first kill.
        killed: number of killed replicas by stage.
        first_s: seconds to the first sound, for each turn.
        memory: RSS of the API server in bytes, at the end of each of `PARTS`.
    """

    sessions: int
    turns: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def growth(self) -> float:
        """Return the largest growth of memory since its first measurement, as a share of the first."""
        return max(self.memory) / self.memory[0] - 1


class Run:
    """Holds sessions with one server, and kills its replicas.

    Attributes:
        result: the result so far.
    """

    def __init__(self, server: Server, sessions: int) -> None:
        self._url = server.base_url
        self._sessions = sessions
        self._expected: list[list[Answer]] = []
        self.result = Result(sessions)

    async def run(self, seconds: float, kill_every: float) -> Result:
        """Hold conversations for `seconds`, and kill a replica every `kill_every` seconds; return the result."""
        clients = await asyncio.gather(*(self._begin() for _ in range(self._sessions)))
        alone = await asyncio.gather(*(clients[subject].conversation(subject) for subject in range(SUBJECTS)))
        self._expected = [[answer for answer, _ in answers] for answers in alone]
        for _ in range(PARTS):
            end = time.monotonic() + seconds / PARTS
            killer = asyncio.create_task(self._kill(kill_every))
            await asyncio.gather(*(self._converse(client, number, end) for number, client in enumerate(clients)))
            killer.cancel()
            await asyncio.wait([killer])
            self.result.memory.append(psutil.Process(await self._api_server()).memory_info().rss)
        await asyncio.gather(*(client.end() for client in clients))
        return self.result

    async def _begin(self) -> Client:
        return await Client.begin(self._url.replace("http", "ws", 1))

    async def _converse(self, client: Client, number: int, end: float) -> None:
        for subject in cycle(range(number % SUBJECTS, number % SUBJECTS + SUBJECTS)):
            if time.monotonic() > end:
                return
            subject %= SUBJECTS
            try:
                answers = await client.conversation(subject)
            except Lost as error:
                self.result.lost.append(str(error))
                return
            for (answer, first), expected in zip(answers, self._expected[subject], strict=True):
                self.result.turns += 1
                self.result.first_s.append(first)
                if answer != expected:
                    self.result.wrong.append(f"{answer} instead of {expected}")

    async def _kill(self, every_s: float) -> None:
        """Kill the replica of a stage that has the most requests, stage after stage, until cancelled."""
        for stage in cycle(STAGES):
            await asyncio.sleep(every_s)
            found = {each["name"]: each["replicas"] for each in (await self._status())["stages"]}[stage]
            up = [each for each in found if each["state"] == "UP"]
            if len(up) < len(found):
                continue  # one is still started again
            victim = max(up, key=lambda each: each["running"] + each["waiting"])
            os.kill(victim["pid"], signal.SIGKILL)
            self.result.killed[stage] += 1

    async def _api_server(self) -> int:
        (found,) = (await self._status())["api_servers"]
        return int(found["pid"])

    async def _status(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/omni/status") as reply:
            found: dict[str, Any] = await reply.json()
        return found


def show(result: Result) -> None:
    """Print the result."""
    first = sorted(result.first_s)
    print(f"{result.sessions} sessions, {result.turns} turns; killed: {dict(result.killed)}")
    print(f"first sound: median {statistics.median(first):.2f} s, largest {first[-1]:.2f} s")
    print(f"memory of the API server, MiB: {', '.join(f'{each / 2**20:.0f}' for each in result.memory)}")
    print(f"lost turns: {len(result.lost)}, other answers: {len(result.wrong)}, growth: {result.growth():.1%}")
    for line in (result.lost + result.wrong)[:10]:
        print(f"  {line}")


def main() -> int:
    """Run this benchmark from the command line, and print its results; return the exit status."""
    flags = parser(__doc__ or "")
    flags.add_argument("--sessions", type=int, default=100, help="the limit of an API server is 100 unless configured")
    flags.add_argument("--seconds", type=float, default=180.0)
    flags.add_argument("--kill-every", type=float, default=15.0, help="seconds between two kills")
    flags.add_argument("--json", type=Path, help="file that takes every figure")
    args = flags.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(args.model))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-"))
        server = stack.enter_context(Server(model, Path(folder) / "server.log", FLAGS))
        result = asyncio.run(Run(server, args.sessions).run(args.seconds, args.kill_every))
    show(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result.__dict__, indent=1))
    return int(bool(result.lost or result.wrong or not result.killed or result.growth() > MOST_GROWTH))


if __name__ == "__main__":
    raise SystemExit(main())
