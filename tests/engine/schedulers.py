"""Parts of scheduler tests: a plugin's own scheduler, and vLLM's configuration of a tiny stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.engine.edge_receiver import Arrival, Lost
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args
from vllm_omni_ext.runtime.launch.inherit import register_classes
from vllm_omni_ext.wire.stage_input import HiddenStatesRef


class Arrivals:
    """Stands in for `EdgeReceiver`: announced hidden states are read at once, or when a test calls `read`.

    `found` are tensors [n, 1] of the numbers of the hidden states.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        self._at_once = at_once
        self.waiting: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}
        self._results: list[Arrival] = []

    def announce(self, req_id: str, ref: HiddenStatesRef) -> None:
        self.waiting.append((req_id, ref.count))
        if self._at_once:
            self.read(0)

    def read(self, which: int, *, lost: bool = False) -> str:
        """Read the announced hidden states `waiting[which]`, and those of the same request before; return its id."""
        req_id, count = self.waiting[which]
        self.waiting = [each for at, each in enumerate(self.waiting) if at > which or each[0] != req_id]
        first = self._counts.get(req_id, 0)
        self._counts[req_id] = max(first, count)
        states = torch.arange(first, self._counts[req_id]).view(-1, 1)
        self._results.append(Arrival(req_id, count, Lost("gone") if lost else states))
        return req_id

    def arrivals(self) -> list[Arrival]:
        found, self._results = self._results, []
        return found

    def forget(self, req_id: str) -> None:
        self.waiting = [each for each in self.waiting if each[0] != req_id]
        self._results = [each for each in self._results if each.req_id != req_id]
        self._counts.pop(req_id, None)

    def close(self) -> None:
        self.waiting.clear()


class OwnScheduler:
    """A scheduler of a plugin: the part of `SchedulerInterface` that the agent uses, and nothing of vLLM's."""

    pause_state = PauseState.UNPAUSED

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        self.queue: list[Request] = []
        self.shut_down = False

    def add_request(self, request: Request) -> None:
        self.queue.append(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        gone = [each for each in self.queue if each.request_id in request_ids]
        self.queue = [each for each in self.queue if each not in gone]
        self._ended.extend(each.request_id for each in gone)
        return gone

    def get_request_counts(self) -> tuple[int, int]:
        return 1, len(self.queue) - 1

    def get_kv_cache_usage(self) -> float:
        return 0.0

    def schedule(self) -> str:
        return "scheduled"

    def update_from_output(self, scheduled: str, output: str) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(scheduler_stats=SchedulerStats()), 1: EngineCoreOutputs()}

    def shutdown(self) -> None:
        self.shut_down = True


@contextmanager
def stage_config(folder: Path, stage: str, **engine: Any) -> Iterator[VllmConfig]:
    """vLLM's configuration of a stage of the tiny Qwen3-Omni, in the stage's environment."""
    write_qwen3_omni(folder / "model", seed=0)
    register_classes("qwen3_omni")
    plan = from_kwargs(str(folder / "model"), stage_overrides={stage: {"engine": engine}})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in plan.stage(stage).env.items():
            patch.setenv(name, value)
        yield stage_engine_args(plan, ReplicaId(stage, 0)).create_engine_config()


def runner_output(names: list[str], sampled: list[list[int]], pooled: list[Any] | None = None) -> ModelRunnerOutput:
    """The output of a step with these requests, in this order."""
    return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled, pooler_output=pooled)
