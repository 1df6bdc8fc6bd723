"""Finds the input queue of a vLLM engine core, for code that the engine core's constructor calls (e.g. a scheduler)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc


def input_queue() -> Any:
    """Return the `input_queue` of the `EngineCoreProc` whose constructor is running; None for any other engine core.

    vLLM does not pass the engine core to its scheduler, so this function searches the call stack for the constructor.
    """
    frame = sys._getframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCoreProc):
            return core.input_queue
        frame = frame.f_back  # type: ignore[assignment]
    return None


def waker() -> Callable[[], None]:
    """Return a function that wakes the engine core whose constructor is running; any thread may call it.

    An engine core that sleeps on its input queue then checks whether its scheduler has work. For an engine core without
    an input queue the function does nothing.
    """
    inputs = input_queue()
    return lambda: None if inputs is None else inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))
