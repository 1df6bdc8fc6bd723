"""Media of few bytes that would cost much, and a sample rate that nothing has."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import tracemalloc
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.pace import pace
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.serving import gate, media
from vllm_omni_ext.serving.pixels import PixelBudget


def picture(side: int, kind: str) -> str:
    data = webp(side) if kind == "webp" else encoded(side, kind, "1")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def encoded(side: int, kind: str, mode: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, format=kind, **options)
    return buffer.getvalue()


def webp(side: int) -> bytes:
    """One colour without loss: files of every size differ in nothing but the size, 14 bits less one for each side."""
    data = bytearray(encoded(16, "webp", "L", lossless=True, method=0, quality=0))
    at = data.index(b"VP8L") + 9
    rest = int.from_bytes(data[at : at + 4], "little") >> 28 << 28
    data[at : at + 4] = (rest | side - 1 << 14 | side - 1).to_bytes(4, "little")
    return bytes(data)


def test_webp_files_are_those_of_the_encoder() -> None:
    assert webp(700) == encoded(700, "webp", "L", lossless=True, method=0, quality=0)


def sound(rate: int) -> str:
    data = bytes(2000)
    head = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVEfmt ", 16, 1, 1, rate, 0, 2, 16, b"data", 2000
    )
    return f"data:audio/wav;base64,{base64.b64encode(head + data).decode()}"


async def ask(app: Any, kind: str, *urls: str) -> httpx.Response:
    content = [*({"type": kind, kind: {"url": url}} for url in urls), {"type": "text", "text": "What is it?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "modalities": ["text"]})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        return await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(("side", "kind"), [(13_000, "png"), (8_001, "png"), (13_000, "gif"), (13_000, "webp")])
async def test_images_of_many_pixels(app: Any, engine: ScriptedOmni, side: int, kind: str) -> None:
    assert OmniConfig().max_image_pixels == 8_000**2
    url = picture(side, kind)
    tracemalloc.start()
    began = time.monotonic()
    answer = await ask(app, "image_url", url)
    took, (_, most) = time.monotonic() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "64000000 pixels" in error["message"] and f"{side}x{side}" in error["message"]
    assert took < pace() and most < 64 << 20
    assert engine.calls == []


async def test_images_of_many_pixels_together(app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the images is small enough by itself, and each request has a budget of its own."""
    assert OmniConfig().max_request_pixels == 4 * OmniConfig().max_image_pixels
    monkeypatch.setattr(gate, "PixelBudget", lambda most: PixelBudget(most // 1000))
    engine.script = ["fine"]
    with media.install(None):
        answers = [await ask(app, "image_url", *[picture(252, "png")] * count) for count in (4, 5, 4)]
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    error = answers[1].json()["error"]
    assert "max_request_pixels" in error["message"] and error["param"] in ("messages", "image_url")


@pytest.mark.parametrize("rate", [7, 44_100, 2**31 - 1, 2**32 - 1])
async def test_sample_rates(app: Any, engine: ScriptedOmni, rate: int) -> None:
    engine.script = ["fine"]
    answer = await ask(app, "audio_url", sound(rate))
    assert "package metadata" not in answer.text
    if answer.status_code != 200:  # PyAV changes rates, and cannot change every one
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert "medium could not be read" in error["message"]
