"""Serves models of several stages, e.g. for text and sound, on stock vLLM; each stage runs in vLLM engine processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_ext.llm import OmniLLM, OmniRequestOutput
    from vllm_omni_ext.omni import AsyncOmni

__version__ = "0.1.0"
__all__ = ["AsyncOmni", "OmniLLM", "OmniRequestOutput", "__version__"]

_HOMES = {"AsyncOmni": "omni", "OmniLLM": "llm", "OmniRequestOutput": "llm"}


def __getattr__(name: str) -> Any:
    """Import a public class at its first use, because every vLLM process imports this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
