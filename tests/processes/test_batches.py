"""A batch on real engines through the end of the API server that runs it, beside live requests, and by the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from examples.server import Server
from tests.support.cluster import LENGTH, MODEL, until

pytestmark = [pytest.mark.engine, pytest.mark.extended]

CHAT: Any = "/v1/chat/completions"
SHORT = {"max_completion_tokens": 24, "temperature": 0, "ignore_eos": True, "talker": {"max_tokens": 24}}
LINES = 40
END_S = 150.0


def lines(count: int) -> bytes:
    """The input of a batch of chats with text and sound."""
    bodies = [{"model": MODEL, "messages": [{"role": "user", "content": f"say {n}"}], **SHORT} for n in range(count)]
    given = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(bodies)]
    return "".join(f"{json.dumps(each)}\n" for each in given).encode()


def texts(output: str) -> dict[str, str]:
    """Texts of a batch's answers, by id; each line is there once."""
    found = [json.loads(line) for line in output.splitlines()]
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"] for line in found}
    assert len(answers) == len(found) and all(answer["audio"]["data"] for answer in answers.values())
    return {name: answer["content"] for name, answer in answers.items()}


def leader(server: Server, folder: Path) -> psutil.Process:
    """The API server that has the folder's lock, by the named pipe that it reads."""
    pipe = (folder / "wake").stat()
    for process in server.processes():
        for link in Path(f"/proc/{process.pid}/fd").glob("*"):
            found = link.stat() if link.exists() else None
            if found is not None and (found.st_dev, found.st_ino) == (pipe.st_dev, pipe.st_ino):
                return process
    raise AssertionError("no process reads the pipe")


def test_a_batch_continues_after_a_kill_and_after_a_restart_with_live_requests(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    flags = [*LENGTH, "--omni-batch-dir", str(folder), "--api-server-count", "2", "--max-num-seqs", "4"]

    def count() -> int:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return counts.completed

    with Server(tiny, tmp_path / "first.log", flags) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=3, timeout=120)
        file = client.files.create(file=("lines.jsonl", lines(LINES)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert until(lambda: count() > 2, END_S)
        live = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "say 0"}], extra_body=SHORT
        )
        assert count() < LINES, "the live request was not the last one"
        leader(server, folder).send_signal(signal.SIGKILL)
        before = count()
        assert until(lambda: count() > before, END_S)
    # The first server has ended with lines that were being answered.
    with Server(tiny, tmp_path / "second.log", flags) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=3, timeout=120)
        assert until(lambda: client.batches.retrieve(batch.id).status == "completed", END_S)
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts is not None and ended.request_counts.completed == LINES
        assert ended.output_file_id is not None and ended.error_file_id is None
        found = texts(client.files.content(ended.output_file_id).text)
    assert found.keys() == {str(n) for n in range(LINES)}
    assert found["0"] == live.choices[0].message.content


def test_the_command_serves_a_model_and_continues(tiny: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(4))
    words = ["run-batch", str(tiny), "-i", str(source), "-o", str(output), *LENGTH]
    command = [sys.executable, "-m", "vllm_omni_ext", *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = texts(output.read_text())
    assert found.keys() == set("0123")
