"""Applies one replacement and records it. Light, because the start-up hook imports it in plain vLLM runs too."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_omni_ext.patching.spec import Patch, split_target

_in_place: dict[str, Any] = {}
"""Patch name -> the replacement in vLLM; written last."""


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
        *path, name = split_target(patch.target)[1].split(".")
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
    """Apply a `when="import"` patch to a module that was just imported, unchecked: it takes effect only with omni.

    Does nothing if the target is missing, so that an untested vLLM runs as without this package.
    """
    try:
        slot = PatchTarget.of(patch, module)
    except AttributeError:
        return
    if slot.name in vars(slot.owner) and not slot.is_ours:
        slot.put(patch.wrap(slot.live))


def is_applied(patch: Patch, module: ModuleType) -> bool:
    """True if `patch` is in place in the imported `module`."""
    return PatchTarget.of(patch, module).is_ours
