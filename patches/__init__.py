"""What this package changes in vLLM, in the order of application: one file a patch, all of them listed in ALL.

The patches are imported when ALL is asked for: a plain vLLM imports the one that it meets in any case, and no other.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm_omni_ext.patching.spec import Patch

NAMES = ("llm_omni_keyword", "engine_input_sockets", "engine_output_sockets")
"""Of the modules of this package, in the order of application."""

ALL: tuple[Patch, ...]


def __getattr__(name: str) -> Any:
    """Make ALL when somebody wants it for the first time."""
    if name != "ALL":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = tuple(importlib.import_module(f"{__name__}.{each}").PATCH for each in NAMES)
    globals()[name] = found
    return found
