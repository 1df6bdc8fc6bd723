"""vLLM's names whose module or form differs between the supported versions of vLLM, chosen once by the version there.

`v0_32` and `v0_33` define the same names. All other code imports them from here and has no condition on a version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_ext.vllm_hooks.v0_32 import (
        VLLM_SUBCMD_PARSER_EPILOG,
        cli_env_setup,
        resolve_default_chat_template_kwargs,
        validate_parsed_serve_args,
    )

__all__ = [
    "VLLM_SUBCMD_PARSER_EPILOG",
    "cli_env_setup",
    "resolve_default_chat_template_kwargs",
    "validate_parsed_serve_args",
]


def module_for(version: str) -> str:
    """Return the module of a version, e.g. "v0_33" for "0.33.1+cpu"; a later minor version gets the newest module."""
    from packaging.version import Version

    release = Version(version).release[:2]
    return "v0_32" if release <= (0, 32) else "v0_33"


def __getattr__(name: str) -> Any:
    """Take the name from the module of the installed version."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    found = getattr(importlib.import_module(f"{__name__}.{module_for(vllm.__version__)}"), name)
    globals()[name] = found
    return found
