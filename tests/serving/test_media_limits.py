"""Small files with too many pixels, and sounds of unusual sample rates."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from tests.serving.conftest import asking
from tests.support.media import damaged_avif
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import Limits, OmniConfig
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.app import MAX_IMAGE_PIXELS
from vllm_omni_ext.serving.limits import bodies, media


def sound(rate: int) -> str:
    data = bytes(2000)
    head = struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVEfmt ", 16, 1, 1, rate, 0, 2, 16, b"data", 2000
    )
    return f"data:audio/wav;base64,{base64.b64encode(head + data).decode()}"


def picture(side: int, kind: str) -> str:
    buffer = io.BytesIO()
    Image.new("1", (side, side)).save(buffer, format=kind)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


async def ask(app: Any, kind: str, *urls: str) -> httpx.Response:
    content = [{"type": kind, kind: {"url": url}} for url in urls]
    async with asking(app) as http:
        body = {"messages": [{"role": "user", "content": content}], "modalities": ["text"]}
        return await http.post("/v1/chat/completions", json=body)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "kind"), [(13_000, "png"), (8_001, "png"), (13_000, "gif")])
async def test_an_image_of_too_many_pixels_is_not_decoded(app: Any, engine: ScriptedOmni, side: int, kind: str) -> None:
    assert MAX_IMAGE_PIXELS == 8_000**2
    url = picture(side, kind)
    tracemalloc.start()
    answer = await ask(app, "image_url", url)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "64000000 pixels" in error["message"] and f"{side}x{side}" in error["message"]
    assert most < 64 << 20 and engine.calls == []


async def test_images_of_a_request_share_a_budget_of_pixels(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the images is small enough by itself, and each request has a budget of its own."""
    assert Limits().max_request_pixels == 4 * MAX_IMAGE_PIXELS
    small = OmniConfig(limits=Limits(max_request_pixels=256_000))
    monkeypatch.setattr(bodies, "pixel_budget", lambda _: media.pixel_budget(small))
    engine.script = ["fine"]
    with media.install(None):
        answers = [await ask(app, "image_url", *[picture(252, "png")] * count) for count in (4, 5, 4)]
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    error = answers[1].json()["error"]
    assert "max_request_pixels" in error["message"] and error["param"] in ("messages", "image_url")


async def test_an_image_at_which_pillow_fails_is_named(app: Any) -> None:
    url = f"data:image/avif;base64,{base64.b64encode(damaged_avif()).decode()}"
    with media.install(None):
        answer = await ask(app, "image_url", url)
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("messages", "image_url")


async def test_frames_of_a_video_in_jpeg_images_share_the_budget_of_pixels(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = OmniConfig(limits=Limits(max_request_pixels=256_000))
    monkeypatch.setattr(bodies, "pixel_budget", lambda _: media.pixel_budget(small))
    engine.script = ["fine"]
    frame = picture(252, "jpeg").partition(",")[2]
    with media.install(None):
        answers = [await ask(app, "video_url", f"data:video/jpeg;base64,{','.join([frame] * n)}") for n in (4, 5, 4)]
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    error = answers[1].json()["error"]
    assert "max_request_pixels" in error["message"] and error["param"] == "video_url"


@pytest.mark.parametrize("rate", [7, 44_100, 2**31 - 1, 2**32 - 1])
async def test_any_sample_rate_is_converted_or_refused(app: Any, engine: ScriptedOmni, rate: int) -> None:
    engine.script = ["fine"]
    answer = await ask(app, "audio_url", sound(rate))
    assert "package metadata" not in answer.text
    if answer.status_code != 200:  # PyAV changes rates, and cannot change every one
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert "medium could not be read" in error["message"]


async def test_a_plugin_reads_the_sounds_of_a_conversation_and_of_a_field(app: Any) -> None:
    model, at = app.state.omni_serving_speech.model, 24_000
    data = sound(48_000).rpartition(",")[2]
    parts = [
        {"type": "text", "text": "two sounds"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": sound(24_000)}},
    ]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": parts}])
    half, whole = await model.sounds(request.messages, rate=at)
    assert abs(len(half) - 500) <= 50 and len(whole) == 1000
    assert half.dtype == whole.dtype == np.float32 and half.ndim == 1
    assert len(await model.sound(sound(24_000), rate=at, field="ref_audio")) == 1000


@pytest.mark.parametrize(
    "url", [sound(7), sound(2**32 - 1), "data:audio/wav;base64,AAAA", "x", 3, "file:///etc/passwd"]
)
async def test_a_sound_that_cannot_be_read_is_refused_with_the_name_of_its_field(app: Any, url: Any) -> None:
    model = app.state.omni_serving_speech.model
    with pytest.raises(RequestError, match=r"^ref_audio: ") as refused:
        await model.sound(url, rate=24_000, field="ref_audio")
    assert refused.value.parameter == "ref_audio"
