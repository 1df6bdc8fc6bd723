"""The patches of vLLM, in the order of application: one file per patch, all of them listed in ALL.

The patches are imported on first access to ALL. A plain vLLM run imports only the patch that it triggers in any case.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm_omni_ext.patching.spec import Patch

NAMES = ("llm_omni_keyword", "engine_input_sockets", "engine_output_sockets")
"""Names of the modules of this package, in the order of application."""

ALL: tuple[Patch, ...]


def __getattr__(name: str) -> Any:
    """Make ALL on first access."""
    if name != "ALL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = tuple(importlib.import_module(f"{__name__}.{each}").PATCH for each in NAMES)
    globals()[name] = found
    return found
