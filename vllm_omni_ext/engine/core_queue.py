"""Finds the input queue of an engine from a function that the engine's constructor calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc


def input_queue() -> Any:
    """Return the input queue of the engine whose constructor is running; None for an engine without a queue.

    vLLM does not pass its engine core on, so the stack is searched: `EngineCoreProc.__init__` is running.
    """
    frame = sys._getframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCoreProc):
            return core.input_queue
        frame = frame.f_back  # type: ignore[assignment]
    return None


def waker() -> Callable[[], None]:
    """Return a function that wakes the engine whose constructor is running, from any thread.

    A sleeping engine then checks whether its scheduler has work. The function does nothing without a queue.
    """
    inputs = input_queue()
    return lambda: None if inputs is None else inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))
