"""Names of vLLM that are in different modules, or differ in form, in the supported vLLM versions.

The modules `v0_32` and `v0_33` import the same names, each from its vLLM version. All other code imports the names from
this package, which uses the module of the installed version.
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
    """Return a name from the module of the installed vLLM version, and store it in this module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    version = nearest(vllm.__version__).replace(".", "_")
    found = getattr(importlib.import_module(f"{__name__}.v{version}"), name)
    globals()[name] = found
    return found
