"""A worker extension of vLLM (`worker_extension_cls`) that measures the phases ("parts") of an engine's steps.

vLLM loads it into the engine's process. Nothing is wrapped before `start_step_times` is called.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

EXTENSION = "step_times.StepTimes"
STEP = "_process_engine_step"


class StepTimes:
    """Methods that `collective_rpc` can call on any stage's worker."""

    def start_step_times(self) -> None:
        """Begin to measure: wrap the functions that a step calls. A second call does nothing."""
        if hasattr(self, "_step_seconds"):
            return
        self._step_seconds: dict[str, float] = defaultdict(float)
        self._step_count = 0
        self._step_log: list[tuple[float, float]] = []
        self._wrapped_core = False
        self._cpu_began = time.process_time()
        setattr(EngineCoreProc, STEP, self._timed_step(getattr(EngineCoreProc, STEP)))

    def take_step_times(self) -> dict[str, float]:
        """Return the measurements since the last call, by name.

        They are seconds by wrapped function and of "step"; "count", the number of steps; and "cpu", the CPU seconds of
        all threads of the process.
        """
        now = time.process_time()
        taken = {**self._step_seconds, "count": float(self._step_count), "cpu": now - self._cpu_began}
        self._step_seconds.clear()
        self._step_count, self._cpu_began = 0, now
        return taken

    def take_step_log(self) -> list[tuple[float, float]]:
        """Return (begin, end) of every step since the last call, in seconds of this machine's monotonic clock."""
        taken, self._step_log = self._step_log, []
        return taken

    def _timed_step(self, step: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def run(core: Any) -> bool:
            if not self._wrapped_core:
                self._wrap(core)
            began = time.monotonic()
            executed = step(core)
            if executed:
                ended = time.monotonic()
                self._step_seconds["step"] += ended - began
                self._step_log.append((began, ended))
                self._step_count += 1
            return executed

        return run

    def _wrap(self, core: Any) -> None:
        self._wrapped_core = True
        parts = [(core.scheduler, "schedule"), (core.scheduler, "update_from_output"), (self, "execute_model")]
        parts += [(self, "sample_tokens")] if hasattr(self, "sample_tokens") else []
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        parts += [(model, "forward")]
        if (input_provider := getattr(model, "input_provider", None)) is not None:
            parts += [(input_provider, "rows"), (input_provider, "sampled")]
        for owner, name in parts:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._step_seconds[name] += time.perf_counter() - began

        return run


def parts_of(seconds: dict[str, float]) -> dict[str, float]:
    """Return the mean milliseconds of a step by part.

    The parts do not overlap, and "step" is the whole step. "cpu" is the CPU time.

    Args:
        seconds: the result of `StepTimes.take_step_times`.
    """
    count = seconds.get("count") or 1.0

    def ms(*names: str) -> float:
        return 1e3 * sum(seconds.get(name, 0.0) for name in names) / count

    inner = ms("schedule", "execute_model", "sample_tokens", "update_from_output")
    return {
        "schedule": ms("schedule"),
        "input rows": ms("rows"),
        "prepare": ms("execute_model") - ms("rows", "forward"),
        "forward": ms("forward"),
        "sample": ms("sample_tokens") - ms("sampled"),
        "code predictor": ms("sampled"),
        "update": ms("update_from_output"),
        "rest": ms("step") - inner,
        "step": ms("step"),
        "cpu": ms("cpu"),
    }
