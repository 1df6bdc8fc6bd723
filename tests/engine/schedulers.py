"""Parts of scheduler tests: a plugin's own scheduler, and vLLM's configuration of a tiny stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.cli.settings import from_kwargs
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.runtime.launch.engine_args import stage_engine_args
from vllm_omni_ext.runtime.launch.inherit import register_classes


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
