"""The terminal's lines of a start, and of one that fails."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from vllm import LLM

from examples.server import Program, Server, command, free_port
from tests.support.cluster import until
from vllm_omni_ext.runtime.launch.progress import Progress

pytestmark = pytest.mark.engine

FAIL_S = 120


def said(log: Path) -> list[str]:
    """Our own lines of a terminal: no log prefix, no library's notice, no progress of a replica (`talker/0`)."""
    lines = log.read_text().splitlines()
    return [line for line in lines if re.match(r"(starting|thinker|talker|code2wav|ready|error)\b(?!/)", line)]


def says_ready(log: Path) -> bool:
    """Whether the last line is there: the first API server answers a moment before."""
    return until(lambda: any(line.startswith("ready:") for line in said(log)))


@pytest.mark.usefixtures("new_process")
@pytest.mark.extended
@pytest.mark.parametrize("kept", [True, False])
def test_the_terminal_has_one_line_a_stage(tiny: Path, tmp_path: Path, kept: bool) -> None:
    terminal, logs = tmp_path / "terminal", tmp_path / "logs"
    config = tmp_path / "stages.yaml"
    config.write_text(f"log_dir: {logs}\ntimeouts: {{startup_timeout_s: 600}}\nlimits: {{max_body_mib: 1}}\n")
    own = ["--stage-config", str(config)] if kept else ["--omni-verbose"]
    flags = ["--max-model-len", "2048", *own]
    with Server(tiny, terminal, flags) as server:
        port = server.port
        assert says_ready(terminal)
    first, *stages, last = said(terminal)
    where = f"in {logs}" if kept else "on this terminal"
    assert first == f"starting thinker (1 replica), talker (1 replica), code2wav (1 replica); logs {where}"
    assert sorted(re.sub(r"[\d.]+ s$", "", line) for line in stages) == [
        "code2wav ready after ",
        "talker ready after ",
        "thinker ready after ",
    ]
    assert re.fullmatch(rf"ready: http://127.0.0.1:{port} after [\d.]+ s", last)
    assert ("(EngineCore" in terminal.read_text()) != kept
    if kept:
        files = {file.name: file.read_text() for file in logs.iterdir()}
        assert set(files) == {"thinker-0.log", "talker-0.log", "code2wav-0.log"}
        assert all("EngineCore" in text for text in files.values())


@pytest.mark.extended
def test_each_replica_reports_its_states(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real engines."""
    states = defaultdict[str, list[str]](list)
    take = Progress.reported

    def noted(self: Progress, replica: str, state: str) -> None:
        states[replica].append(state)
        take(self, replica, state)

    monkeypatch.setattr(Progress, "reported", noted)
    with LLM(str(tiny), omni=True, max_model_len=2048):
        pass
    states.pop("", None)  # the datagram that wakes the listener
    assert states == {f"{stage}/0": ["loading weights", "warming up"] for stage in ("thinker", "talker", "code2wav")}


def test_a_replica_that_does_not_start(tiny: Path, tmp_path: Path) -> None:
    """The talker finds no weights of the configured kind: one error, with its last lines."""
    output = tmp_path / "terminal"
    broken = '{"talker": {"load_format": "sharded_state"}}'
    flags = ["--omni", "--port", str(free_port()), "--max-model-len", "2048", "--stage-overrides", broken]
    program = Program([*command(), "serve", str(tiny), *flags], output)
    program.start()
    try:
        assert until(lambda: program.status() is not None, FAIL_S)
        assert program.status() == 1
    finally:
        program.stop()
    error = next(line for line in said(output) if line.startswith("error"))
    assert re.match(r"error: talker/0 did not start: its process ended with exit code 1 while starting; the end", error)
    tail = output.read_text().partition(error)[2]
    assert "pre-sharded checkpoints" in tail
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(tiny) in " ".join(p.info["cmdline"] or ())]
    assert mine == []
    folder = Path(said(output)[0].partition("; logs in ")[2]).parent
    assert folder.name.startswith("omni-") and [each.name for each in folder.iterdir()] == ["logs"]
    assert "pre-sharded checkpoints" in Path(folder, "logs", "talker-0.log").read_text()
    shutil.rmtree(folder)


@pytest.mark.extended
@pytest.mark.usefixtures("new_process")
def test_api_servers_use_replicas_that_start_after_them(tiny: Path, tmp_path: Path) -> None:
    """API servers are started before most replicas have a process, and receive these later."""
    terminal = tmp_path / "terminal"
    server = Server(tiny, terminal, ["--max-model-len", "2048", "--api-server-count", "2"])
    server.words[: len(command())] = [sys.executable, str(Path(__file__).parents[1] / "support" / "one_device.py")]
    with server:
        with urllib.request.urlopen(f"{server.base_url}/omni/status") as answer:
            status = json.load(answer)
        replicas = [replica for stage in status["stages"] for replica in stage["replicas"]]
        running = {process.pid for process in server.processes()}
        assert len({each["pid"] for each in replicas}) == 3 and {each["pid"] for each in replicas} <= running
        assert {each["state"] for each in replicas} == {"UP"}
        client = OpenAI(base_url=server.base_url, api_key="none")
        reply = client.chat.completions.create(
            model=str(tiny),
            messages=[{"role": "user", "content": "Tell me about"}],
            modalities=["text", "audio"],
            max_completion_tokens=8,
            extra_body={"talker": {"max_tokens": 8}, "ignore_eos": True},
        )
        assert reply.choices[0].message.audio.data
        assert says_ready(terminal)
    stages = [line.split()[0] for line in said(terminal)]
    assert stages == ["starting", "thinker", "talker", "code2wav", "ready:"]
