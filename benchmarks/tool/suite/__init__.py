"""The benchmarks by name, in the order in which they run."""

from __future__ import annotations

from types import ModuleType

from benchmarks.tool.suite import (
    api_servers,
    first_audio,
    handoff,
    layouts,
    memory,
    overhead,
    prefill_decode,
    replicas,
    silence,
    speakers,
    startup,
)

_modules = (
    startup, memory, handoff, first_audio, silence, overhead, replicas, layouts, speakers, api_servers, prefill_decode,
)  # fmt: skip
BENCHMARKS: dict[str, ModuleType] = {module.DESCRIPTION.name: module for module in _modules}
