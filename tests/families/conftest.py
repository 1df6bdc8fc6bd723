"""The families of this folder, installed as a user would: nothing here imports them but through their entry points."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_ext.plugins.registry import plugins
from vllm_omni_ext.plugins.spec import ENTRY_POINTS, ModelFamily, resolve

NAMES = ("optional_text_image", "plain_tts")
HERE = Path(__file__).parent


def install(source: Path, target: Path) -> Path:
    """Install a package into a folder of its own, without network; returns the folder."""
    copy = target.with_name(f"{target.name}-source")
    shutil.copytree(source, copy)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*words, "--disable-pip-version-check", "--target", str(target), str(copy)], check=True, timeout=300)
    return target


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each family is installed."""
    folder = tmp_path_factory.mktemp("families")
    return {name: install(HERE / name, folder / name) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def found(installed: dict[str, Path]) -> Iterator[None]:
    """The tests of this folder find the families, and so do the servers they start; tests of other folders do not."""
    with pytest.MonkeyPatch.context() as patched:
        for target in installed.values():
            patched.syspath_prepend(str(target))
        before = os.environ.get("PYTHONPATH")
        paths = [str(target) for target in installed.values()]
        patched.setenv("PYTHONPATH", os.pathsep.join([*paths, *([before] if before else [])]))
        plugins.cache_clear()
        yield
    plugins.cache_clear()


@pytest.fixture(scope="session")
def family(installed: dict[str, Path]) -> Callable[[str], ModelFamily]:
    """Loads a family by its name."""

    def load(name: str) -> ModelFamily:
        (found,) = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
        loaded: ModelFamily = found.load()
        return loaded

    return load


@pytest.fixture(scope="session")
def checkpoint(family: Callable[[str], ModelFamily], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def write(name: str) -> Path:
        if not (folder / name).exists():
            resolve(family(name).tiny)(folder / name, seed=0)
        return folder / name

    return write
