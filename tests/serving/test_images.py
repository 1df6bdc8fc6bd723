"""Pictures: the two endpoints of OpenAI, and chat that answers with them."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import numpy as np
import openai
import pytest
import pytest_asyncio
from PIL import EpsImagePlugin, ExifTags, Image

from tests.serving import painter
from tests.serving.conftest import MODEL, asking, disconnect
from tests.serving.test_reply import HELLO
from tests.support.media import damaged_avif
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.config.schema import Limits, OmniConfig
from vllm_omni_ext.errors import RequestError, StageUnavailable
from vllm_omni_ext.modalities.base import ProgressChunk
from vllm_omni_ext.modalities.chunks import ImageChunk, TextChunk
from vllm_omni_ext.orchestrator.admission import Ticket
from vllm_omni_ext.serving.images import opened
from vllm_omni_ext.serving.limits import bodies, media

pytestmark = pytest.mark.asyncio(loop_scope="session")

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
PICTURE = ImageChunk(pixels=PIXELS, seed=7)
PREVIEW = ImageChunk(pixels=PIXELS // 2, partial=True, last=False)
PROMPT = "a red barn"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def painting(server_parts: tuple[ScriptedOmni, Any]) -> tuple[Any, ScriptedOmni]:
    """The application over a scripted engine that paints."""
    from vllm_omni_ext.serving import served
    from vllm_omni_ext.serving.app import make_app

    omni = copy.copy(server_parts[0])
    omni.runtime = painter.Runtime(None)
    omni.capabilities = omni.runtime.capabilities()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "family_of", lambda name: painter.FAMILY)
        return await make_app(omni, server_parts[1]), omni


@pytest.fixture
def app(painting: tuple[Any, ScriptedOmni]) -> Any:
    return painting[0]


@pytest.fixture
def engine(painting: tuple[Any, ScriptedOmni]) -> ScriptedOmni:
    omni = painting[1]
    omni.script, omni.calls, omni.refusal = (), [], None
    return omni


@pytest_asyncio.fixture(loop_scope="session")
async def client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app=app))
    async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", max_retries=0, http_client=http) as made:
        yield made


async def post(app: Any, path: str = "/v1/images/generations", **given: Any) -> httpx.Response:
    async with asking(app) as http:
        return await http.post(path, **given)


def decoded(data: str) -> tuple[str | None, np.ndarray]:
    with Image.open(io.BytesIO(base64.b64decode(data.partition("base64,")[2] or data))) as picture:
        return picture.format, np.asarray(picture.convert("RGB"))


def png(side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (side, side), (255, 0, 0, 128)).save(file, format="PNG")
    return file.getvalue()


# -- the endpoints ----------------------------------------------------------------------------------------------


async def test_pictures_are_drawn_for_the_official_client(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [ProgressChunk(stage="talker", done=1, total=2), PICTURE]
    body = {"seed": 5, "steps": 3}
    made = await client.images.generate(model=MODEL, prompt=PROMPT, n=2, size="32x24", extra_body=body)
    assert made.data is not None and [each.seed for each in made.data] == [7, 7]
    for each in made.data:
        kind, pixels = decoded(each.b64_json or "")
        assert kind == "PNG" and (pixels == PIXELS).all()
    assert (made.size, made.output_format) == ("32x24", "png")
    assert made.usage is not None and (made.usage.input_tokens, made.usage.total_tokens) == (6, 6)
    for number, call in enumerate(engine.calls):
        assert call.prompt == PROMPT and call.options.fields == {"size": "32x24", "seed": 5 + number, "steps": 3}
        assert call.options.modalities == ("image",) and call.closed
    assert len(engine.calls) == 2


async def test_previews_are_streamed_before_the_picture(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [PREVIEW, replace(PREVIEW, index=1), PICTURE]
    stream = await client.images.generate(model=MODEL, prompt=PROMPT, stream=True, partial_images=2)
    *previews, last = [event async for event in stream]
    assert [(event.type, event.partial_image_index) for event in previews] == [
        ("image_generation.partial_image", 0),
        ("image_generation.partial_image", 1),
    ]
    assert (decoded(previews[0].b64_json)[1] == PREVIEW.pixels).all()
    assert last.type == "image_generation.completed" and (decoded(last.b64_json)[1] == PIXELS).all()
    assert (last.usage.input_tokens, last.size) == (3, "32x24")


async def test_pictures_are_edited_by_the_official_client(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [PICTURE]
    body = {"steps": 4, "talker": {"temperature": 0.5}, "chunks": {"frames": [4, 25]}}
    made = await client.images.edit(model=MODEL, image=[png(), png(9)], prompt=PROMPT, n=2, extra_body=body)
    assert made.data is not None and len(made.data) == 2
    options = engine.calls[0].options
    assert (options.fields, options.chunks) == ({"steps": 4}, {"frames": [4, 25]})
    assert options.params["talker"].temperature == 0.5
    assert made.usage is not None and made.usage.input_tokens == 6
    assert "input_tokens_details" not in made.usage.model_fields_set, "tokens of pictures are not told from text"
    stream = await client.images.edit(model=MODEL, image=png(), prompt=PROMPT, stream=True)
    assert [event.type async for event in stream] == ["image_edit.completed"]
    card = (await client.models.list()).data[0]
    assert (card.modalities, card.sizes) == (["text", "image"], ["32x24"])
    with pytest.raises(openai.NotFoundError):  # the model does not declare this endpoint
        await client.audio.speech.create(model=MODEL, voice="x", input="x")


async def test_a_picture_that_comes_in_several_pieces_is_edited(
    client: openai.AsyncOpenAI, engine: ScriptedOmni
) -> None:
    engine.script = [PICTURE]
    noise, file = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    async with asyncio.timeout(30):
        made = await client.images.edit(model=MODEL, image=file.getvalue(), prompt=PROMPT)
    assert made.data is not None and len(made.data) == 1


async def test_an_upload_that_the_client_breaks_off_is_no_error_of_the_server(app: Any) -> None:
    pieces = [{"type": "http.request", "body": b"--x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: dict[str, Any]) -> None: ...

    headers = [(b"content-type", b"Multipart/Form-Data; boundary=x"), (b"host", b"server")]
    scope = {"type": "http", "method": "POST", "path": "/v1/images/edits", "query_string": b"", "headers": headers}
    await app({**scope, "root_path": "", "client": ("c", 1), "server": ("s", 80), "scheme": "http"}, receive, send)
    assert pieces == []


async def test_uploaded_pictures_reach_the_plugin(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stock = painter.Surface.image
    image = lambda self, body, *rest: seen.append((body.images, body.mask)) or stock(self, body, *rest)  # noqa: E731
    monkeypatch.setattr(painter.Surface, "image", image)
    engine.script = [PICTURE]
    files = [("image[]", png()), ("image[]", png(9)), ("mask", png())]
    answer = await post(app, "/v1/images/edits", files=files, data={"prompt": "12"})
    assert answer.status_code == 200, answer.text
    assert engine.calls[0].prompt == "12"
    images, mask = seen[0]
    assert [(each.size, each.mode) for each in images] == [((8, 8), "RGB"), ((9, 9), "RGB")] and mask.mode == "RGBA"
    assert np.asarray(images[0])[0, 0].tolist() == [255, 127, 127], "what is transparent is white"


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "size": ({"size": "big"}, "size", "1024x1024"),
    "size of the model": ({"size": "64x64"}, "size", "32x24"),
    "format": ({"output_format": "gif"}, "output_format", "png, jpeg, webp"),
    "url": ({"response_format": "url"}, "response_format", "b64_json"),
    "n": ({"n": 11}, "body.n", "10"),
    "compression": ({"output_compression": 101}, "body.output_compression", "100"),
    "previews": ({"partial_images": 2}, "partial_images", "stream"),
    "prompt": ({"prompt": None}, "body.prompt", "string"),
    "picture in JSON": ({"images": ["data:image/png;base64,AAAA"]}, "images", "/v1/images/edits"),
    "mask in JSON": ({"mask": "data:image/png;base64,AAAA"}, "mask", "/v1/images/edits"),
    "picture of a chat": ({"image": {"format": "jpeg"}}, "image", "unknown"),
    "misspelt": ({"step": 5}, "step", "unknown"),
    "of another API": ({"input_fidelity": "high"}, "input_fidelity", "unknown"),
    "half a character": ({"prompt": "\ud800"}, "prompt", "surrogate"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_field_is_refused_and_named(app: Any, engine: ScriptedOmni, case: str) -> None:
    fields, parameter, said = WRONG[case]
    body = json.dumps({"prompt": PROMPT, **fields})
    response = await post(app, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, parameter), error
    assert said in error["message"]
    assert engine.calls == []


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"files": {"other": b""}, "data": {"prompt": "x"}}, "other"),
    "text as a picture": ({"files": {"image": b"text"}, "data": {"prompt": "x"}}, "image"),
    "no prompt": ({"files": {"image": png()}}, "prompt"),
    "n": ({"files": {"image": png()}, "data": {"prompt": "x", "n": "0"}}, "n"),
    "json": ({"json": {"prompt": "x"}}, "body"),
    "misspelt": ({"files": {"image": png()}, "data": {"prompt": "x", "step": "5"}}, "step"),
    "pictures as text": ({"files": {"image": png()}, "data": {"prompt": "x", "images": "[]"}}, "images"),
    "pictures as a text list": ({"files": {"image": png()}, "data": {"prompt": "x", "images[]": "f"}}, "images[]"),
    "mask as an object": ({"files": {"image": png()}, "data": {"prompt": "x", "mask[x]": "y"}}, "mask[x]"),
    "two masks": ({"files": [("image", png()), ("mask", png()), ("mask", png())], "data": {"prompt": "x"}}, "mask"),
    "twice as a list": ({"files": {"image": png()}, "data": {"prompt": "x", "steps": "1", "steps[]": "2"}}, "steps[]"),
    "twice in an object": (
        {"files": {"image": png()}, "data": {"prompt": "x", "talker[seed]": ["1", "2"]}},
        "talker[seed]",
    ),
    "object in a list": ({"files": {"image": png()}, "data": {"prompt": "x", "a[][b]": "1"}}, "a[][b]"),
    "unknown list": ({"files": {"image": png()}, "data": {"prompt": "x", "step[]": "1"}}, "step"),
    "no name": ({"files": {"image": png()}, "data": {"prompt": "x", "[]": "1"}}, "[]"),
    "twice": ({"files": {"image": png()}, "data": {"prompt": "x", "size": ["32x24", "32x24"]}}, "size"),
    "damaged AVIF": ({"files": {"image": damaged_avif()}, "data": {"prompt": "x"}}, "image"),
}


@pytest.mark.parametrize("case", FORMS)
async def test_a_wrong_form_is_refused_and_named(app: Any, engine: ScriptedOmni, case: str) -> None:
    sent, parameter = FORMS[case]
    response = await post(app, "/v1/images/edits", **sent)
    assert (response.status_code, response.json()["error"]["param"]) == (400, parameter), response.text
    assert engine.calls == []


@pytest.mark.parametrize("name", ["image", "mask"])
async def test_a_file_that_needs_another_program_is_not_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, started = io.BytesIO(), list[Any]()
    Image.new("RGB", (8, 8)).save(file, "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **more: started.append(given))
    with pytest.raises(RequestError, match=f"^{name}: is not a picture that can be read") as caught:
        opened(name, file.getvalue())
    assert caught.value.parameter == name and started == []


async def test_uploaded_pictures_are_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (16, 8)).save(file, "JPEG", exif=exif)
    for name in ("image", "mask"):
        assert opened(name, file.getvalue()).size == (8, 16)


async def test_pictures_of_any_size_are_read_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "63")
    with pytest.raises(RequestError, match=r"^image: .* exceed the maximum of 63 pixels"):
        opened("image", png())
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "0")
    assert opened("image", png()).size == (8, 8)


async def test_an_adapter_is_refused_if_a_picture_may_need_the_text_stage(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = app.state.omni_serving_images
    monkeypatch.setitem(serving.models.lora_requests, "tune", SimpleNamespace(lora_name="tune"))
    engine.script, body = [PICTURE], {"model": "tune", "prompt": PROMPT}
    assert (await post(app, json=body)).status_code == 200, "no picture needs it"
    routes = {**engine.capabilities.routes, "think": frozenset({"thinker", "talker"})}
    monkeypatch.setattr(serving.model, "capabilities", replace(engine.capabilities, routes=routes))
    for answer in (
        await post(app, json=body),
        await post(app, "/v1/images/edits", data=body, files={"image": png()}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert "'tune' is an adapter" in error["message"]
    assert len(engine.calls) == 1


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize(
    "body", [{"talker": {"seed": 5}}, {"sampling_params_list": [{}, {"seed": 5}]}, {"seed": 5}, {}], ids=str
)
async def test_the_pictures_of_a_request_have_different_seeds(
    app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], configured: bool
) -> None:
    if configured:
        stages = tuple(replace(stage, params={**stage.params, "seed": 8}) for stage in engine.plan.stages)
        monkeypatch.setattr(engine, "plan", replace(engine.plan, stages=stages))
    engine.script = [PICTURE]
    assert (await post(app, json={"prompt": PROMPT, "n": 3, **body})).status_code == 200
    seeds = [getattr(call.options.params.get("talker"), "seed", None) for call in engine.calls]
    assert seeds == ([5, 6, 7] if body else [None, 9, 10] if configured else [None] * 3)


async def test_fields_of_the_official_clients_are_accepted(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [PICTURE]
    fields: dict[str, Any] = {"user": "u", "background": "auto", "quality": "auto", "output_format": "png"}
    more = {"safety_identifier": "s", "talker": {"seed": 1}, "sampling_params_list": []}
    await client.images.generate(model=MODEL, prompt=PROMPT, moderation="auto", extra_body=more, **fields)
    await client.images.edit(model=MODEL, prompt=PROMPT, image=png(), extra_body={"safety_identifier": "s"}, **fields)
    assert len(engine.calls) == 2


async def test_limits_of_a_form_name_the_part(app: Any, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    most = engine.plan.config.limits.max_body_values
    value = "[" + "[]," * (most // 4) + "[]]"  # half of the values
    for data, status, parameter in (({"steps": value}, 400, "steps"), ({"steps": value, "seed": value}, 413, "seed")):
        answer = await post(app, "/v1/images/edits", data={"prompt": "x", **data}, files={"image": png()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, parameter), answer.text
    small = OmniConfig(limits=Limits(max_request_pixels=100))
    monkeypatch.setattr(bodies, "pixel_budget", lambda _: media.pixel_budget(small))
    answer = await post(app, "/v1/images/edits", data={"prompt": "x"}, files={"image": png(11)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image"), answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("no", parameter="prompt"), 400), (StageUnavailable("gone"), 503)], ids=str
)
async def test_an_error_has_a_status_and_ends_a_stream(
    app: Any, engine: ScriptedOmni, error: Exception, status: int, stream: bool
) -> None:
    for refusal, script in ((error, []), (None, [error])):
        engine.refusal, engine.script = refusal, script
        response = await post(app, json={"prompt": PROMPT, "n": 2, "stream": stream})
        assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))
    engine.script = [PREVIEW, error]
    response = await post(app, json={"prompt": PROMPT, "stream": stream})
    if stream:
        *_, last, done = response.text.split("\n\n")[:-1]
        assert json.loads(last.partition("data: ")[2])["error"]["message"] == str(error)
        assert done == "data: [DONE]"
    else:
        assert response.status_code == status
    assert all(call.closed for call in engine.calls)


async def test_disconnect_ends_all_requests(app: Any, engine: ScriptedOmni) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPT, "n": 3, "stream": stream}
        await disconnect(app, engine, "/v1/images/generations", body, [PREVIEW])


# -- chat -------------------------------------------------------------------------------------------------------


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


async def test_a_chat_answers_with_a_picture_alone(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [PREVIEW, PICTURE]
    reply = await chat(client, modalities=["image"], seed=3, extra_body={"image": {"size": "32x24"}, "steps": 2})
    message = reply.choices[0].message
    assert message.content is None
    assert [(part["type"], part["seed"]) for part in message.images] == [("image_url", 7)]
    kind, pixels = decoded(message.images[0]["image_url"]["url"])
    assert kind == "PNG" and (pixels == PIXELS).all()
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens > 0 == reply.usage.completion_tokens
    assert reply.usage.completion_tokens_details.images == 1
    assert engine.calls[0].options.fields == {"size": "32x24", "seed": 3, "steps": 2}


async def test_a_chat_answers_with_text_and_a_picture(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = ["here ", "it is", PICTURE]
    body: dict[str, Any] = {"image": {"format": "jpeg", "compression": 80}, "image_in_content": True}
    reply = await chat(client, modalities=["text", "image"], extra_body=body)
    text, part = reply.choices[0].message.content
    assert text == {"type": "text", "text": "here it is"}
    assert part == reply.choices[0].message.images[0]
    assert part["image_url"]["url"].startswith("data:image/jpeg;base64,")


async def test_text_of_another_stage_is_the_answer(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    words = [TextChunk(text="a red ", tokens=2, last=False), TextChunk(text="barn", tokens=1)]
    engine.script = [*words, PICTURE]
    reply = await chat(client, modalities=["text", "image"])
    assert reply.choices[0].message.content == "a red barn"
    assert reply.usage.completion_tokens == 3
    received = [chunk async for chunk in await chat(client, modalities=["text", "image"], stream=True)]
    deltas = [chunk.choices[0].delta for chunk in received]
    assert "".join(delta.content or "" for delta in deltas) == "a red barn"
    assert [chunk.choices[0].finish_reason for chunk in received][-1] == "stop"
    engine.script = words
    assert (await chat(client)).choices[0].message.content == "a red barn"


async def test_a_chat_streams_progress_previews_and_pictures(client: openai.AsyncOpenAI, engine: ScriptedOmni) -> None:
    engine.script = [ProgressChunk(stage="talker", done=1, total=2), PREVIEW, PICTURE]
    usage = {"include_usage": True}
    received = [chunk async for chunk in await chat(client, modalities=["image"], stream=True, stream_options=usage)]
    said = [(chunk.modality, chunk.choices[0].delta) for chunk in received[:-1]]
    assert [name for name, _ in said if name != "text"] == ["progress", "image", "image"]
    progress = next(chunk.progress for chunk in received if chunk.modality == "progress")
    assert progress == {"stage": "talker", "done": 1, "total": 2}
    preview, picture = [delta.images[0] for name, delta in said if name == "image"]
    assert preview["partial"] and "partial" not in picture
    assert (decoded(picture["image_url"]["url"])[1] == PIXELS).all()
    assert [chunk.choices[0].finish_reason for chunk in received[:-1]][-1] == "stop"
    assert received[-1].usage.completion_tokens_details.images == 1


async def test_fields_that_only_a_text_can_follow_are_in_the_ticket(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, tickets = engine.expect, list[Ticket]()
    monkeypatch.setattr(engine, "expect", lambda ticket: tickets.append(ticket) or stock(ticket), raising=False)
    engine.script = [PICTURE]
    stops = {"stop": "!", "extra_body": {"return_token_ids": True}}
    await chat(client, modalities=["image"], logprobs=False, response_format={"type": "text"}, **stops)
    await chat(client, modalities=["text", "image"], response_format={"type": "json_object"}, **stops)
    fields = {"prompt_logprobs": 0, "structured_outputs": {"choice": ["a"]}}
    engine.script = [RequestError("refused", parameter="logprobs")]
    with pytest.raises(openai.BadRequestError):
        await chat(client, modalities=["image"], logprobs=True, extra_body=fields)
    assert [ticket.text_fields for ticket in tickets] == [
        (),
        ("response_format", "stop", "return_token_ids"),
        ("logprobs", "prompt_logprobs", "structured_outputs"),
    ]


CHAT_WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "modality": ({"modalities": ["audio"]}, "modalities", "text, image"),
    "format": ({"image": {"format": "gif"}}, "image.format", "png, jpeg, webp"),
    "compression": ({"image": {"compression": "low"}}, "image.compression", "0 to 100"),
    "type": ({"image": "png"}, "image", "format and compression"),
    "unknown": ({"image": {"colour": 1}}, "image.colour", "size, seed, steps"),
    "flag": ({"image_in_content": 1}, "image_in_content", "true or false"),
    "size": ({"size": "3x3"}, "size", "32x24"),
}


@pytest.mark.parametrize("case", CHAT_WRONG)
async def test_a_wrong_field_of_a_chat_is_refused_and_named(
    client: openai.AsyncOpenAI, engine: ScriptedOmni, case: str
) -> None:
    fields, parameter, said = CHAT_WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(client, extra_body={"modalities": ["image"], **fields})
    assert caught.value.param == parameter
    assert said in caught.value.body["message"]
    assert engine.calls == []
