"""Runs small ONNX models on the CPU, with one InferenceSession per file and process. `aside` runs calls in threads."""

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
"""Number of threads of an API server that run the models, for all connections together."""

EXTRA = "pip install 'vllm-omni-ext[realtime]'"
ERRORS_ONLY = 3
"""Lowest severity that ONNX Runtime logs. Its warnings are about unused initializers in the model files."""

_loading = threading.Lock()
_sessions: dict[Path, Any] = {}


def packaged(module: str, file: str) -> Path | None:
    """Return the path of a data file in an installed package, without an import of the package; None if missing.

    Args:
        module: the package's top-level module.
        file: path of the file in the module's folder.
    """
    spec = find_spec(module)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((found for folder in folders if (found := Path(folder, file)).is_file()), None)


def require_runtime(wanted_by: str) -> None:
    """Raise ConfigError if ONNX Runtime is not installed.

    Args:
        wanted_by: name of the setting that needs it, e.g. "server_vad"; the message begins with it.
    """
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
    """Run `call` in one of the `THREADS` threads, and return its result. The event loop is not blocked."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), call, *args)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="omni-vad")
