"""All families installed at once: each serves its own models, and a collision is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.conftest import HERE, install

pytestmark = [pytest.mark.engine, pytest.mark.extended]

FAMILIES = {
    "optional_text_image": "OptionalTextImage",
    "plain_tts": "PlainTts",
    "qwen3_omni": "Qwen3OmniMoeForConditionalGeneration",
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package in a process."""
    line = [sys.executable, "-m", "vllm_omni_ext", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_the_doctor_lists_all_families() -> None:
    said = command("doctor").stdout
    for name, architecture in FAMILIES.items():
        line = next((line for line in said.splitlines() if name in line and architecture in line), "")
        assert line.split()[:1] == ["ok"], said


def test_two_families_of_one_name_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = checkpoint("plain_tts"), checkpoint("optional_text_image")
    source = shutil.copytree(HERE / "plain_tts", tmp_path / "copy")
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "plain-tts"', 'name = "another-tts"'))
    target = install(source, tmp_path / "installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target), os.environ["PYTHONPATH"]]))
    refused = command("plan", str(model))
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "plain-tts 0.1.0" in said and "another-tts 0.1.0" in said and "Traceback" not in said, said
    assert command("plan", str(other)).returncode == 0


def test_a_broken_family_fails_for_its_own_models_only(
    checkpoint: Callable[[str], Path], installed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = checkpoint("plain_tts"), checkpoint("optional_text_image")
    broken = shutil.copytree(installed["plain_tts"], tmp_path / "broken")
    (broken / "plain_tts" / "family.py").write_text("raise RuntimeError('this plugin is broken')\n")
    others = [str(path) for name, path in installed.items() if name != "plain_tts"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), *others]))
    refused = command("plan", str(model))
    assert refused.returncode != 0 and "this plugin is broken" in refused.stdout + refused.stderr
    assert command("plan", str(other)).returncode == 0
