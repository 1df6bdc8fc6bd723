"""Sound for the clients of `test_realtime_clients.py`, at the pace of a microphone. Needs nothing but Python."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

PIECE_S, BYTES_A_S = 0.1, 48_000
PIECE = bytes(round(PIECE_S * BYTES_A_S))
SOUND = "response.output_audio.delta"
TURNS = ("second", "first", "second", "first")
"""The last spoken turns of each conversation, one after the other."""

WAIT_S = 60.0
END_S = 1.2
"""Silence after words, longer than the silence that ends a turn."""


class Microphone:
    """Sends sound of 24 kHz with 16 bits, in pieces of 100 ms.

    Args:
        send: sends one piece.
        folder: has the sounds, `NAME.pcm`.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]], folder: str) -> None:
        self._send = send
        self._folder = Path(folder)
        self._due = time.monotonic()

    async def say(self, name: str) -> None:
        """Send words, and the silence after them."""
        data = (self._folder / f"{name}.pcm").read_bytes() + bytes(round(END_S * BYTES_A_S))
        for at in range(0, len(data), len(PIECE)):
            await self._piece(data[at : at + len(PIECE)])

    async def silence(self, until: Callable[[], bool]) -> None:
        """Send silence until a condition holds.

        Raises:
            TimeoutError: it does not within `WAIT_S`.
        """
        async with asyncio.timeout(WAIT_S):
            while not until():
                await self._piece(PIECE)

    async def turns(self, ended: Callable[[], int]) -> None:
        """Send `TURNS`, each after the response to the one before has ended; `ended` returns their number."""
        for name in TURNS:
            before = ended()
            await self.say(name)
            await self.silence(lambda before=before: ended() > before)

    async def _piece(self, data: bytes) -> None:
        self._due = max(self._due + PIECE_S, time.monotonic())
        await self._send(data)
        await asyncio.sleep(self._due - time.monotonic())


class Seen:
    """Events of the server, as the client has received them, and the calls of its function."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.sound_ms = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """Keep an event; of deltas only those of output sound have their content."""
        left_out = ("audio",) if event["type"] == SOUND else ("delta", "audio")
        self.events.append({name: value for name, value in event.items() if name not in left_out})

    def count(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(event["type"] == kind for event in self.events)

    def print(self, **more: Any) -> None:
        """Print everything as the last line."""
        print(json.dumps({"events": self.events, "calls": self.calls, "sound_ms": self.sound_ms, **more}), flush=True)
