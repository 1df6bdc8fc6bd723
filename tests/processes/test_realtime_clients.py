"""Spoken conversations of other Realtime clients with `vllm serve TRAINED --omni`, as their packages are published."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tokenizers import Tokenizer

from examples.server import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended,
    pytest.mark.usefixtures("new_processes"),
    pytest.mark.needs("library onnxruntime", "library silero_vad"),
]

CLIENTS = Path(__file__).parent / "realtime_clients"
FLAGS = ["--served-model-name", "tiny", "--max-model-len", "2048"]
FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-strict-level", "parameter"]
WHITESPACE = ("Ġ", "Ċ", "ĉ", "č")
"""Tokens of one character, which the checkpoint repeats in arguments of functions up to the limit of its tokens."""

WORDS = {
    "first": ("seven", "blue", "left"),
    "second": ("green", "north", "monday"),
    "long": ("one", "two", "three", "four", "five", "six"),
}
LEAST_UNDERSTOOD = 0.85
"""Least share of understood words, as that of `repeat` in the accuracy suite with few cases."""

AGENTS = "openai-agents==0.24.0"
PIPECAT = ("docopt==0.6.2", "num2words==0.5.14", "pipecat-ai[openai]==1.14.0")
NODE = ("@openai/agents-realtime@0.20.0", "zod@4.6.7")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    folder = tmp_path_factory.mktemp("clients")
    model = write_qwen3_omni(folder / "model", trained=True)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    thinker = {"temperature": 0, "max_tokens": 100, "logit_bias": {tokens[each]: -100 for each in WHITESPACE}}
    stages = {"thinker": {"params": thinker}, "talker": {"params": {"temperature": 0}}}
    flags = [*FLAGS, "--stage-overrides", json.dumps(stages)]
    with Server(model, folder / "server.log", flags) as running:
        yield running
    shutil.rmtree(model)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `WORDS` as samples of 24 kHz."""
    soxr = pytest.importorskip("soxr")
    from tests.accuracy.cases import DATA

    folder = tmp_path_factory.mktemp("sounds")
    spoken, rate = soundfile.read(DATA / "held_out.flac", dtype="float32")
    places = json.loads((DATA / "held_out.json").read_text())
    for name, words in WORDS.items():
        sound = np.concatenate([spoken[slice(*places[f"{word}/0"])] for word in words])
        samples = soxr.resample(sound * 0.6 / np.abs(sound).max(), rate, 24_000)
        (folder / f"{name}.pcm").write_bytes((samples * 32767).astype("<i2").tobytes())
    return folder


def python_with(folder: Path, *packages: str) -> str:
    """Install packages into a new environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return python


def run(command: list[str], server: Server, sounds: Path) -> dict[str, Any]:
    """Run a client; returns its last line, when it has ended without an error."""
    url = server.base_url.replace("http://", "ws://") + "/realtime?model=tiny"
    done = subprocess.run([*command, url, str(sounds)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    """Ten responses: an answer, one that is interrupted, an answer, a function call, and six answers."""
    of: dict[str, list[Any]] = {}
    for event in found["events"]:
        of.setdefault(event["type"], []).append(event)
    assert "error" not in of and found["errors"] == [], (of.get("error"), found["errors"])
    responses = [event["response"] for event in of["response.done"]]
    assert [each["status"] for each in responses] == ["completed", "cancelled", *["completed"] * 8]
    assert responses[1]["status_details"]["reason"] == "turn_detected"
    kinds = [[item["type"] for item in each["output"]] for each in responses]
    assert kinds == [["message"]] * 3 + [["function_call"]] + [["message"]] * 6
    assert all(each["output"][0]["content"][0]["transcript"] for each in responses if each is not responses[3])
    assert found["calls"] == [json.loads(responses[3]["output"][0]["arguments"])["at"]]
    cut = [event["audio_end_ms"] for event in of["conversation.item.truncated"]]
    assert len(cut) >= 2, "the server and the client truncate the interrupted sound"
    assert found["interrupted"] and found["sound_ms"] > 1000
    assert any(each["transcript"] for each in of["conversation.item.input_audio_transcription.completed"])
    assert understood(responses, of["response.output_audio.delta"]) >= LEAST_UNDERSTOOD


def understood(responses: list[Any], deltas: list[Any]) -> float:
    """Return the share of the words in complete answers that a recogniser finds in their sound."""
    import soxr

    from dev.training.tiny_omni.judge import RATE, right_words

    judge, right = recogniser(), list[bool]()
    for response in responses:
        pieces = [base64.b64decode(each["delta"]) for each in deltas if each["response_id"] == response["id"]]
        if response["status"] == "completed" and pieces:
            sound = np.frombuffer(b"".join(pieces), "<i2") / np.float32(32768)
            words = response["output"][0]["content"][0]["transcript"].split()
            right += right_words(words, judge(soxr.resample(sound, 24_000, RATE)))
    return sum(right) / len(right)


@cache
def recogniser() -> Any:
    from tests.accuracy.figures import recognisers

    return recognisers()["whisper"]


def test_openai(server: Server, sounds: Path) -> None:
    check(run([sys.executable, str(CLIENTS / "openai_client.py")], server, sounds))


def test_openai_agents(server: Server, sounds: Path, tmp_path: Path) -> None:
    python = python_with(tmp_path / "venv", AGENTS)
    check(run([python, str(CLIENTS / "openai_agents.py")], server, sounds))


def test_pipecat(server: Server, sounds: Path, tmp_path: Path) -> None:
    python = python_with(tmp_path / "venv", *PIPECAT)
    check(run([python, str(CLIENTS / "pipecat_service.py")], server, sounds))


@pytest.mark.needs("program node", "program npm")
def test_openai_agents_for_node(server: Server, sounds: Path, tmp_path: Path) -> None:
    script = shutil.copy(CLIENTS / "agents_realtime.mjs", tmp_path)  # beside its packages
    subprocess.run(["npm", "install", "--loglevel=error", "--prefix", tmp_path, *NODE], check=True)
    check(run(["node", script], server, sounds))
