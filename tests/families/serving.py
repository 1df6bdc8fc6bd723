"""Servers of the families, and requests of their clients."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAI
from PIL import Image

from examples.server import Server
from tests.support.cluster import ANSWER_S, MODEL, all_up, asked_again, idle, until, wait_busy

FLAGS = ["--served-model-name", MODEL, "--max-model-len", "1024"]


@contextmanager
def served(checkpoint: Path, log: Path, replicas: int, *flags: str) -> Iterator[Server]:
    """A server of a checkpoint with so many replicas in all, each of them up."""
    with Server(checkpoint, log, [*FLAGS, *flags]) as server:
        assert until(lambda: all_up(server, replicas)), server.tail()
        yield server


def client(server: Server) -> OpenAI:
    """OpenAI's own client."""
    return OpenAI(base_url=server.base_url, api_key="none", timeout=ANSWER_S, max_retries=0)


def pixels(encoded: str) -> np.ndarray:
    """A picture in base64, or a data URL of one, as uint8 [height, width, 3]."""
    with Image.open(io.BytesIO(base64.b64decode(encoded.split(",")[-1]))) as picture:
        return np.asarray(picture.convert("RGB"))


def chat_body(text: str, *modalities: str, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "modalities": list(modalities),
        "temperature": 0,
        **fields,
    }


def chat(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat request; AssertionError with the error if it is one."""
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text[:500]
    said: dict[str, Any] = answer.json()
    return said


def picture(answer: dict[str, Any]) -> np.ndarray:
    """The one picture of a chat's answer."""
    (image,) = answer["choices"][0]["message"]["images"]
    return pixels(image["image_url"]["url"])


def events(server: Server, path: str, body: dict[str, Any], leave_after: int | None = None) -> list[dict[str, Any]]:
    """The events of a streamed answer; the client leaves after so many of them."""
    found: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.base_url}/{path}", json=body, timeout=ANSWER_S) as answer:
        assert answer.status_code == 200, answer.read()[:500]
        if leave_after == 0:
            return found
        for line in answer.iter_lines():
            if line.startswith("data:") and line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data:")))
                if len(found) == leave_after:
                    break
    return found


def during(server: Server, stage: str, ask: Callable[[], Any], harm: Callable[[str], None]) -> Any:
    """The answer to a request whose replica is disturbed in the middle of it.

    A request that ended before its replica was found is sent again.
    """
    with asked_again(ask) as asked:
        harm(wait_busy(server, stage, asked))
    return asked.result()[-1]


def settled(server: Server) -> bool:
    """Whether nothing is held any more, in engines and in API servers."""
    return until(lambda: idle(server))
