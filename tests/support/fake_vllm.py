"""A small importable package that stands in for vLLM."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from types import ModuleType

from vllm_omni_ext.patching.fingerprint import fingerprint
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Patch, split_target

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

    def __init__(self, root: Path, name: str, version: str = "0.32.0") -> None:
        self.folder = root / name
        self.folder.mkdir(parents=True)
        self.module = f"{name}.engine"
        (self.folder / "__init__.py").touch()
        (self.folder / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        self.rewrite(ENGINE)

    def rewrite(self, text: str) -> None:
        """Change the source of the engine module."""
        (self.folder / "engine.py").write_text(textwrap.dedent(text))

    def load(self) -> ModuleType:
        """Import the engine module."""
        return importlib.import_module(self.module)

    @property
    def source(self) -> VllmSource:
        """Its source tree, read afresh."""
        return VllmSource(self.folder)

    def patch(self, name: str, qualname: str, wrap=lambda original: original, **changes) -> Patch:
        """A patch that fits the source as it is now."""
        target = f"{self.module}:{qualname}"
        code = self.source.definition(*split_target(target))
        fields = {
            "name": name,
            "target": target,
            "why": "a test",
            "upstream": "none: a test",
            "remove_when": "never",
            "seen": frozenset({fingerprint(code)}) if code else frozenset({"0" * 12}),
            "wrap": wrap,
        }
        return Patch(**(fields | changes))
