"""vLLM's names whose module or form differs between the supported versions of vLLM, chosen once by the version there.

`v0_32` and `v0_33` define the same names. All other code imports them from here and has no condition on a version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_omni_ext.patching.seams import nearest

if TYPE_CHECKING:
    from vllm_omni_ext.vllm_hooks.v0_32 import (
        VLLM_SUBCMD_PARSER_EPILOG,
        cli_env_setup,
        validate_parsed_serve_args,
    )

__all__ = [
    "VLLM_SUBCMD_PARSER_EPILOG",
    "cli_env_setup",
    "validate_parsed_serve_args",
]


def __getattr__(name: str) -> Any:
    """Take the name from the module of the installed version."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    version = nearest(vllm.__version__).replace(".", "_")
    found = getattr(importlib.import_module(f"{__name__}.v{version}"), name)
    globals()[name] = found
    return found
