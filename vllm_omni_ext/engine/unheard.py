"""Schedulers of a stage that exports rows: what was put for a request that ended in the same step is freed.

The notice of such rows is thrown away with the request's last output, so that nobody else could know of them.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni_ext.engine.report import ReportMixin
from vllm_omni_ext.wire.rows import Notice


class UnheardMixin(ReportMixin):
    """Tells the worker, with the next step, names of rows of which nobody will hear."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unheard: list[str] = []
        super().__init__(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Take a step's results; requests that were aborted meanwhile get none."""
        tensors = model_runner_output.pooler_output or ()
        for req_id, tensor in zip(model_runner_output.req_ids, tensors, strict=False):
            request = self.requests.get(req_id)
            if tensor is not None and (request is None or request.is_finished()):
                self._unheard.append(Notice.of(tensor).name)
        return super().update_from_output(scheduler_output, model_runner_output)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step."""
        output = super().schedule(throttle_prefills)
        output.unheard, self._unheard = self._unheard, []  # type: ignore[attr-defined]
        return output

    def has_requests(self) -> bool:
        """Whether there is something to do."""
        return super().has_requests() or bool(self._unheard)


class UnheardScheduler(UnheardMixin):
    """For engines without async scheduling."""


class UnheardAsyncScheduler(UnheardMixin, AsyncScheduler):
    """For engines with async scheduling."""


def export_scheduler(**kwargs: Any) -> UnheardMixin:
    """Build the scheduler vLLM would; vLLM calls `scheduler_cls` with keywords only."""
    cls = UnheardAsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else UnheardScheduler
    return cls(**kwargs)
