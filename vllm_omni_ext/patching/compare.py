"""Compares symbols (functions, methods and classes) of two vLLM versions."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.source import PACKAGE, VllmSource

State = Literal["fits", "additions only", "changed", "gone"]

WHEELS = (
    "--only-binary=:all:",
    "--python-version=3.12",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 40)),
)
"""Options of pip for one platform, on any machine: vLLM's wheels contain the same Python files for all platforms."""

_BLOCKS = ("body", "orelse", "finalbody")
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@dataclass(frozen=True)
class Difference:
    """The comparison of one symbol in two vLLM versions.

    Attributes:
        target: the symbol, e.g. "vllm.entrypoints.llm:LLM.__init__".
        state: the result of `state_of`, or "gone" if the newer version has no such symbol.
        diff: unified diff of the symbol's source; "" if `state` is "fits".
    """

    target: str
    state: State
    diff: str = ""


def differences(targets: Iterable[str], old: VllmSource, new: VllmSource) -> list[Difference]:
    """Compare each target that `old` defines with the same symbol in `new`."""
    before, after = f"vLLM {old.version}", f"vLLM {new.version}"
    found = []
    for target in targets:
        was, now = old.definition(target), new.definition(target)
        if was is None:
            continue
        lines = difflib.unified_diff(was.splitlines(), (now or "").splitlines(), before, after, lineterm="")
        state = "gone" if now is None else state_of(was, now)
        found.append(Difference(target, state, "" if state == "fits" else "\n".join(lines)))
    return found


def state_of(was: str, now: str) -> State:
    """Compare the source of a definition in an older (`was`) and a newer version (`now`), and return the state.

    "fits": the syntax trees are equal without docstrings and comments. "additions only": the newer source contains all
    old statements in their order, new parameters and fields have defaults, and a class has no new abstract methods.
    "changed": everything else.
    """
    old, new = _parse(was), _parse(now)
    if ast.dump(old) == ast.dump(new):
        return "fits"
    return "additions only" if _adds(old, new) else "changed"


def other_vllm(wanted: str, folder: Path) -> VllmSource:
    """Return the source of `wanted`: a folder, a wheel file, or a version, whose wheel pip downloads into `folder`."""
    if Path(wanted).exists():
        return VllmSource.at(Path(wanted))
    try:
        Version(wanted)
    except InvalidVersion as err:
        raise IncompatibleVllm(f"--against {wanted}: no such file or folder, and not a version such as 0.33.0") from err
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *WHEELS, f"--dest={folder}"]
    if subprocess.run([*words, f"{PACKAGE}=={wanted}"]).returncode:
        raise IncompatibleVllm(f"--against {wanted}: pip cannot download this version; give a wheel file or a folder")
    return VllmSource.at(next(folder.glob("*.whl")))


def _parse(code: str) -> ast.Module:
    """Return the syntax tree of a definition without docstrings, `pass` and `...`; its source may be indented."""
    tree = ast.parse(f"if 1:\n{code}" if code[:1].isspace() else code)
    for node in ast.walk(tree):
        for block in _BLOCKS:
            if isinstance(statements := getattr(node, block, None), list):
                setattr(node, block, [each for each in statements if not _is_empty(each)])
    return tree


def _is_empty(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Pass) or isinstance(value, ast.Constant)


def _adds(old: ast.AST, new: ast.AST) -> bool:
    """Return whether `new` equals `old`, except for added statements and parameters."""
    return type(old) is type(new) and all(
        _adds_to_field(old, name, was, getattr(new, name)) for name, was in ast.iter_fields(old)
    )


def _adds_to_field(owner: ast.AST, name: str, was: Any, now: Any) -> bool:
    if name in _BLOCKS:
        return _adds_statements(was, now, in_class=isinstance(owner, ast.ClassDef))
    if name in ("handlers", "cases"):
        return len(was) == len(now) and all(map(_adds, was, now))
    if isinstance(was, ast.arguments):
        return _adds_parameters(was, now)
    return _text(was) == _text(now)


def _adds_statements(old: list[ast.stmt], new: list[ast.stmt], *, in_class: bool) -> bool:
    left = list(old)
    for statement in new:
        if left and _adds(left[0], statement):
            left.pop(0)
        elif (in_class and _changes_class(statement, left)) or (left and isinstance(statement, _ENDS)):
            return False
    return not left


def _changes_class(added: ast.stmt, after: list[ast.stmt]) -> bool:
    """Return whether a statement adds a field that changes the constructor, or a method that subclasses must define."""
    if isinstance(added, ast.AnnAssign):
        return added.value is None or any(isinstance(each, ast.AnnAssign) for each in after)
    return any("abstractmethod" in ast.dump(each) for each in getattr(added, "decorator_list", ()))


def _adds_parameters(old: ast.arguments, new: ast.arguments) -> bool:
    was, now = _positional(old), _positional(new)
    added = now[len(was) :]
    by_name, new_by_name = _keywords(old), _keywords(new)
    return (
        now[: len(was)] == was
        and all(default for _, default in added)
        and not (added and old.vararg)
        and by_name.items() <= new_by_name.items()
        and all(default for name, default in new_by_name.items() if name not in by_name)
        and (_text(old.vararg), _text(old.kwarg)) == (_text(new.vararg), _text(new.kwarg))
    )


def _positional(arguments: ast.arguments) -> list[tuple[str, str]]:
    """Return (parameter, default) for each positional parameter, as dumped syntax trees; "" without a default."""
    names = [f"{_text(each)} /" for each in arguments.posonlyargs] + [_text(each) for each in arguments.args]
    without = len(names) - len(arguments.defaults)
    return list(zip(names, [""] * without + [_text(each) for each in arguments.defaults], strict=True))


def _keywords(arguments: ast.arguments) -> dict[str, str]:
    """Return parameter -> default for the keyword-only parameters, as dumped syntax trees; "" without a default."""
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {_text(each): "" if default is None else _text(default) for each, default in pairs}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)
