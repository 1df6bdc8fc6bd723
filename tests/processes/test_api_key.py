"""A server with an API key: clients with the key are answered, and others are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from examples.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("new_processes")]

MODEL = "tiny"
KEY = "a-secret-of-this-test"
QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the moon"}]


@pytest.fixture(scope="module")
def server(real_vocab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("api_key") / "server.log"
    flags = ["--served-model-name", MODEL, "--max-model-len", "1024", "--api-key", KEY]
    with Server(real_vocab, log, flags) as running:
        yield running


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).rstrip("\0 ")


def test_no_process_title_and_no_log_shows_the_key(server: Server) -> None:
    titles = [title(each) for each in server.processes()]
    assert not [each for each in titles if KEY in each]
    for name in ("head ", "api-server/0", "coordinator", "thinker/0", "talker/0", "code2wav/0"):
        assert sum(each.startswith(f"vllm-omni {name}") for each in titles) >= 1, (name, titles)
    assert "--api-key ***" in next(each for each in titles if each.startswith("vllm-omni head"))
    assert KEY not in server.log.read_text()


def test_requests_without_the_key_are_refused_but_probes_and_metrics(server: Server) -> None:
    chat = {"model": MODEL, "messages": QUESTION}
    with httpx.Client(base_url=server.base_url.removesuffix("/v1")) as stranger:
        for path in ("/health", "/ping", "/metrics"):
            assert stranger.get(path).status_code == 200, path
        for path in ("/invocations", "/v1/chat/completions", "/tokenize", "/detokenize", "/generative_scoring"):
            assert stranger.post(path, json=chat).status_code == 401, path
        for path in ("/load", "/version", "/docs", "/openapi.json", "/v1/omni/status", "/v1/audio/voices", "//load"):
            assert stranger.get(path).status_code == 401, path


def test_the_official_client_is_answered_with_the_key(server: Server) -> None:
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
def test_commands_send_the_key_of_their_environment(
    server: Server, real_vocab: Path, tmp_path: Path, name: str
) -> None:
    more = ["--port", str(server.port), "--tokenizer", str(real_vocab)]
    if name == "speech":
        more = ["--url", server.base_url, "--file", str(tmp_path / "speech.wav")]
    ran = subprocess.run(
        [sys.executable, *COMMANDS[name], *more],
        env={**os.environ, "OPENAI_API_KEY": KEY, "VLLM_API_KEY": KEY},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "Failed requests:                         0" in ran.stdout or name == "speech"
