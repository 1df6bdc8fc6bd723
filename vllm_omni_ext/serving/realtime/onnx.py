"""Small ONNX models on the CPU: one session a file and process, one thread a call, calls in threads of their own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from vllm_omni_ext.errors import ConfigError

Result = TypeVar("Result")

THREADS = 2
"""Of an API server, for the calls of all connections."""

EXTRA = "pip install 'vllm-omni-ext[realtime]'"
ERRORS_ONLY = 3
"""Severity from which ONNX Runtime writes log lines; its warnings are about unused initializers of the files."""

_loading = threading.Lock()
_sessions: dict[Path, Any] = {}


def packaged(module: str, file: str) -> Path | None:
    """Return a data file of an installed package, without importing it; None if there is none.

    Args:
        module: the package's top-level module.
    """
    spec = find_spec(module)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((found for folder in folders if (found := Path(folder, file)).is_file()), None)


def require_runtime(wanted_by: str) -> None:
    """Raise ConfigError, which begins with `wanted_by`, unless ONNX Runtime is installed."""
    if find_spec("onnxruntime") is None:
        raise ConfigError(f"{wanted_by}: onnxruntime is not installed; run: {EXTRA}")


def session(file: Path) -> Any:
    """Return the `onnxruntime.InferenceSession` of a file; the first call in a process loads it."""
    with _loading:
        if file not in _sessions:
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = ERRORS_ONLY
            _sessions[file] = onnxruntime.InferenceSession(os.fspath(file), options, providers=["CPUExecutionProvider"])
        return _sessions[file]


async def aside(call: Callable[..., Result], *args: Any) -> Result:
    """Return the result of a call in one of `THREADS` threads; the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), call, *args)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="omni-vad")
