"""Frees exported hidden states of requests that were aborted during the step that exported them.

vLLM drops the output of such a step, and with it the only reference to the exported hidden states.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, unpack


class OrphanedExports(Scheduler):
    """Sends the names of hidden states that no stage will take to the worker, with the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._orphaned: list[str] = []
        super().__init__(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Process a step's output, and note exports of requests that were aborted during the step."""
        tensors = model_runner_output.pooler_output or ()
        for req_id, tensor in zip(model_runner_output.req_ids, tensors, strict=False):
            request = self.requests.get(req_id)
            if tensor is not None and (request is None or request.is_finished()):
                message = unpack(tensor)
                if isinstance(message, HiddenStatesChunkReady):
                    self._orphaned.append(message.name)
        return super().update_from_output(scheduler_output, model_runner_output)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step, with the names of hidden states to free."""
        output = super().schedule(throttle_prefills)
        output.orphaned, self._orphaned = self._orphaned, []  # type: ignore[attr-defined]
        return output

    def has_requests(self) -> bool:
        """Return whether there are requests, or hidden states to free."""
        return super().has_requests() or bool(self._orphaned)
