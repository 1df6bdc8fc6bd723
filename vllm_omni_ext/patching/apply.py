"""Puts replacements in place: all or none, once per process."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import FunctionType

from vllm_omni_ext.patching.check import allowed_drift, check
from vllm_omni_ext.patching.patch_target import PatchTarget
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Patch, PatchConflict, When, split_target


def apply_all(
    patches: Sequence[Patch], source: VllmSource, *, when: When = "omni", allowed: frozenset[str] | None = None
) -> list[str]:
    """Check every patch against `source`, then apply the missing ones. Returns the names of those.

    If one does not fit, none is applied. Patches with another `when` are only checked.
    """
    check(patches, source, allowed=allowed_drift() if allowed is None else allowed)
    _refuse_two_on_one_target(patches)
    slots = [_slot(patch) for patch in patches if patch.when == when]
    todo = [slot for slot in slots if not slot.is_ours]
    for slot in todo:
        _refuse_foreign(slot, source)
    replacements = [slot.patch.wrap(slot.live) for slot in todo]
    for slot, replacement in zip(todo, replacements, strict=True):
        slot.put(replacement)
    return [slot.patch.name for slot in todo]


def _slot(patch: Patch) -> PatchTarget:
    return PatchTarget.of(patch, importlib.import_module(split_target(patch.target)[0]))


def _refuse_two_on_one_target(patches: Sequence[Patch]) -> None:
    claimed: dict[str, Patch] = {}
    for patch in patches:
        other = claimed.setdefault(patch.target, patch)
        if other is not patch:
            raise PatchConflict(
                f"{patch.name}: {patch.target} is already changed by {other.name}; join the two patches"
            )


def _refuse_foreign(slot: PatchTarget, source: VllmSource) -> None:
    """Check that the object in memory was made from the checked text.

    A definition with decorators is not checked: its outermost function may come from anywhere.
    """
    code = source.definition(*split_target(slot.patch.target)) or ""
    function = getattr(slot.live, "__func__", slot.live)
    if code.startswith("@") or not callable(function):
        return
    if isinstance(function, FunctionType) and function.__code__.co_filename == slot.module.__file__:
        return
    if isinstance(function, type) and function.__module__ == slot.module.__name__:
        return
    origin = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
    raise PatchConflict(
        f"{slot.patch.name}: {slot.patch.target} was already replaced by {origin}; "
        "remove the other plugin, or start vLLM without --omni"
    )
