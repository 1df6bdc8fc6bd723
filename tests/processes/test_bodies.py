"""Bodies of any shape against a served model: memory and time of the API server, and pauses of other requests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from examples.server import Server
from tests.support import media
from tests.support.cluster import MODEL
from tests.support.pace import pace, waited

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
MB = 1_000_000
SIZES = [0.3, 4, 40]
GROWTH_MB, ANSWER_S, GAP_S = 300, 2.0, 1.0
STREAMS = 4
NAME = f'"model": "{MODEL}", "max_tokens": 1'
SAID = f'{{{NAME}, "messages": [{{"role": "user", "content": "hello"}}]'


@dataclass
class Gaps:
    """The longest time between two lines of a stream.

    Attributes:
        since: time from which gaps count. Before it this process makes the body, and its threads read nothing.
        waited: seconds in which a process of the server was ready and had no core, the longest of all processes.
    """

    since: float = 0.0
    longest: float = 0.0
    waited: float = 0.0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)


class Api:
    """The API server's process, and four chats with it that never end."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.base_url.removesuffix("/v1"), timeout=60)
        (process,) = self.http.get("/v1/omni/status").json()["api_servers"]
        self._files = Path(f"/proc/{process['pid']}")
        self._processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        self._gaps = Gaps()
        self._stop = threading.Event()
        self._chats = [threading.Thread(target=self._chat, args=(number,)) for number in range(STREAMS)]
        for chat in self._chats:
            chat.start()

    def close(self) -> None:
        self._stop.set()
        for chat in self._chats:
            chat.join()
        self.http.close()

    def _chat(self, number: int) -> None:
        message = {"role": "user", "content": f"hello {number}"}
        body = {"model": MODEL, "messages": [message], "modalities": ["text"], "stream": True, "ignore_eos": True}
        while not self._stop.is_set():
            with self.http.stream("POST", CHAT, json=body | {"max_completion_tokens": 1500}) as answer:
                if answer.status_code != 200:
                    self._gaps.failed.append(answer.read().decode())
                    return
                last = None
                for _ in answer.iter_lines():
                    now = time.monotonic()
                    self._gaps.longest = max(self._gaps.longest, now - max(last or now, self._gaps.since))
                    self._gaps.tokens += 1
                    last = now
                    if self._stop.is_set():
                        break

    def kib(self, name: str) -> int:
        return int(self._files.joinpath("status").read_text().partition(f"{name}:")[2].split()[0])

    def cost(self, path: str, body: bytes) -> tuple[httpx.Response, float, float, Gaps]:
        """The answer, its time in seconds, the growth of memory in MB, and the gaps of the chats."""
        self._files.joinpath("clear_refs").write_text("5")  # the high-water mark of its memory is its memory now
        before = self.kib("VmRSS")
        began, waits = time.monotonic(), waited(self._processes, all_threads=True)
        self._gaps.since, self._gaps.longest, self._gaps.tokens = began, 0.0, 0
        answer = self.http.post(path, content=body, headers={"content-type": "application/json"})
        took = time.monotonic() - began
        deadline = time.monotonic() + 30
        while self._gaps.tokens < 4 * STREAMS:  # a gap is measured at its end
            assert time.monotonic() < deadline and not self._gaps.failed, self._gaps
            time.sleep(0.01)
        now = waited(self._processes, all_threads=True)
        self._gaps.waited = max(after - before for before, after in zip(waits, now, strict=True))
        return answer, took, (self.kib("VmHWM") - before) * 1024 / MB, self._gaps


@pytest.fixture(scope="module")
def api(plain_server: Server) -> Iterator[Api]:
    made = Api(plain_server)
    yield made
    made.close()


def filled(before: str, item: str, after: str, size: float) -> bytes:
    """A body of `size` MB."""
    count = int((size * MB - len(before) - len(after)) / (len(item) + 1))
    return f"{before}{','.join(itertools.repeat(item, count))}{after}".encode()


