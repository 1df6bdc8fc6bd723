"""Measures the time from the end of speech to the first sound over the turns of a Realtime conversation.

Each turn of the user is `--seconds` of sound; the answer is one short sentence, and its length is fixed. A turn is
measured twice on the same server, from `response.create` to the first sound at the client: "kept" after the turn before
it, as in a conversation, and "again" after the prefix caches, kept hidden states and media caches were emptied, so that
the whole conversation is computed. Both answers have the same sound.

    python benchmarks/conversation.py [MODEL] [--turns 10] [--seconds 4] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
import numpy as np
from checkpoint import checkpoint, parser

from examples.server import Server

MODEL = "model"
RATE_HZ = 24_000
TEXT, FRAMES = 12, 8
BLOCK = 32
ROUNDING = 4
"""Largest difference of two PCM16 samples that count as equal."""
REPLY = "The quick brown fox jumps over the lazy dog."
OVERRIDES = {
    "thinker": {
        "engine": {"block_size": BLOCK},
        "params": {"temperature": 0, "ignore_eos": True, "max_tokens": TEXT},
    },
    "talker": {
        "engine": {"block_size": BLOCK},
        "params": {"temperature": 0, "max_tokens": FRAMES + 1, "min_tokens": FRAMES + 1},
    },
}


def speech(seconds: float, seed: int) -> str:
    """Return noise instead of speech, as PCM16 at 24 kHz in base64."""
    wave = np.random.default_rng(seed).uniform(-0.3, 0.3, int(seconds * RATE_HZ))
    return base64.b64encode((wave * 32767).astype("<i2").tobytes()).decode()


def alike(one: bytes, other: bytes) -> bool:
    """Return whether two sounds are equal up to rounding, which depends on the batches of code2wav."""
    a, b = (np.frombuffer(each, "<i2").astype(np.int32) for each in (one, other))
    return len(a) == len(b) > 0 and int(np.abs(a - b).max()) <= ROUNDING


class Talk:
    """The client of a Realtime session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def send(self, kind: str, until: str, **fields: Any) -> None:
        """Send an event of the type `kind`, and receive events up to the next one of the type `until`."""
        await self._socket.send_json({"type": kind, **fields})
        while (await self._receive())["type"] != until:
            pass

    async def _receive(self) -> dict[str, Any]:
        event: dict[str, Any] = await self._socket.receive_json(timeout=600)
        if event["type"] == "error":
            raise RuntimeError(str(event["error"]))
        return event

    async def answer(self) -> tuple[float, bytes]:
        """Request a response that is not added to the conversation; return (seconds to its first sound, its sound)."""
        began, first, sound = time.monotonic(), 0.0, b""
        await self._socket.send_json({"type": "response.create", "response": {"conversation": "none"}})
        while (event := await self._receive())["type"] != "response.done":
            if event["type"] == "response.output_audio.delta":
                first = first or time.monotonic() - began
                sound += base64.b64decode(event["delta"])
        return first, sound


async def conversation(server: Server, turns: int, seconds: float, seed: int) -> list[tuple[float, float]]:
    """Hold one conversation; return ("kept", "again") for each turn, both in seconds to the first sound."""
    found = []
    async with aiohttp.ClientSession() as session:
        url = f"{server.base_url}/realtime?model={MODEL}"
        async with session.ws_connect(url, max_msg_size=0) as socket:
            talk = Talk(socket)
            manual = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
            await talk.send("session.update", "session.updated", session=manual)
            for turn in range(turns):
                await socket.send_json(
                    {"type": "input_audio_buffer.append", "audio": speech(seconds, seed * 1000 + turn)}
                )
                await talk.send("input_audio_buffer.commit", "conversation.item.done")
                kept, sound = await talk.answer()
                for cache in ("prefix", "mm"):
                    async with session.post(f"{server.base_url.removesuffix('/v1')}/reset_{cache}_cache") as reply:
                        reply.raise_for_status()
                again, expected = await talk.answer()
                assert alike(sound, expected), f"turn {turn + 1}: another sound"
                found.append((kept, again))
                content = [{"type": "output_text", "text": REPLY}]
                item = {"type": "message", "role": "assistant", "content": content}
                await talk.send("conversation.item.create", "conversation.item.done", item=item)
    return found


def main() -> None:
    """Run this benchmark from the command line, and print its results."""
    flags = parser(__doc__ or "")
    flags.add_argument("--turns", type=int, default=10)
    flags.add_argument("--seconds", type=float, default=4.0, help="length of each turn of the user")
    flags.add_argument("--rounds", type=int, default=3, help="measured conversations, after one that warms up")
    flags.add_argument("--json", type=Path, help="file that takes every figure")
    args = flags.parse_args()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for the routes that empty caches
    size = ["--max-model-len", "16384", "--max-num-batched-tokens", "16384", "--served-model-name", MODEL]
    size += ["--stage-overrides", json.dumps(OVERRIDES)]
    with (
        checkpoint(args.model) as model,
        tempfile.TemporaryDirectory(prefix="omni-bench-") as folder,
        Server(model, Path(folder) / "log", size) as server,
    ):
        rounds = [asyncio.run(conversation(server, args.turns, args.seconds, n)) for n in range(args.rounds + 1)][1:]
    print(f"{'first sound, ms':>16}{'kept':>10}{'again':>10}{'kept/again':>12}{'kept/turn 1':>13}")
    medians = [[statistics.median(each) for each in zip(*pairs, strict=True)] for pairs in zip(*rounds, strict=True)]
    for turn, (kept, again) in enumerate(medians, 1):
        ratios = f"{kept / again:12.2f}{kept / medians[0][0]:13.2f}"
        print(f"turn {turn:11}{1e3 * kept:10.0f}{1e3 * again:10.0f}{ratios}")
    if args.json is not None:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
