"""Patches, and their application. Light, because the start-up hook imports this module in plain vLLM runs too."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from vllm_omni_ext.errors import IncompatibleVllm

_in_place: dict[str, Any] = {}
"""Patch name -> the replacement in vLLM; written last."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one vLLM attribute.

    Attributes:
        name: short and unique.
        target: e.g. "vllm.entrypoints.llm:LLM.__init__".
        when: the processes that apply the patch, for a reader.
        why: the feature that is impossible without the patch.
        upstream: address of the issue or pull request, or "none: <reason>".
        remove_when: condition under which the patch can be removed.
        wrap: original -> replacement.
    """

    name: str
    target: str
    when: str
    why: str
    upstream: str
    remove_when: str
    wrap: Callable[[Any], Any]


@dataclass(frozen=True)
class PatchTarget:
    """The target of a patch: an attribute of a module or a class."""

    patch: Patch
    module: ModuleType
    owner: Any
    name: str

    @classmethod
    def of(cls, patch: Patch, module: ModuleType) -> PatchTarget:
        """The target of `patch` in the imported `module`."""
        *path, name = patch.target.partition(":")[2].split(".")
        return cls(patch, module, functools.reduce(getattr, path, module), name)

    @property
    def live(self) -> Any:
        """The attribute's current value."""
        return vars(self.owner)[self.name]

    @property
    def is_ours(self) -> bool:
        """True if the attribute is our replacement."""
        return self.patch.name in _in_place and vars(self.owner).get(self.name) is _in_place[self.patch.name]

    def put(self, replacement: Any) -> None:
        """Replace the attribute."""
        setattr(self.owner, self.name, replacement)
        _in_place[self.patch.name] = replacement


def apply_on_import(patch: Patch, module: ModuleType) -> None:
    """Apply a patch to a module that was just imported, unchecked: the patch takes effect only with omni.

    Does nothing if the target is missing, so that an untested vLLM runs as without this package.
    """
    try:
        slot = PatchTarget.of(patch, module)
    except AttributeError:
        return
    if slot.name in vars(slot.owner) and not slot.is_ours:
        slot.put(patch.wrap(slot.live))


def apply_all(patches: Iterable[Patch]) -> None:
    """Apply all patches that are not in place yet, or none if one of them fails. Their targets must have been checked.

    Raises:
        IncompatibleVllm: another package has replaced a target.
    """
    slots = [PatchTarget.of(patch, importlib.import_module(patch.target.partition(":")[0])) for patch in patches]
    todo = [slot for slot in slots if not slot.is_ours]
    for slot in todo:
        _refuse_foreign(slot)
    replacements = [slot.patch.wrap(slot.live) for slot in todo]
    for slot, replacement in zip(todo, replacements, strict=True):
        slot.put(replacement)


def _refuse_foreign(slot: PatchTarget) -> None:
    """Check that the function in memory was made from the checked text."""
    function = getattr(slot.live, "__func__", slot.live)
    if isinstance(function, FunctionType) and function.__code__.co_filename == slot.module.__file__:
        return
    origin = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
    raise IncompatibleVllm(
        f"{slot.patch.name}: {slot.patch.target} was already replaced by {origin}; "
        "remove the other plugin, or start vLLM without --omni"
    )
