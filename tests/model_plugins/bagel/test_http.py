"""Bodies of `/v1/images/*` and of chats."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.bagel_runs import picture
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.memory import picture_tokens
from vllm_omni_ext.model_plugins.bagel.requests.http import BagelHttp
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DitParams
from vllm_omni_ext.model_plugins.bagel.requests.thought import THOUGHT, ThoughtChunk
from vllm_omni_ext.model_plugins.bagel.sizes import RELEASED
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.serving.images import ImageRequest


class Server:
    """Makes a token of each character, and returns the parts unchanged."""

    capabilities: Any = None
    runtime: Any = SimpleNamespace(parts=lambda pictures, ids: [*pictures, ids], sizes=RELEASED)
    max_media_tokens: int | None = None

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        assert not special
        return list(text.encode())


def read(
    prompt: str = "blue",
    pictures: Any = (),
    mask: Any = None,
    max_media_tokens: int | None = None,
    previews: int | None = None,
    **fields: Any,
) -> tuple[Rendered, RequestOptions]:
    body = ImageRequest(prompt=prompt, **fields)
    body.images, body.mask = list(pictures), mask
    server: Any = Server()
    server.max_media_tokens = max_media_tokens
    given = RequestOptions(modalities=("image",), fields={} if previews is None else {"previews": previews})
    return asyncio.run(BagelHttp().image(body, given, server))


def chat(*modalities: str, stream: bool = False, dit: DitParams | None = None, **fields: Any) -> tuple[str, ...]:
    given = RequestOptions(modalities=modalities, fields=fields, params={} if dit is None else {"dit": dit})
    body, server = SimpleNamespace(stream=stream), None
    return asyncio.run(BagelHttp().chat_options(given, body, server)).modalities  # type: ignore[arg-type]


def test_pictures_come_before_the_prompt_and_tokens_are_counted() -> None:
    shown = picture(16, 16, 0)
    rendered, options = read(pictures=[shown], size="64x64", seed=3, partial_images=2, stream=True)
    assert rendered.data == [shown, list(b"blue")]
    assert rendered.input_tokens == 4 + picture_tokens(RELEASED, 16, 16, latents=False)
    assert read()[0].input_tokens == 4
    assert options.fields == {"size": "64x64", "seed": 3, "previews": 2}


def test_a_picture_of_too_many_tokens_is_refused() -> None:
    large, small = picture(1024, 1024, 0), picture(512, 512, 0)
    tokens = picture_tokens(RELEASED, 1024, 1024, latents=False)
    read(pictures=[large], max_media_tokens=tokens)
    with pytest.raises(
        RequestError, match=f"image: a picture has {tokens:,} tokens, but limits.max_media_tokens is"
    ) as caught:
        read(pictures=[small, large], max_media_tokens=tokens - 1)
    assert caught.value.parameter == "image"


def test_default_fields_of_clients_are_accepted() -> None:
    read(quality="auto", background="auto", moderation="auto", response_format="b64_json", user="me")


UNAVAILABLE = {"quality": "hd", "background": "transparent", "moderation": "strict", "style": "vivid"}


@pytest.mark.parametrize(("name", "value"), [*UNAVAILABLE.items(), ("prompt", " "), ("mask", object())])
def test_an_unavailable_field_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(**{name: value})
    assert caught.value.parameter == name


def test_the_modalities_of_a_chat_with_a_thought() -> None:
    assert chat("image", think=True) == ("image", "thought")
    assert chat("image", dit=DitParams(think=True)) == ("image", "thought")
    assert chat("image", think=False, dit=DitParams(think=True)) == ("image",)
    assert chat("text", "image", think=True) == ("text", "image")
    assert chat("text") == ("text",)


@pytest.mark.parametrize(("name", "value"), [("return_latents", True), ("previews", 1)])
def test_latents_and_previews_are_refused_in_a_chat_that_is_not_streamed(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        chat("image", **{name: value})
    assert caught.value.parameter == name
    chat("image", stream=True, previews=1)


def test_previews_of_a_picture_need_a_stream_and_one_number() -> None:
    for fields, message in (
        ({"previews": 2}, "previews: needs stream: true"),
        ({"previews": 2, "partial_images": 1, "stream": True}, "previews: has another value than 'partial_images'"),
    ):
        with pytest.raises(RequestError, match=f"^{message}") as caught:
            read(**fields)
        assert caught.value.parameter == "previews"
    for fields in ({"previews": 2}, {"partial_images": 2}, {"previews": 2, "partial_images": 2}):
        assert read(stream=True, **fields)[1].fields == {"previews": 2}
    assert read(previews=0)[1].fields == {"previews": 0}


def test_a_thought_is_the_reasoning_of_an_answer() -> None:
    chunks = [ThoughtChunk(text="a plan", tokens=3)]
    whole = asyncio.run(THOUGHT.assemble(chunks, None, ""))
    assert (whole.message, whole.usage) == ({"reasoning": "a plan"}, {"reasoning_tokens": 3})
    assert asyncio.run(THOUGHT.assemble([], None, "")).message == {}
    stream = THOUGHT.stream(None)
    [choice] = asyncio.run(stream.chunk(chunks[0]))
    assert choice["delta"] == {"reasoning": "a plan"}
    assert stream.usage() == {"reasoning_tokens": 3}
    assert THOUGHT.offline(chunks) == {"think_text": "a plan"}
    assert THOUGHT.offline([]) == {"think_text": None}
