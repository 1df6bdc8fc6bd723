"""Checks the seams of a package: the symbols of vLLM that the package depends on.

`seams.toml` in the package lists the symbols, each with the reason, and the attributes that are replaced at run time.
`fingerprints/0.32.json` has the fingerprints of those symbols that vLLM 0.32 has; `vllm-omni-ext doctor
--write-fingerprints` writes the file. A vLLM version is supported if the core has such a file for it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from packaging.version import Version

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patching.source import VllmSource, fingerprint

CORE = "vllm_omni_ext.patching"
"""Name of the package with the `seams.toml` and the fingerprints of the core."""

AT_START, BY_DOCTOR = GROUPS = ("checked_at_start", "checked_by_doctor")
"""Groups of symbols in `seams.toml`. `AT_START`: symbols that patches and overrides replace or depend on, compared at
each start. `BY_DOCTOR`: all others, compared by `vllm-omni-ext doctor`."""

ALLOW_DRIFT = "VLLM_OMNI_EXT_ALLOW_DRIFT"
"""Environment variable with the symbols, separated by commas, whose changes are accepted.

No value accepts the changes of all symbols.
"""

Fingerprints = Mapping[str, Mapping[str, str]]
"""Group (one of `GROUPS`) -> symbol -> fingerprint, a hash of the symbol's source (`source.fingerprint`)."""


@dataclass(frozen=True)
class Finding:
    """The result of the check of one symbol.

    Attributes:
        state: "fits", "drift allowed" (changed, but accepted by the user), "missing" or "drifted" (changed).
        error: text for the states "missing" and "drifted"; else "".
    """

    target: str
    state: str
    error: str = ""


def seams(package: str) -> dict[str, dict[str, str]]:
    """Return the symbols in the package's `seams.toml` as group -> symbol -> reason for the dependency.

    A symbol is written e.g. "vllm.v1.engine.utils:launch_core_engines".
    """
    data = _listed(package)
    return {
        group: {f"{module}:{name}": use for module, rows in data.get(group, {}).items() for name, use in rows.items()}
        for group in GROUPS
    }


def overrides(package: str) -> list[dict[str, str]]:
    """Return the rows `overrides` of the package's `seams.toml`, one for each attribute that it replaces at run time.

    The keys of a row are `target`, `where`, `scope`, `why` and `remove_when`.
    """
    found: list[dict[str, str]] = _listed(package).get("overrides", [])
    return found


def versions(package: str = CORE) -> list[str]:
    """Return the vLLM versions for which the package has fingerprints, the oldest first, e.g. ["0.32", "0.33"]."""
    folder = _data(package, "fingerprints")
    files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted((name.removesuffix(".json") for name in files if name.endswith(".json")), key=Version)


def is_supported(version: str) -> bool:
    """Return whether the core has fingerprints of this vLLM version; only major and minor number are compared."""
    return series(version) in versions()


def series(version: str) -> str:
    """Return the major and minor number of a version, e.g. "0.32" for "0.32.1rc2"; fingerprints are stored under it."""
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor}"


def nearest(version: str, package: str = CORE) -> str:
    """Return the version whose fingerprints are used for a vLLM version.

    That is the newest version with fingerprints that is not newer than `version`; if there is none, the oldest.

    Raises:
        IncompatibleVllm: the package has no fingerprints.
    """
    known = versions(package)
    if not known:
        remedy = f"run `vllm-omni-ext doctor --write-fingerprints {package}`"
        raise IncompatibleVllm(f"{package} has no fingerprints; {remedy}")
    return max((each for each in known if Version(each) <= Version(series(version))), key=Version, default=known[0])


def fingerprints(package: str, version: str) -> Fingerprints:
    """Return the stored fingerprints of a package that are used for a vLLM version (see `nearest`)."""
    data: Fingerprints = json.loads(_data(package, "fingerprints", f"{nearest(version, package)}.json").read_text())
    return data


def measured(package: str, source: VllmSource, patched: Iterable[str] = ()) -> Fingerprints:
    """Compute the fingerprints of the package's symbols in a vLLM source tree, without symbols that it does not have.

    Args:
        patched: targets of patches, which are added to the group `AT_START`.
    """
    listed = {group: [*rows, *(patched if group == AT_START else ())] for group, rows in seams(package).items()}
    return {
        group: {target: fingerprint(code) for target in sorted(targets) if (code := source.definition(target))}
        for group, targets in listed.items()
    }


def allowed_drift(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the symbols whose changes the user accepts, from `ALLOW_DRIFT`."""
    return frozenset(name.strip() for name in environ.get(ALLOW_DRIFT, "").split(",") if name.strip())


def inspect_all(expected: Mapping[str, str], source: VllmSource, allowed: frozenset[str]) -> list[Finding]:
    """Compare each symbol with its expected fingerprint.

    Args:
        expected: symbol -> fingerprint.
        allowed: symbols whose changes are accepted.
    """
    return [_inspect(target, seen, source, target in allowed) for target, seen in expected.items()]


def check(expected: Mapping[str, str], source: VllmSource, *, allowed: frozenset[str] | None = None) -> None:
    """Raise IncompatibleVllm if symbols are missing or changed; the message contains all of them.

    Args:
        expected: symbol -> fingerprint.
        allowed: symbols whose changes are accepted; None: those of `allowed_drift`.
    """
    findings = inspect_all(expected, source, allowed_drift() if allowed is None else allowed)
    if errors := [finding.error for finding in findings if finding.error]:
        raise IncompatibleVllm("\n".join(errors))


def _inspect(target: str, seen: str, source: VllmSource, allowed: bool) -> Finding:
    code = source.definition(target)
    if code is None:
        return Finding(target, "missing", f"vLLM {source.version} has no {target}")
    if (found := fingerprint(code)) == seen:
        return Finding(target, "fits")
    if allowed:
        return Finding(target, "drift allowed")
    error = (
        f"{target} changed in vLLM {source.version} (fingerprint {found}, tested with {seen}); `vllm-omni-ext doctor "
        f"--against VERSION` shows the difference from another vLLM, {ALLOW_DRIFT}={target} accepts it for now"
    )
    return Finding(target, "drifted", error)


def _listed(package: str) -> dict[str, Any]:
    return tomllib.loads(_data(package, "seams.toml").read_text(encoding="utf-8"))


def _data(package: str, *names: str) -> Traversable:
    return resources.files(package).joinpath(*names)
