"""The example of docs/writing-a-model-plugin.md is installed, tested and served."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer

from examples.server import Server
from tests.families.conftest import install

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-model-plugin.md"
FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = "hello"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files."""
    folder = tmp_path_factory.mktemp("tutorial") / "stripes"
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def environment(package: Path) -> dict[str, str]:
    """In which the example is installed."""
    target = install(package, package.with_name("installed"))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *([before] if before else [])])}


@pytest.mark.engine
@pytest.mark.extended
def test_the_example_is_listed_and_passes_its_own_test(package: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "vllm_omni_ext", "doctor"]
    output = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300).stdout
    assert re.search(r"ok\s+stripes\s+Stripes", output), output
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(package), "tests"]
    done = subprocess.run(words, env=environment, cwd=package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.engine
def test_the_example_is_served(
    package: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    words = [sys.executable, "-m", "vllm_omni_ext", "tiny", "stripes", str(checkpoint)]
    subprocess.run(words, env=environment, check=True, timeout=300)
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    colors = load_file(checkpoint / "model.safetensors")["colors"]
    tokens = AutoTokenizer.from_pretrained(checkpoint)(TEXT, add_special_tokens=False)["input_ids"]
    rows = colors[[tokens[y % len(tokens)] for y in range(8)]]
    expected = np.broadcast_to((rows * 255).round().numpy().astype(np.uint8)[:, None], (8, 16, 3))
    replicas = ["--stage-overrides", '{"painter": {"replicas": 2}}']
    with Server(checkpoint, tmp_path / "log", replicas) as server:
        body = {"model": str(checkpoint), "prompt": TEXT, "size": "16x8"}
        answer = httpx.post(f"{server.base_url}/images/generations", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        picture = base64.b64decode(answer.json()["data"][0]["b64_json"])
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture))), expected)
