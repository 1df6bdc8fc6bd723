"""Hashes a function or a class by its tokens, so that comments, docstrings and layout do not count.

It hashes tokens instead of syntax trees, because the text of a tree differs between Python versions. Python 3.12 splits
an f-string into several tokens where 3.11 has one, so these are joined again.
"""

from __future__ import annotations

import ast
import hashlib
import io
import textwrap
import tokenize
from collections.abc import Iterator

DIGEST_CHARS = 12
_IGNORED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
_LAYOUT = {tokenize.INDENT: "{", tokenize.DEDENT: "}", tokenize.NEWLINE: ";"}
_FSTRING_START: int | None = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END: int | None = getattr(tokenize, "FSTRING_END", None)


def extract(tree: ast.Module, lines: list[str], qualname: str) -> str | None:
    """Return the dedented text of `qualname`, decorators included, or None if it is not defined."""
    found: ast.AST = tree
    for part in qualname.split("."):
        inside = (node for node in getattr(found, "body", ()) if getattr(node, "name", None) == part)
        node = next(inside, None)
        if node is None:
            return None
        found = node
    assert isinstance(found, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : found.end_lineno]))


def fingerprint(code: str) -> str:
    """Return the digest of one definition as returned by `extract`."""
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
    """Text between two (line, column) positions; lines count from 1."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    between = lines[start[0] : end[0] - 1]
    return lines[start[0] - 1][start[1] :] + "".join(between) + lines[end[0] - 1][: end[1]]


def _is_docstring(words: list[str], at: int) -> bool:
    """Whether a token is a string that is a whole statement."""
    alone = at > 0 and words[at - 1] in {"{", ";"} and at + 1 < len(words) and words[at + 1] == ";"
    return alone and words[at].lstrip("rRbBuU")[:1] in {'"', "'"}
