"""Put one replacement in its place and remember it. Light: the start-up hook imports this in plain vLLM runs too."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_omni_ext.patching.spec import Patch, split_target

_in_place: dict[str, Any] = {}
"""Patch name -> the replacement that was put into vLLM; written last."""


@dataclass(frozen=True)
class Slot:
    """Where a patch goes: an attribute of a module or a class."""

    patch: Patch
    module: ModuleType
    owner: Any
    name: str

    @classmethod
    def of(cls, patch: Patch, module: ModuleType) -> Slot:
        """The slot of `patch` in the imported `module`."""
        *path, name = split_target(patch.target)[1].split(".")
        return cls(patch, module, functools.reduce(getattr, path, module), name)

    @property
    def live(self) -> Any:
        """What is there now."""
        return vars(self.owner)[self.name]

    @property
    def is_ours(self) -> bool:
        """True if our replacement is there."""
        return self.patch.name in _in_place and vars(self.owner).get(self.name) is _in_place[self.patch.name]

    def put(self, replacement: Any) -> None:
        """Replace what is there."""
        setattr(self.owner, self.name, replacement)
        _in_place[self.patch.name] = replacement


def apply_on_import(patch: Patch, module: ModuleType) -> None:
    """Apply a `when="import"` patch to a module that was just imported, unchecked: it acts only when omni is asked for.

    Does nothing if the target is not there, so that another vLLM than the tested one runs as without us.
    """
    try:
        slot = Slot.of(patch, module)
    except AttributeError:
        return
    if slot.name in vars(slot.owner) and not slot.is_ours:
        slot.put(patch.wrap(slot.live))


def is_applied(patch: Patch, module: ModuleType) -> bool:
    """True if `patch` is in place in the imported `module`."""
    return Slot.of(patch, module).is_ours
