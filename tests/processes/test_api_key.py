"""A server with an API key: clients with the key are answered, and others are refused."""

from __future__ import annotations

import base64
import json
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
from tests.support import media
from tests.support.cluster import until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("new_processes")]

MODEL = "tiny"
KEY = "a-secret-of-this-test"
QUESTION: list[Any] = [{"role": "user", "content": "Tell me about the moon"}]


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("api_key") / "server.log"
    flags = ["--served-model-name", MODEL, "--max-model-len", "1024", "--api-key", KEY]
    flags += ["--omni-batch-dir", str(log.parent / "batches")]
    with Server(tiny, log, flags) as running:
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


END_S = 120.0
PLAIN = {"temperature": 0, "max_completion_tokens": 4}
SHORT = {**PLAIN, "talker": {"max_tokens": 4}}
CHAT, SPEECH, TRANSCRIPTION = "/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (CHAT, {"messages": QUESTION, "modalities": ["text"], **PLAIN}),
    "sound": (CHAT, {"messages": QUESTION, "modalities": ["text", "audio"], **SHORT}),
    "speech": (
        SPEECH,
        {"input": "hi", "voice": "ethan", "max_new_tokens": 4, "talker": {"temperature": 0, "min_tokens": 4}},
    ),
    "words": (TRANSCRIPTION, {"file_url": media.audio_url(media.audio(0.5, seed=1)), "max_completion_tokens": 4}),
    "wrong": (CHAT, {"messages": []}),
}


def lines_of(*names: str) -> bytes:
    """The input of a batch."""
    given = ((name, *LINES[name]) for name in names)
    lines = [{"custom_id": n, "method": "POST", "url": url, "body": {"model": MODEL, **body}} for n, url, body in given]
    return "\n".join(map(json.dumps, lines)).encode()


def run_batch(client: openai.OpenAI, endpoint: Any, *names: str) -> dict[str, Any]:
    """Run a batch to its end, and return its lines of output by id."""
    file = client.files.create(file=("lines.jsonl", lines_of(*names)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")

    def completed() -> bool:
        return client.batches.retrieve(batch.id).status == "completed"

    assert until(completed, END_S)
    ended = client.batches.retrieve(batch.id)
    contents = [client.files.content(name).text for name in (ended.output_file_id, ended.error_file_id) if name]
    return {line["custom_id"]: line for text in contents for line in map(json.loads, text.splitlines())}


def test_batches_of_text_sound_and_transcriptions_have_the_answers_of_requests(server: Server, tmp_path: Path) -> None:
    """By the routes, and by the command in one file."""
    client = openai.OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0)
    found = run_batch(client, CHAT, "text", "sound", "wrong")
    found |= run_batch(client, SPEECH, "speech") | run_batch(client, TRANSCRIPTION, "words")
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    live = client.post("/chat/completions", body={"model": MODEL, **LINES["sound"][1]}, cast_to=dict)
    text, sound = (bodies[name]["choices"][0]["message"] for name in ("text", "sound"))
    assert text["content"] == sound["content"] == live["choices"][0]["message"]["content"]
    assert base64.b64decode(sound["audio"]["data"])[:4] == b"RIFF"
    assert base64.b64decode(bodies["speech"]["data"])[:4] == b"RIFF" and bodies["speech"]["content_type"] == "audio/wav"
    assert isinstance(bodies["words"]["text"], str)
    assert found["wrong"]["error"] and found["wrong"]["response"]["status_code"] == 400

    source, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    source.write_bytes(lines_of(*LINES))
    command = [
        sys.executable,
        "-m",
        "vllm_omni_ext",
        "run-batch",
        "-i",
        source,
        "-o",
        answers,
        "--url",
        server.base_url,
    ]
    environment = {**os.environ, "OPENAI_API_KEY": KEY}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and "1 lines have an error" in ran.stderr, ran.stderr
    written = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    assert {name: line["error"] for name, line in written.items()} == {n: line["error"] for n, line in found.items()}
    sounds = [each["speech"]["response"]["body"]["data"] for each in (written, found)]
    assert len(sounds[0]) == len(sounds[1])
    whole = answers.read_bytes()
    answers.write_bytes(whole[:-1])  # as of a command that was killed
    assert subprocess.run(command, env=environment, capture_output=True).returncode in (0, 1)
    again = answers.read_bytes()
    assert again.startswith(whole[: whole.rfind(b"\n", 0, -1) + 1])
    assert sorted(json.loads(line)["custom_id"] for line in again.splitlines()) == sorted(LINES)


BENCH = """bench serve --num-prompts 2 --backend openai-chat --endpoint /v1/chat/completions --dataset-name random
--random-input-len 8 --random-output-len 4"""
COMMANDS = {
    "bench": ["-m", "vllm_omni_ext", *BENCH.split(), "--model", MODEL],
    "speech": ["examples/speech.py", "hello"],
}


@pytest.mark.parametrize("name", [pytest.param("bench", marks=pytest.mark.extended), "speech"])
def test_commands_send_the_key_of_their_environment(server: Server, tiny: Path, tmp_path: Path, name: str) -> None:
    more = ["--port", str(server.port), "--tokenizer", str(tiny)]
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
