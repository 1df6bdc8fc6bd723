"""Checks single values of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_omni_ext.errors import RequestError


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value`. Raises RequestError: it is not in `allowed`; the error lists the allowed values."""
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name}: {value!r:.100} is not available; use {', '.join(allowed)}", parameter=name)
    return value


def flag(name: str, given: Any) -> bool:
    """Return `given` as bool; None is False. Raises RequestError: the value is neither a bool nor None."""
    if given is not None and not isinstance(given, bool):
        raise RequestError(f"{name}: must be true or false, got {given!r:.100}", parameter=name)
    return bool(given)


def whole_number(name: str, given: Any, default: int, lowest: int, highest: int) -> int:
    """Return `given`, or the default if it is None. Raises RequestError: not an integer in `lowest` to `highest`."""
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, int) or not lowest <= given <= highest:
        wanted = f"an integer from {lowest} to {highest}"
        raise RequestError(f"{name}: must be {wanted}, got {given!r:.100}", parameter=name)
    return given
