"""A server with an API key, as strangers and as its own users see it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from examples.server import Server
from tests.support.pace import waited

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("new_processes")]

MODEL = "tiny"
KEY = "a-secret-of-this-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the moon"}]
REPOSITORY = Path(__file__).parents[2]

STREAMS = 4
LONGEST_GAP_S = 1.0
ANSWER_S = 2.0
GROWTH = 300 << 20


@pytest.fixture(scope="module")
def server(real_vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("doors") / "server.log"
    flags = ["--served-model-name", MODEL, "--max-model-len", "32768", "--api-key", KEY]
    with Server(real_vocab, log, flags) as running:
        yield running


@pytest.fixture(scope="module")
def address(server: Server) -> str:
    return server.base_url.removesuffix("/v1")


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).rstrip("\0 ")


def api_server(server: Server) -> psutil.Process:
    """The first API server."""
    return next(each for each in server.processes() if title(each).startswith("vllm-omni api-server/0"))


def test_no_process_shows_the_key(server: Server) -> None:
    titles = [title(each) for each in server.processes()]
    assert not [each for each in titles if KEY in each]
    for name in ("head ", "api-server/0", "coordinator", "thinker/0", "talker/0", "code2wav/0"):
        assert sum(each.startswith(f"vllm-omni {name}") for each in titles) >= 1, (name, titles)
    assert "--api-key ***" in next(each for each in titles if each.startswith("vllm-omni head"))
    assert KEY not in server.log.read_text()


def test_doors_without_the_key(address: str) -> None:
    chat = {"model": MODEL, "messages": QUESTION}
    with httpx.Client(base_url=address) as stranger:
        for path in ("/health", "/ping", "/metrics"):
            assert stranger.get(path).status_code == 200, path
        for path in ("/invocations", "/v1/chat/completions", "/tokenize", "/detokenize", "/generative_scoring"):
            assert stranger.post(path, json=chat).status_code == 401, path
        for path in ("/load", "/version", "/docs", "/openapi.json", "/v1/omni/status", "/v1/audio/voices", "//load"):
            assert stranger.get(path).status_code == 401, path


def test_the_official_client(server: Server) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0)
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=4, extra_body={"talker": {"max_tokens": 4}}
    )
    assert reply.choices[0].message.audio is not None
    spoken = client.audio.speech.create(model=MODEL, voice="ethan", input="hi", extra_body={"max_new_tokens": 4})
    assert spoken.content[:4] == b"RIFF"
    with pytest.raises(openai.AuthenticationError, match="needs its API key"):
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0).models.list()


BENCH = """bench serve --num-prompts 2 --backend openai-chat --endpoint /v1/chat/completions --dataset-name random
--random-input-len 8 --random-output-len 4"""
COMMANDS = {
    "bench": ["-m", "vllm_omni_ext", *BENCH.split(), "--model", MODEL],
    "speech": ["examples/speech.py", "hello"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_with_the_key(server: Server, real_vocab: Path, tmp_path: Path, name: str) -> None:
    more = ["--port", str(server.port), "--tokenizer", str(real_vocab)]
    if name == "speech":
        more = ["--url", server.base_url, "--file", str(tmp_path / "speech.wav")]
    environ = {**os.environ, "OPENAI_API_KEY": KEY, "VLLM_API_KEY": KEY}
    ran = subprocess.run(
        [sys.executable, *COMMANDS[name], *more], env=environ, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "Failed requests:                         0" in ran.stdout or name == "speech"


class Streams:
    """Answers that are written while something else happens, and the longest pause in any of them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._going = threading.Barrier(STREAMS + 1)
        self._threads = [threading.Thread(target=self._read) for _ in range(STREAMS)]
        self.gaps: list[tuple[float, float]] = []
        """When each pause ended, and how long it was."""

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        self._going.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        body = {"model": MODEL, "messages": QUESTION, "modalities": ["text"], "stream": True, "ignore_eos": True}
        body |= {"max_completion_tokens": 30_000}
        path = f"{self._address}/v1/chat/completions"
        with httpx.stream("POST", path, json=body, headers=HEADERS, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            self._going.wait(60)
            last = time.monotonic()
            for _ in lines:
                now = time.monotonic()
                self.gaps.append((now, now - last))
                last = now
                if self._stop.is_set():
                    return

    def longest(self, since: float) -> float:
        """The longest pause that ended after `since`."""
        return max((gap for ended, gap in self.gaps if ended > since), default=0.0)


def peak(process: psutil.Process) -> int:
    """Most bytes of memory that a process had since `forget_peak`."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def forget_peak(process: psutil.Process) -> int:
    """Begin to look for the peak; the bytes of memory now."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return peak(process)


def chat(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


ENDPOINTS = {
    "chat": ("/v1/chat/completions", chat, "messages"),
    "completions": ("/v1/completions", lambda text: {"model": MODEL, "prompt": text}, "prompt"),
    "tokenize": ("/tokenize", lambda text: {"model": MODEL, "prompt": text}, "prompt"),
    "speech": ("/v1/audio/speech", lambda text: {"model": MODEL, "input": text}, "input"),
}


def test_long_texts_while_others_are_answered(server: Server, address: str) -> None:
    """What other programs on the machine take is not counted: a pause is the server's if it could have run."""
    asked = api_server(server)
    thinker = next(each for each in server.processes() if title(each).startswith("vllm-omni thinker/0"))
    running = [asked, thinker, psutil.Process()]
    with Streams(address) as streams, httpx.Client(base_url=address, headers=HEADERS, timeout=60) as client:
        for megabytes, (name, (path, body, field)) in itertools.product((0.3, 4, 40), ENDPOINTS.items()):
            sent = json.dumps(body("a word or two " * round(megabytes * 1e6 / 14))).encode()
            before, waits, since = forget_peak(asked), sum(waited(running)), time.monotonic()
            answer = client.post(path, content=sent, headers={"content-type": "application/json"})
            took, grown = time.monotonic() - since, peak(asked) - before
            pause, waits = streams.longest(since), sum(waited(running)) - waits
            print(
                f"{name} {megabytes} MB: {answer.status_code} in {took:.2f} s, +{grown >> 20} MiB, longest pause "
                f"{pause:.2f} s, waited for a core {waits:.2f} s"
            )
            said = answer.json()["error"]
            assert (said["code"], said["param"]) == (400, field), said
            assert took < ANSWER_S + waits, (name, megabytes)
            assert pause < LONGEST_GAP_S + waits, (name, megabytes)
            assert grown < GROWTH, (name, megabytes)
    assert len(streams.gaps) > STREAMS
    assert server.healthy()
