"""A small importable package that stands in for vLLM."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_omni_ext.patching.patch import Patch
from vllm_omni_ext.patching.source import VllmSource, fingerprint

ENGINE = """
import functools


def decorate(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def start(name):
    # a comment
    return f"start {name}"


@decorate
def stop():
    return "stop"


class Engine:
    \"\"\"An engine.\"\"\"

    def step(self):
        return 1

    @classmethod
    def kind(cls):
        return cls.__name__
"""


class FakeVllm:
    """Writes and imports `<name>.engine`."""

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self.folder.mkdir()
        (self.folder / "__init__.py").touch()
        (self.folder / "_version.py").write_text("__version__ = version = '0.32.0'\n")
        self.rewrite(ENGINE)

    def rewrite(self, text: str) -> None:
        """Change the source of the engine module."""
        self.text = text
        (self.folder / "engine.py").write_text(text)

    def load(self) -> ModuleType:
        """Import the engine module."""
        return importlib.import_module(f"{self.folder.name}.engine")

    @property
    def source(self) -> VllmSource:
        """The source tree, read again."""
        return VllmSource(self.folder)

    def target(self, qualname: str) -> str:
        """Name of a symbol of the engine module."""
        return f"{self.folder.name}.engine:{qualname}"

    def fingerprints(self, *qualnames: str) -> dict[str, str]:
        """Those of the current source; other ones for symbols that are not there."""
        codes = {self.target(name): self.source.definition(self.target(name)) for name in qualnames}
        return {target: fingerprint(code) if code else "0" * 12 for target, code in codes.items()}

    def patch(self, name: str, qualname: str, wrap=lambda original: original) -> Patch:
        """Return a patch of a symbol of the engine module."""
        about = {"when": "in a test", "why": "a test", "upstream": "none: a test", "remove_when": "never"}
        return Patch(name=name, target=self.target(qualname), wrap=wrap, **about)


_numbers = itertools.count()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A new stand-in for vLLM under a name of its own."""
    fake = FakeVllm(tmp_path, f"fake_vllm_{next(_numbers)}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield fake
    for name in [name for name in sys.modules if name.startswith(fake.folder.name)]:
        del sys.modules[name]
