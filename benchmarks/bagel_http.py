"""Measures BAGEL's pictures over HTTP: starts a server, sends requests, and reads times from the server's metrics.

A part is a phase of the work on a picture (`PARTS`), e.g. "prefill" or "steps".
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # run as a file, from anywhere

import aiohttp
from PIL import Image

from examples.server import Server, ServerFailed

MODEL = "model"
PROMPT = "a small red fox in the snow, watercolor"
IMAGE, EDIT = "image", "edit"
TASKS = (IMAGE, EDIT)
PARTS = ("queue", "prefill", "steps", "vae")
LONGEST_S = 600.0
REFUSED_STATUS = 3

WRONG_CONFIGURATION = 2
"""Exit status of `vllm serve --omni` when it has refused its configuration in one line and started nothing."""

_SUM = re.compile(r'^vllm_omni_ext:stage_part_seconds_sum\{.*\bpart="(\w+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Asked:
    """Size of the requested pictures, in pixels, and of an edit's input picture; and number of denoise steps."""

    height: int
    width: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """Results of one task with `at_once` pictures at once.

    Attributes:
        image_s: seconds of a round divided by its pictures, median of the rounds.
        image_min_s, image_max_s: seconds of the fastest and of the slowest round, divided by its pictures.
        answer_p50_s: seconds from a request to its complete answer, median.
        parts: mean seconds of a picture by part. "transfer" is the time at the client minus all parts of the stage: the
            prompt is sent to the stage, and the pixels are sent back as PNG in base64. With several pictures at once, a
            part includes waiting for the prefills of other pictures and for the autoencoder.
    """

    task: str
    height: int
    width: int
    steps: int
    at_once: int
    image_s: float
    image_min_s: float
    image_max_s: float
    answer_p50_s: float
    parts: Mapping[str, float]


class Client:
    """Connections to a server, used from one event loop."""

    def __init__(self, url: str, asked: Asked) -> None:
        self._url, self._asked = url, asked
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=LONGEST_S)
        )
        self._picture = png(asked.height, asked.width)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def seconds(self, task: str, seed: int) -> float:
        """Request one picture, and return the seconds to its complete answer.

        Args:
            task: `IMAGE` or `EDIT`.

        Raises:
            RuntimeError: the answer is an error, or has no picture of the right size.
        """
        began = time.perf_counter()
        request = self._edit(seed) if task == EDIT else self._image(seed)
        async with request as reply:
            answer = await reply.text()
        spent = time.perf_counter() - began
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {answer[:500]}")
        check(answer, self._asked)
        return spent

    async def parts(self) -> dict[str, float]:
        """Return the seconds by part that the server has spent on all pictures so far, from `/metrics`."""
        async with self._session.get(self._url.removesuffix("/v1") + "/metrics") as reply:
            return sums(await reply.text())

    def _image(self, seed: int) -> Any:
        asked = self._asked
        size = f"{asked.width}x{asked.height}"
        body = {"model": MODEL, "prompt": PROMPT, "seed": seed, "size": size, "num_inference_steps": asked.steps}
        return self._session.post(f"{self._url}/images/generations", json={**body, "response_format": "b64_json"})

    def _edit(self, seed: int) -> Any:
        form = aiohttp.FormData()
        form.add_field("image", self._picture, filename="picture.png", content_type="image/png")
        fields = {"model": MODEL, "prompt": PROMPT, "seed": seed, "num_inference_steps": self._asked.steps}
        for name, value in {**fields, "response_format": "b64_json"}.items():
            form.add_field(name, str(value))
        return self._session.post(f"{self._url}/images/edits", data=form)


def png(height: int, width: int) -> bytes:
    """Return a picture with colours that differ everywhere, as a PNG file."""
    bands = [Image.linear_gradient("L").rotate(angle).resize((width, height)) for angle in (0, 90, 180)]
    file = io.BytesIO()
    Image.merge("RGB", bands).save(file, "PNG")
    return file.getvalue()


def check(answer: str, asked: Asked) -> None:
    """Check that an answer has one picture of the right size; RuntimeError if not."""
    (found,) = json.loads(answer)["data"]
    size = Image.open(io.BytesIO(base64.b64decode(found["b64_json"]))).size
    if size != (asked.width, asked.height):
        raise RuntimeError(f"a picture of {size[0]}x{size[1]} pixels instead of {asked.width}x{asked.height}")


def sums(metrics: str) -> dict[str, float]:
    """Return the seconds by part in the text of `/metrics`, summed over stages and replicas."""
    found = dict.fromkeys(PARTS, 0.0)
    for part, seconds in _SUM.findall(metrics):
        found[part] = found.get(part, 0.0) + float(seconds)
    return found


async def measured(client: Client, asked: Asked, task: str, at_once: int, rounds: int) -> Measured:
    """Run one round that warms up, and measure `rounds` more, each with `at_once` concurrent pictures."""
    await asyncio.gather(*(client.seconds(task, seed) for seed in range(at_once)))
    before, answers, walls = await client.parts(), list[float](), list[float]()
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        answers += await asyncio.gather(*(client.seconds(task, number * at_once + each) for each in range(at_once)))
        walls.append((time.perf_counter() - began) / at_once)
    after = await client.parts()
    parts = {name: (after[name] - before.get(name, 0.0)) / len(answers) for name in after}
    parts["transfer"] = statistics.mean(answers) - sum(parts.values())
    spread = statistics.median(walls), min(walls), max(walls), statistics.median(answers)
    return Measured(task, *(asked.height, asked.width, asked.steps), at_once, *spread, parts)


def measure(
    model: Path, flags: Sequence[str], asked: Asked, counts: Sequence[int], rounds: int
) -> list[Measured] | None:
    """Start a server and measure all tasks; None if the server has refused its configuration."""

    async def all_of(url: str) -> list[Measured]:
        async with Client(url, asked) as client:
            return [await measured(client, asked, task, count, rounds) for task in TASKS for count in counts]

    with tempfile.TemporaryDirectory(prefix="bagel-bench-") as folder:
        server = Server(model, Path(folder, "server.log"), ["--served-model-name", MODEL, *flags])
        try:
            with server:
                return asyncio.run(all_of(server.base_url))
        except ServerFailed:
            if server.status() != WRONG_CONFIGURATION:
                raise
            print(server.tail(), flush=True)
            return None


def table(rows: Sequence[Measured]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    yield f"| task | at once | s/image | answer p50, s | {', s | '.join(names)}, s |"
    yield "|---" * (len(names) + 4) + "|"
    for row in rows:
        spread = f"{row.image_s:.3f} ({row.image_min_s:.3f} to {row.image_max_s:.3f})"
        parts = " | ".join(f"{row.parts.get(name, 0.0):.3f}" for name in names)
        yield f"| {row.task} | {row.at_once} | {spread} | {row.answer_p50_s:.3f} | {parts} |"


def as_json(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the measurements as JSON data, one mapping for each."""
    return [asdict(row) for row in rows]
