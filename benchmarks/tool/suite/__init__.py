"""The benchmarks by name, in the order in which they run."""

from __future__ import annotations

from types import ModuleType

from benchmarks.tool.suite import (
    api_servers,
    first_audio,
    handoff,
    memory,
    overhead,
    prefill_decode,
    replicas,
    startup,
)

_modules = (startup, memory, handoff, first_audio, overhead, replicas, api_servers, prefill_decode)
BENCHMARKS: dict[str, ModuleType] = {module.DESCRIPTION.name: module for module in _modules}
