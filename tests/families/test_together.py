"""All families at once, beside Qwen3-Omni: nobody notices the others, and who collides is told so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.conftest import HERE, NAMES, install
from tests.families.serving import served
from tests.support.cluster import ask, body
from tests.support.oracle import Oracle

FAMILIES = {
    "onestage_image": "OneStageImage",
    "optional_text_image": "OptionalTextImage",
    "plain_tts": "PlainTts",
    "qwen3_omni": "Qwen3OmniMoeForConditionalGeneration",
}


def ours(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours, in a process of its own."""
    command = [sys.executable, "-m", "vllm_omni_ext", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.engine
def test_the_doctor_lists_all(installed: dict[str, Path]) -> None:
    assert set(installed) == set(NAMES)
    said = ours("doctor").stdout
    for name, architecture in FAMILIES.items():
        line = next((line for line in said.splitlines() if name in line and architecture in line), "")
        assert line.split()[:1] == ["ok"], said


@pytest.mark.engine
def test_two_families_of_one_name(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = checkpoint("onestage_image"), checkpoint("plain_tts")
    source = shutil.copytree(HERE / "onestage_image", tmp_path / "copy")
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "onestage-image"', 'name = "another-image"'))
    target = install(source, tmp_path / "installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target), os.environ["PYTHONPATH"]]))
    refused = ours("plan", str(model))
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "onestage-image 0.1.0" in said and "another-image 0.1.0" in said and "Traceback" not in said, said
    assert ours("plan", str(other)).returncode == 0


@pytest.mark.engine
def test_a_broken_family_costs_its_own_models_only(
    checkpoint: Callable[[str], Path], installed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = checkpoint("plain_tts"), checkpoint("onestage_image")
    broken = shutil.copytree(installed["plain_tts"], tmp_path / "broken")
    (broken / "plain_tts" / "family.py").write_text("raise RuntimeError('this plugin is broken')\n")
    others = [str(path) for name, path in installed.items() if name != "plain_tts"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), *others]))
    refused = ours("plan", str(model))
    assert refused.returncode != 0 and "this plugin is broken" in refused.stdout + refused.stderr
    assert ours("plan", str(other)).returncode == 0


@pytest.mark.engine
def test_qwen3_omni_answers_as_without_them(
    installed: dict[str, Path], tiny: Path, oracle: Oracle, tmp_path: Path
) -> None:
    fields = body("hello world", words=12, frames=20)
    del fields["ignore_eos"]
    fields["talker"] = {"temperature": 0, "repetition_penalty": 1.05, "max_tokens": 20}
    expected = oracle.run(fields["messages"], voice="ethan", thinker_max_tokens=12, talker_max_tokens=20)
    with served(tiny, tmp_path / "log", 3) as server:
        answer = ask(server, fields)
    assert len(answer.samples) == len(expected.wav)
    assert abs(answer.samples - expected.wav * 32768).max() <= 5
