"""Applies patches to vLLM.

Imports little, because the start-up hook (`boot`) imports this module in runs of vLLM without omni too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from vllm_omni_ext.errors import IncompatibleVllm

_in_place: dict[str, Any] = {}
"""Patch name -> the replacement that is set in vLLM."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one vLLM attribute.

    Attributes:
        name: short and unique.
        target: e.g. "vllm.entrypoints.llm:LLM.__init__".
        when: text that names the processes in which the patch is applied.
        why: the feature that is impossible without the patch.
        upstream: address of the issue or pull request, or "none: <reason>".
        remove_when: condition under which the patch can be removed.
        wrap: returns the replacement of the original attribute.
    """

    name: str
    target: str
    when: str
    why: str
    upstream: str
    remove_when: str
    wrap: Callable[[Any], Any]


def _attribute(patch: Patch, module: ModuleType) -> tuple[Any, str]:
    """Return the object whose attribute the patch replaces, and the attribute's name."""
    *path, name = patch.target.partition(":")[2].split(".")
    return functools.reduce(getattr, path, module), name


def _put(patch: Patch, owner: Any, name: str, replacement: Any) -> None:
    setattr(owner, name, replacement)
    _in_place[patch.name] = replacement


def apply_on_import(patch: Patch, module: ModuleType) -> None:
    """Apply a patch to a module that was just imported, without a check of the target's code.

    With omni, `compat.activate` checks the code before a process is started. If the target is missing, this function
    does nothing, so that an untested vLLM runs as without this package.
    """
    try:
        owner, name = _attribute(patch, module)
        live = vars(owner)[name]
    except (AttributeError, KeyError):
        return
    if live is not _in_place.get(patch.name):
        _put(patch, owner, name, patch.wrap(live))


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply all patches that are not applied yet, or none if one fails.

    The caller must have compared the targets' code with the tested code (`compat.activate`).

    Raises:
        IncompatibleVllm: another package has replaced a target.
    """
    todo = []
    for patch in patches:
        module = importlib.import_module(patch.target.partition(":")[0])
        owner, name = _attribute(patch, module)
        live = vars(owner)[name]
        if live is not _in_place.get(patch.name):
            _refuse_foreign(patch, live, module)
            todo.append((patch, owner, name, live))
    replacements = [(patch, owner, name, patch.wrap(live)) for patch, owner, name, live in todo]
    for replacement in replacements:
        _put(*replacement)


def _refuse_foreign(patch: Patch, live: Any, module: ModuleType) -> None:
    """Raise IncompatibleVllm if another package has replaced the target, i.e. if `live` is not from the module's file.

    Args:
        live: the current value of the patch's target.
        module: the module of the target; only its file was compared with the tested code.
    """
    function = getattr(live, "__func__", live)
    if isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__:
        return
    origin = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
    raise IncompatibleVllm(
        f"{patch.name}: {patch.target} was already replaced by {origin}; "
        "remove the other plugin, or start vLLM without --omni"
    )
