"""Multi-stage (omni-modal) models on stock vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_ext.llm import OmniLLM, OmniRequestOutput
    from vllm_omni_ext.omni import AsyncOmni

__version__ = "0.1.0"
__all__ = ["AsyncOmni", "OmniLLM", "OmniRequestOutput", "__version__"]

_HOMES = {"AsyncOmni": "omni", "OmniLLM": "llm", "OmniRequestOutput": "llm"}


def __getattr__(name: str) -> Any:
    """Import the public classes on first use: the package itself is imported in every vLLM process."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
