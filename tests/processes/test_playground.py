"""`/playground` in headless Chromium, with `vllm serve TRAINED --omni`: typed and spoken turns, and pictures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import soxr

from examples.server import Server
from tests.support.bagel_serving import FLAGS
from tests.support.cluster import LENGTH, overrides
from vllm_omni_ext.evaluation.scores import words_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.extended,
    pytest.mark.usefixtures("new_processes"),
    pytest.mark.needs("program node", "program npm"),
]

SCRIPT = Path(__file__).parent / "playground" / "browser.mjs"
PACKAGES = ("@sparticuz/chromium@147.0.0", "axe-core@4.14.1", "puppeteer-core@24.43.1")
KEY = "a-long-lived-key"
LONG = "one two three four five"
"""The answer that is interrupted."""

SPOKEN = ("green", "north", "monday")
BEFORE_S, AFTER_S = 0.3, 30.0
BROWSER_S = 400
RATE = 16_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The script, beside its packages. One of them is Chromium, which is unpacked there."""
    folder = tmp_path_factory.mktemp("browser")
    subprocess.run(["npm", "install", "--loglevel=error", "--prefix", folder, *PACKAGES], check=True)
    yield Path(shutil.copy(SCRIPT, folder))
    shutil.rmtree(folder)


@pytest.fixture
def talking(tmp_path: Path) -> Iterator[Server]:
    from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni

    model = write_qwen3_omni(tmp_path / "model", trained=True)
    greedy = {"params": {"temperature": 0}}
    flags = [*LENGTH, "--omni-playground", "--api-key", KEY, *overrides(thinker=greedy, talker=greedy)]
    with Server(model, tmp_path / "server.log", flags) as running:
        yield running


def use(browser: Path, scenario: str, server: Server, folder: Path, *more: str) -> dict[str, Any]:
    """Run a scenario; returns the results of the script, after the checks that hold for all."""
    page = server.base_url.replace("/v1", "/playground")
    command = ["node", str(browser), scenario, page, str(folder), *more]
    environment = {**os.environ, "TMPDIR": str(browser.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_S, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "failed" not in found, json.dumps(found, indent=1)
    assert (found["errors"], found["refused"], found["alert"]) == ([], [], None)
    assert {name: broken for name, broken in found["violations"].items() if broken} == {}
    assert found["stored"] == [0, 0, ""]
    own = page.removesuffix("playground")
    allowed = (own, own.replace("http", "ws"), f"blob:{own}")
    assert [each for each in found["requests"] if not each.startswith(allowed)] == []
    return found


def microphone(file: Path) -> None:
    """Write the sound of the microphone: `SPOKEN`, then silence."""
    from tests.accuracy.cases import DATA

    words, rate = soundfile.read(DATA / "held_out.flac", dtype="float32")
    places = json.loads((DATA / "held_out.json").read_text())
    sound = np.concatenate([words[slice(*places[f"{word}/0"])] for word in SPOKEN])
    sound = soxr.resample(sound * 0.6 / np.abs(sound).max(), rate, 48_000)
    before, after = (np.zeros(round(seconds * 48_000), np.float32) for seconds in (BEFORE_S, AFTER_S))
    soundfile.write(file, np.concatenate([before, sound, after]), 48_000, subtype="PCM_16")


def samples(file: str) -> np.ndarray:
    """The samples of a recording, float32 [n] at 16 kHz."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(file) as recorded:
        frames = [each for frame in recorded.decode(audio=0) for each in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray().ravel() for frame in frames])


@pytest.mark.needs("library onnxruntime", "library silero_vad", "library faster_whisper")
def test_a_conversation(browser: Path, talking: Server, tmp_path: Path) -> None:
    from tests.accuracy.figures import recognisers

    microphone(tmp_path / "mic.wav")
    found = use(browser, "conversation", talking, tmp_path, KEY)
    assert "(status 401)" in found["refusal"]
    assert found["protocols"] and all("ek_" in each and KEY not in each for each in found["protocols"])
    (typed, first), (_, cut, spoken, answer), (_, stopped) = found["conversations"]
    assert (typed["words"], first["words"], first["note"]) == ("say seven blue left", "seven blue left", "")
    assert first["stages"] == ["thinker", "talker", "code2wav", "you hear"]
    for each in (cut, stopped):
        assert each["note"].startswith("interrupted after"), each
        assert LONG.startswith(each["words"]) and each["words"] != LONG
    assert spoken["words"] not in ("", "…") and answer["stages"] == ["you", *first["stages"]]
    assert [row[:2] for row in found["replicas"]] == [[f"{name}/0", "UP"] for name in ("thinker", "talker", "code2wav")]

    listen = recognisers()["whisper"]
    sent = soxr.resample(np.frombuffer((tmp_path / "sent.pcm").read_bytes(), "<i2") / np.float32(32768), 24_000, RATE)
    assert words_of(" ".join(listen(sent))) == list(SPOKEN)
    heard = [list(listen(samples(file))) for file in found["sounds"]]
    assert words_of(" ".join(heard[0])) == words_of(first["words"]), heard
    after = words_of(" ".join(heard[1]))[len(cut["words"].split()) :]
    assert set(words_of(answer["words"])) & set(after), (answer["words"], heard)


def test_pictures(browser: Path, bagel: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--omni-playground"]
    soundfile.write(tmp_path / "mic.wav", np.zeros(4800, np.float32), 48_000, subtype="PCM_16")
    with Server(bagel, tmp_path / "server.log", flags) as running:
        found = use(browser, "pictures", running, tmp_path)
    [(_, made)] = found["conversations"]
    assert made["stages"] == ["dit"] and made["note"] == ""
    assert found["size"][0] > 0 and found["previews"] > 1
