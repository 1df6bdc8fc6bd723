"""Spoken answers (`spoken.py`) over HTTP: a server in another process, and a client that streams."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
from spoken import QUESTION, Answer, Ask, Lengths, Listener, check_frames

from examples.server import Server
from vllm_omni_ext.loadtest.client import refuse_status
from vllm_omni_ext.loadtest.http import events, read_chunk

MODEL = "model"
LONGEST_S = 600.0
"""Time limit of one answer."""


def body(lengths: Lengths, seed: int) -> dict[str, Any]:
    """Return the body of a chat request with fixed lengths; `talker` and `ignore_eos` are not in OpenAI's API."""
    exactly = {"max_tokens": lengths.talker_tokens, "min_tokens": lengths.talker_tokens, "seed": seed}
    return {
        "model": MODEL,
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "temperature": 0,
        "max_completion_tokens": lengths.text,
        "ignore_eos": True,
        "talker": exactly,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Client:
    """Connections to a server, used from one event loop."""

    def __init__(self, url: str, lengths: Lengths) -> None:
        self._url, self._lengths = f"{url}/chat/completions", lengths
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=LONGEST_S)
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, seed: int) -> Answer:
        """Request one answer; Failure if there is none, RuntimeError if it has another length."""
        listener, frames = Listener(), 0
        async with self._session.post(self._url, json=body(self._lengths, seed)) as reply:
            await refuse_status(reply)
            async for event in events(reply.content):
                listener.hear(read_chunk(event)[1])
                frames = frames_of(event) or frames
        check_frames(frames, self._lengths)
        return listener.end()


def frames_of(event: Mapping[str, Any]) -> int:
    """Return the number of frames of the whole answer from an event with `usage`, the last one; 0 for other events."""
    details = (event.get("usage") or {}).get("completion_tokens_details") or {}
    return int(details.get("audio_tokens") or 0)


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[Server]:
    """Start `vllm serve MODEL --omni`, yield the ready server, and end it with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="omni-bench-") as folder,
        Server(model, Path(folder, "server.log"), ["--served-model-name", MODEL, *flags]) as server,
    ):
        yield server


@contextmanager
def over_http(server: Server, lengths: Lengths) -> Iterator[tuple[Ask, asyncio.Runner]]:
    """Yield (function that requests an answer from a server, runner of the event loop in which it must run)."""
    with asyncio.Runner() as runner:
        client = runner.run(_connected(server, lengths))
        try:
            yield client.ask, runner
        finally:
            runner.run(client.close())


async def _connected(server: Server, lengths: Lengths) -> Client:
    return Client(server.base_url, lengths)
