"""Sound of another shape than Qwen3-Omni's: one stage, no frames, 16 kHz."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from examples.server import Server
from tests.families.oracles import SAMPLE_RATE, spoken
from tests.families.serving import chat, chat_body, client, during, events, served, settled
from tests.support.cluster import ANSWER_S, MODEL, all_up, get, kill, overrides, until

pytestmark = [pytest.mark.engine, pytest.mark.extended]

TEXT = "one stage, text in and sound out"
LONG = "all work and no play " * 45
"""Takes long enough for something to happen meanwhile."""


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("plain_tts")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("plain_tts") / "log"
    with served(folder, log, 2, *overrides(voicebox={"replicas": 2})) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_held(server: Server) -> Iterator[None]:
    yield
    assert settled(server)


def check(samples: Any, expected: np.ndarray) -> None:
    """Samples of 16 bits are those of the oracle, rounded."""
    assert samples.shape == expected.shape
    assert np.abs(np.asarray(samples, np.float64) - expected * 32768).max() <= 1


def speech(server: Server, text: str = TEXT, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": text, "response_format": "pcm", **fields}
    return httpx.post(f"{server.base_url}/audio/speech", json=body, timeout=ANSWER_S)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completions", {"prompt": TEXT}),
        ("/responses", {"input": TEXT}),
        ("/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}),
    ],
)
def test_endpoints_of_text_are_refused(server: Server, path: str, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.base_url}{path}", json={"model": MODEL, **fields}, timeout=ANSWER_S)
    assert answer.status_code == 400
    assert "model: it has no text; /v1/chat/completions answers with audio" in answer.text


def test_the_card_of_the_family_is_served(server: Server) -> None:
    assert get(server, "/health")[0] == 200
    assert client(server).models.list().data[0].id == MODEL
    assert httpx.get(f"{server.base_url}/audio/voices").json()["voices"] == ["bass", "tenor"]


@pytest.mark.parametrize(("voice", "pitch"), [("tenor", 1.0), ("bass", 0.5)])
def test_speech_is_the_sound_of_the_oracle(server: Server, folder: Path, voice: str, pitch: float) -> None:
    made = client(server).audio.speech.create(model=MODEL, voice=voice, input=TEXT, response_format="wav")
    samples, rate = soundfile.read(io.BytesIO(made.read()), dtype="int16")
    assert rate == SAMPLE_RATE
    check(samples, spoken(folder, TEXT, pitch))


def test_speech_is_streamed_as_events(server: Server, folder: Path) -> None:
    body = {"model": MODEL, "input": TEXT, "response_format": "pcm", "stream_format": "sse", "stream": True}
    found = events(server, "audio/speech", body)
    sound = b"".join(base64.b64decode(event["audio"]) for event in found if event["type"] == "speech.audio.delta")
    check(np.frombuffer(sound, np.int16), spoken(folder, TEXT))
    assert found[-1]["type"] == "speech.audio.done"


def test_speech_is_streamed_with_parameters_of_the_stage(server: Server, folder: Path) -> None:
    answer = speech(server, voicebox={"volume": 0.25}, stream=True)
    check(np.frombuffer(answer.content, np.int16), spoken(folder, TEXT, volume=0.25))


def test_a_chat_is_answered_with_sound(server: Server, folder: Path) -> None:
    answer = chat(server, chat_body(TEXT, "audio", audio={"voice": "bass", "format": "wav"}))
    sound = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
    check(soundfile.read(io.BytesIO(sound), dtype="int16")[0], spoken(folder, TEXT, 0.5))


@pytest.mark.parametrize("leave_after", [0, 2, 40])
def test_a_client_that_leaves_ends_its_request(server: Server, leave_after: int) -> None:
    body = {"model": MODEL, "input": LONG, "response_format": "pcm", "stream_format": "sse", "stream": True}
    events(server, "audio/speech", body, leave_after)
    assert settled(server)


def test_a_request_survives_the_death_of_its_replica(server: Server, folder: Path) -> None:
    answer = during(server, "voicebox", lambda: speech(server, LONG), lambda name: kill(server, name) and None)
    check(np.frombuffer(answer.content, np.int16), spoken(folder, LONG))
    assert until(lambda: all_up(server, 2), 120)
