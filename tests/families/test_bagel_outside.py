"""BAGEL as an external package: a copy under another name, which the core finds only by its entry point."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.server import Server
from tests.families.conftest import install
from tests.families.serving import chat, settled
from tests.support.bagel_runs import golden
from tests.support.bagel_serving import CASES, FLAGS, ask_for, assert_golden, chat_body
from tests.support.cluster import all_up, until
from vllm_omni_ext.model_plugins.bagel.tiny.bagel import write_bagel
from vllm_omni_ext.plugins.spec import ENTRY_POINTS

pytestmark = [pytest.mark.engine, pytest.mark.extended]

OURS, THEIRS = "vllm_omni_ext.model_plugins.bagel", "painting_words"
RENAMED = {
    "vllm_omni_ext.stage_configs.bagel": f"{THEIRS}.stage_configs",
    'architectures=("BagelForConditionalGeneration",)': 'architectures=("PaintingWords",)',
    '"BagelUnderstanding"': '"PaintingWordsUnderstanding"',
    '"BagelDit"': '"PaintingWordsDit"',
    '"BagelSingle"': '"PaintingWordsSingle"',
    'name="bagel': 'name="painting_words',
    'tiny="painting_words.tiny.bagel:write_bagel",': "",
}
"""Names that two families must not both claim, in all files of the copy."""

PYPROJECT = f"""
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{THEIRS.replace("_", "-")}"
version = "0.1.0"
dependencies = ["vllm-omni-ext"]

[project.entry-points."{ENTRY_POINTS}"]
{THEIRS} = "{THEIRS}.family:FAMILY"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
"*" = ["*.yaml", "*.jinja", "*.toml", "fingerprints/*.json"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the copy is installed."""
    folder = tmp_path_factory.mktemp("outside")
    source = Path(__file__).parents[2] / "model_plugins" / "bagel"
    copy = folder / "package" / "src" / THEIRS
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    for file in copy.rglob("*.py"):
        text = file.read_text(encoding="utf-8").replace(OURS, THEIRS)
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    configs = copy / "stage_configs"
    configs.mkdir()
    (configs / "__init__.py").touch()
    for config in (Path(__file__).parents[2] / "stage_configs" / "bagel").glob("*.yaml"):
        text = config.read_text(encoding="utf-8").replace("pipeline: bagel", f"pipeline: {THEIRS}")
        (configs / config.name.replace("bagel", THEIRS)).write_text(text, encoding="utf-8")
    (folder / "package" / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    return install(folder / "package", folder / "installed")


@pytest.fixture(scope="module")
def found(installed: Path) -> Iterator[None]:
    """The servers of these tests find the copy."""
    with pytest.MonkeyPatch.context() as patched:
        before = os.environ.get("PYTHONPATH")
        patched.setenv("PYTHONPATH", os.pathsep.join([str(installed), *([before] if before else [])]))
        yield


@pytest.fixture(scope="module")
def checkpoint(found: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose architecture only the copy has."""
    folder = write_bagel(tmp_path_factory.mktemp("checkpoint") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["PaintingWords"]}))
    return folder


def test_the_copy_imports_nothing_of_the_original(installed: Path) -> None:
    for file in (installed / THEIRS).rglob("*.py"):
        assert "vllm_omni_ext.model_plugins" not in file.read_text(encoding="utf-8"), file
    (point,) = importlib.metadata.Distribution.at(next(installed.glob("*.dist-info"))).entry_points
    assert (point.group, point.value) == (ENTRY_POINTS, f"{THEIRS}.family:FAMILY")


@pytest.mark.parametrize("config", [[], ["--stage-config", f"{THEIRS}_single"]])
def test_the_copy_answers_like_the_original(checkpoint: Path, tmp_path: Path, config: list[str]) -> None:
    run = golden("understand_fp32")
    with Server(checkpoint, tmp_path / "log", [*FLAGS, *config]) as server:
        assert until(lambda: all_up(server, 1 if config else 2)), server.tail()
        for name in CASES:
            assert_golden(ask_for(server, name), name)
        body = chat_body(run.parts, "text", max_completion_tokens=23, return_token_ids=True)
        assert chat(server, body)["choices"][0]["token_ids"] == run.info["generated_ids"][0][1:]
        assert settled(server)