SHAPES: dict[str, tuple[str, str, str, str, str]] = {
    "messages": (CHAT, f'{{{NAME}, "messages": [', "{}", "]}", "messages"),
    "good messages": (CHAT, f'{{{NAME}, "messages": [', '{"role":"user","content":"a"}', "]}", "messages"),
    "parts": (CHAT, f'{{{NAME}, "messages": [{{"role": "user", "content": [', "{}", "]}]}", "messages"),
    "good parts": (
        CHAT,
        f'{{{NAME}, "messages": [{{"role": "user", "content": [',
        '{"type":"text","text":"a"}',
        "]}]}",
        "messages",
    ),
    "tools": (CHAT, f'{SAID}, "tools": [', "{}", "]}", "tools"),
    "stop": (CHAT, f'{SAID}, "stop": [', '"a"', "]}", "stop"),
    "talker": (CHAT, f'{SAID}, "talker": {{"top_k": [', "1", "]}}", "talker"),
    "arrays": (CHAT, f'{SAID}, "x": [', "[[[]]]", "]}", "x"),
    "metadata": (CHAT, f'{SAID}, "metadata": [', '{"a":{"b":1}}', "]}", "metadata"),
    "text": (CHAT, f'{{{NAME}, "messages": [{{"role": "user", "content": "', "a", '\\ud83c\\udf89"}]}', "messages"),
    "prompts": ("/v1/completions", f'{{{NAME}, "prompt": [', "[1]", "]}", "prompt"),
    "ids": ("/v1/completions", f'{{{NAME}, "prompt": [', "1.5", "]}", "prompt"),
    "input": ("/v1/responses", f'{{"model": "{MODEL}", "input": [', "{}", "]}", "input"),
    "good input": (
        "/v1/responses",
        f'{{"model": "{MODEL}", "input": [',
        '{"role":"user","content":"a"}',
        "]}",
        "input",
    ),
    "claude": ("/v1/messages", f'{{{NAME}, "messages": [', "{}", "]}", "messages"),
    "batch": ("/v1/chat/completions/batch", f'{{{NAME}, "messages": [', "[{}]", "]}", "messages"),
    "tokenize": ("/tokenize", f'{{"model": "{MODEL}", "messages": [', "{}", "]}", "messages"),
    "detokenize": ("/detokenize", f'{{"model": "{MODEL}", "tokens": [', '"a"', "]}", "tokens"),
    "invocations": ("/invocations", f'{{{NAME}, "messages": [', "{}", "]}", "messages"),
    "speech": ("/v1/audio/speech", f'{{"model": "{MODEL}", "input": "a", "talker": {{"x": [', "1", "]}}", "talker"),
}
UNNAMED = {"messages": "context length", "input": "context length", "prompt": "prompt"}
"""Words of the error if it does not name the field: a prompt that is too long."""


WITHIN_LIMITS = {("arrays", 0.3), ("metadata", 0.3)}
"""Bodies with values in fields that vLLM does not read, and with fewer of them than the limit."""

LARGE = ("messages", "text", "ids", "speech")
"""Shapes of which `make test` sends the largest size too."""


def sizes() -> Iterator[Any]:
    for shape in SHAPES:
        for size in SIZES:
            usual = size == 4 or (size == 40 and shape in LARGE)
            yield pytest.param(shape, size, marks=() if usual else pytest.mark.extended)


@pytest.mark.parametrize(("shape", "size"), sizes())
def test_a_refused_body_costs_little_memory_and_time(api: Api, shape: str, size: float) -> None:
    path, before, item, after, parameter = SHAPES[shape]
    answer, took, grown, gaps = api.cost(path, filled(before, item, after, size))
    fits = (shape, size) in WITHIN_LIMITS
    error: dict[str, Any] = {"message": "", "param": parameter} if fits else answer.json()["error"]
    pauses = f"gap {gaps.longest:.2f} s, waited {gaps.waited:.2f} s"
    figures = f"{took:.2f} s, {grown:.0f} MB, {pauses}: {answer.status_code} {error}"
    print(f"{shape} of {size} MB: {figures}")
    assert answer.status_code in ((200,) if fits else (400, 413)), figures
    named = str(error.get("param") or "") + error["message"]
    assert parameter in named or UNNAMED.get(parameter, parameter) in named, figures
    assert len(answer.content) < 4096, figures
    slower = pace()
    short = took < ANSWER_S * slower + gaps.waited, gaps.longest < GAP_S * slower + gaps.waited
    assert (*short, grown < GROWTH_MB) == (True, True, True), figures


def test_large_valid_bodies_reach_the_model(api: Api) -> None:
    """Each has an answer of the model, or of a check of the content behind the limits."""
    noise = np.random.default_rng(0).integers(0, 256, (1500, 4500, 3), np.uint8)
    url = media.image_url(Image.fromarray(noise))
    assert len(url) > 20 * MB
    prompt = ",".join(str(number % 100) for number in range(100_000))
    image = f'{{"type": "image_url", "image_url": {{"url": "{url}"}}}}'
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"enum": [%s]}}}'
    for path, body, status, said in (
        ("/v1/completions", f'{{{NAME}, "prompt": [{prompt}]}}', 400, "100000 input tokens"),
        (CHAT, f'{{{NAME}, "messages": [{{"role": "user", "content": [{image}]}}]}}', 400, "context length"),
        (CHAT, f'{SAID}, "tool_choice": "none", "tools": [{tool % ",".join("1" * 50_000)}]}}', 200, "choices"),
        (CHAT, f'{{{NAME}, "messages": [{{"role": "user", "content": "{"a " * 4 * MB}"}}]}}', 400, "context length"),
    ):
        answer = api.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status and said in answer.text, (path, body[:200], answer.text[:500])


@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= "a" b\nb ::= b "c"'])
def test_grammars_without_a_text_are_refused(api: Api, grammar: str) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "structured_outputs": {"grammar": grammar}}
    for path, fields in (
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "modalities": ["text"]}),
        ("/v1/completions", {"prompt": "hello"}),
    ):
        answer = api.http.post(path, json=asked | fields)
        assert answer.status_code == 400, answer.text
        assert "structured_outputs.grammar" in answer.json()["error"]["message"]
    fine = {"structured_outputs": {"grammar": 'root ::= root "a" | "b"'}}
    answer = api.http.post("/v1/completions", json=asked | fine | {"prompt": "hello"})
    assert answer.json()["choices"][0]["text"].startswith("b")
