"""Checks whether a patch or a seam fits a vLLM source tree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.fingerprint import fingerprint
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import (
    TESTED_VLLM,
    Patch,
    Seam,
    TargetDrifted,
    TargetMissing,
    VersionOutOfRange,
    split_target,
)

ALLOW_DRIFT = "VLLM_OMNI_EXT_ALLOW_DRIFT"
"""Environment variable: names, separated by commas, whose drift is accepted. There is no "all"."""

State = Literal["fits", "drift allowed", "out of range", "missing", "drifted"]


@dataclass(frozen=True)
class Finding:
    """How well one patch or seam fits, and the error to raise if it does not."""

    item: Patch | Seam
    state: State
    error: IncompatibleVllm | None = None


def in_range(version: str, tested: str = TESTED_VLLM) -> bool:
    """True if `version` is in the PEP 440 range; pre-releases and local builds count by their number."""
    return SpecifierSet(tested).contains(version, prereleases=True)


def allowed_drift(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The names the user accepts although their target changed."""
    return frozenset(name.strip() for name in environ.get(ALLOW_DRIFT, "").split(",") if name.strip())


def inspect(item: Patch | Seam, source: VllmSource, *, allowed: frozenset[str] = frozenset()) -> Finding:
    """Check `item`: version first, then the target, then its code."""
    version = source.version
    if not in_range(version, item.vllm):
        what = f"{item.name}: tested with vLLM {item.vllm}, found {version}; install a vLLM in that range"
        return Finding(item, "out of range", VersionOutOfRange(what))
    code = source.definition(*split_target(item.target))
    if code is None:
        what = f"{item.name}: vLLM {version} has no {item.target}; install a vLLM release in {item.vllm}"
        return Finding(item, "missing", TargetMissing(what))
    found = fingerprint(code)
    if found in item.seen:
        return Finding(item, "fits")
    if item.name in allowed:
        return Finding(item, "drift allowed")
    what = (
        f"{item.name}: {item.target} changed in vLLM {version} (fingerprint {found}, written against "
        f"{', '.join(sorted(item.seen))}); read the difference and add the fingerprint to `seen`, "
        f"or accept it for now with {ALLOW_DRIFT}={item.name}"
    )
    return Finding(item, "drifted", TargetDrifted(what))


def inspect_all(items: Iterable[Patch | Seam], source: VllmSource, *, allowed: frozenset[str]) -> list[Finding]:
    """One finding per item, in order."""
    return [inspect(item, source, allowed=allowed) for item in items]


def check(items: Iterable[Patch | Seam], source: VllmSource, *, allowed: frozenset[str]) -> None:
    """Raise an error that names every item that does not fit."""
    errors = [finding.error for finding in inspect_all(items, source, allowed=allowed) if finding.error is not None]
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else IncompatibleVllm
    raise kind("\n".join(str(error) for error in errors))
