"""Requests to a server of BAGEL, and the answers of the reference and of the model."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from examples.server import Server
from tests.families.serving import chat, client, pixels
from tests.support.bagel_generate import generate_image
from tests.support.bagel_runs import Golden, golden
from tests.support.cluster import MODEL
from tests.support.oracle import one_thread
from vllm_omni_ext.model_plugins.bagel.model import Bagel
from vllm_omni_ext.model_plugins.bagel.parameters import image_parameters

FLAGS = ["--served-model-name", MODEL, "--max-model-len", "1024"]
CASES = ("t2i_fp32", "t2i_nocfg_fp32", "edit_fp32")
REPLIES = ("chat_fp32", "understand_fp32")
OFF = 1e-3
"""Share of bytes that may differ by 1: sums in another order round differently."""


def text_of(run: Golden) -> str:
    """The text of a run's prompt."""
    [text] = [part for part in run.parts if isinstance(part, str)]
    return text


def picture_of(run: Golden) -> Image.Image | None:
    """The picture of a run's prompt."""
    return next((part for part in run.parts if not isinstance(part, str)), None)


def fields_of(run: Golden) -> dict[str, Any]:
    """The fields of a request for the same picture. An edit has the size of its picture."""
    given = {**run.info["kwargs"], "seed": run.info["seed"]}
    height, width = given.pop("image_shapes")
    return given if picture_of(run) else {**given, "height": height, "width": width}


def png(picture: Image.Image) -> bytes:
    """The picture's file."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def image_part(picture: Image.Image) -> dict[str, Any]:
    """A part of a message."""
    url = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def messages(parts: Any) -> list[dict[str, Any]]:
    """A conversation of one turn with texts and pictures in their order."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in parts]
    return [{"role": "user", "content": content}]


def chat_body(parts: Any, *modalities: str, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": MODEL, "messages": messages(parts), "modalities": list(modalities), "temperature": 0, **fields}


def made(server: Server, prompt: str, **fields: Any) -> np.ndarray:
    """A picture through `/v1/images/generations`, with OpenAI's client."""
    answer = client(server).images.generate(model=MODEL, prompt=prompt, extra_body=fields)
    return pixels(answer.data[0].b64_json)  # type: ignore[index, arg-type]


def edited(server: Server, prompt: str, picture: Image.Image, **fields: Any) -> np.ndarray:
    """A picture through `/v1/images/edits`, with OpenAI's client."""
    file = ("picture.png", png(picture), "image/png")
    answer = client(server).images.edit(model=MODEL, prompt=prompt, image=file, extra_body=fields)
    return pixels(answer.data[0].b64_json)  # type: ignore[index, arg-type]


def ask_for(server: Server, name: str) -> np.ndarray:
    """The picture of a run of the reference's, through the API of pictures."""
    run = golden(name)
    fields, picture = fields_of(run), picture_of(run)
    if picture is None:
        return made(server, text_of(run), **fields)
    return edited(server, text_of(run), picture, **fields)


def reply(server: Server, name: str) -> list[int]:
    """The tokens of a text answer to the prompt of a run; greedy is the default."""
    body = chat_body(golden(name).parts, "text", max_completion_tokens=23, return_token_ids=True)
    del body["temperature"]
    tokens: list[int] = chat(server, body)["choices"][0]["token_ids"]
    return tokens


def expected_reply(name: str) -> list[int]:
    """The reference's tokens."""
    tokens: list[int] = golden(name).info["generated_ids"][0][1:]
    return tokens


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Pictures are equal up to rounding."""
    assert found.shape == expected.shape
    off = np.abs(found.astype(int) - expected.astype(int))
    assert off.max() <= 1
    assert (off > 0).mean() <= OFF


def assert_golden(found: np.ndarray, name: str) -> None:
    """It is the reference's picture."""
    assert_same(found, golden(name).tensors["image_u8"].numpy())


def alone(model: Bagel, parts: Any, **given: Any) -> tuple[np.ndarray, str | None]:
    """The picture and the thought of the model in this process."""
    parameters = image_parameters(given, edit=any(not isinstance(part, str) for part in parts))
    with one_thread():
        found = generate_image(model, parts, parameters)
    return found.image.image.numpy(), found.think_text
