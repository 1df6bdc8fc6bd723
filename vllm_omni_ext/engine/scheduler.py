"""vLLM's schedulers with the additions that a stage needs: `scheduler_factory`.

`StreamingInput` is for a stage whose inputs arrive in chunks. A chunk is a second ADD with a known request id (see
`wire.stage_input`). A request is computed as far as its input has arrived: vLLM calls `_reserve_prefill_lookahead` for
every request of a step, and the override limits the number of tokens. A request whose next input is missing is held
with vLLM's own `next_decode_eligible_step`. If all requests are held, the engine reports no work and sleeps on its
input queue until the next chunk, request, abort or arrival of hidden states.

Hidden states of another stage are announced by chunks. `edge_receiver.EdgeReceiver` reads them in threads of its own
and wakes the engine. They count as input when they have been read, and go to the workers with the step that needs them.

The prefix cache of such a stage has the keys that come with a request (`StageInput.prefix_keys`), since the token ids
of the engine's prompt do not determine the input embeddings. A block enters the cache after the step that computed it,
unless hidden states of the step were lost. A request for which the cache has blocks waits until the position after
them can be computed.

`DueFirst` is for a stage whose outputs are due at known times. vLLM's own policy `priority` orders the requests by the
time at which each is due. Steps are short, so that a request that is due soon waits only briefly for the running step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.config.schema import INCOMING
from vllm_omni_ext.engine.core_queue import waker
from vllm_omni_ext.engine.edge_receiver import Lost
from vllm_omni_ext.engine.edges import edge_receiver
from vllm_omni_ext.engine.input_progress import InputProgress
from vllm_omni_ext.engine.input_provider import scheduled_starts
from vllm_omni_ext.engine.kept_exports import KeptExports
from vllm_omni_ext.engine.output_groups import OutputGroup
from vllm_omni_ext.engine.step_budget import StepBudget
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError, unpack
from vllm_omni_ext.wire.stage_input import KEY_POSITIONS, StageInput


class StreamingInput(Scheduler):
    """Holds requests until their input has arrived, and sends it to the worker with the step that uses it.

    If an edge leads to the stage, hidden states of another stage arrive over that edge. The outputs of a request with
    `StageInput.group` are joined (`output_groups.OutputGroup`).
    """

    edge = ""
    """Name of the edge over which hidden states arrive; "": the stage's only incoming edge, if it has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._progress: dict[str, InputProgress] = {}
        self._chunks: dict[str, list[StageInput]] = {}
        self._arrived: dict[str, list[torch.Tensor | Lost]] = {}
        self._parked: dict[str, Request] = {}
        self._groups: dict[str, OutputGroup] = {}
        self._blocked = False
        super().__init__(*args, **kwargs)
        additional = self.vllm_config.additional_config
        incoming = self.edge or additional.get(INCOMING)
        self._receiver = edge_receiver(additional, self.edge, wake=waker()) if incoming else None
        if self.cache_config.enable_prefix_caching and isinstance(self, AsyncScheduler):
            # It caches blocks itself: also those without keys, and those whose input was lost.
            raise ConfigError(
                "async_scheduling: the prefix cache of a stage whose input arrives in chunks needs false; set "
                "async_scheduling: false, or enable_prefix_caching: false"
            )
        if self.cache_config.enable_prefix_caching and self.hash_block_size % KEY_POSITIONS:
            raise ConfigError(
                f"block_size: {self.hash_block_size} is not a multiple of {KEY_POSITIONS}, which the prefix cache of "
                "this stage needs; use another block_size, or enable_prefix_caching: false"
            )
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_without_caching  # type: ignore[method-assign]

    def _allocate_without_caching(self, *args: Any, **kwargs: Any) -> Any:
        return self._allocate(*args, **{**kwargs, "delay_cache_blocks": True})

    def has_request(self, request_id: str) -> bool:
        """Return whether the request is here, parked or not: a paused engine of vLLM 0.33 takes chunks of these."""
        return request_id in self.requests or request_id in self._parked

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running, waiting + len(self._parked)

    def add_request(self, request: Request) -> None:
        """Add a request, or a chunk to the request of the same id; chunks of ended requests are dropped."""
        self._blocked = False
        stage_input, is_chunk = StageInput.of(request.sampling_params.extra_args)
        if is_chunk:
            self._add_chunk(request.request_id, stage_input)
            return
        self._progress[request.request_id] = InputProgress.of(stage_input, request.num_prompt_tokens)
        if stage_input.group > 1:
            self._groups[request.request_id] = OutputGroup(stage_input.group, stage_input.rate)
        # vLLM's hashes are those of the prompt's token ids.
        keys_a_block = self.hash_block_size // KEY_POSITIONS
        request.block_hashes = list(map(BlockHash, stage_input.prefix_keys[keys_a_block - 1 :: keys_a_block]))
        request._block_hasher = None
        self._announce(request.request_id, stage_input)
        if self._can_begin(request):
            super().add_request(request)
        else:
            self._parked[request.request_id] = request

    def _add_chunk(self, req_id: str, chunk: StageInput) -> None:
        progress = self._progress.get(req_id)
        if progress is None:  # the request has ended: its last output reports that to the sender
            return
        progress.add(chunk)
        self._announce(req_id, chunk)
        self._chunks.setdefault(req_id, []).append(chunk)
        self._begin_parked(req_id)

    def _announce(self, req_id: str, stage_input: StageInput) -> None:
        if stage_input.hidden_states is None:
            return
        if self._receiver is None:
            raise ConfigError("edges: hidden states were announced to a stage to which no tensor edge leads")
        self._receiver.announce(req_id, stage_input.hidden_states)

    def _take_arrivals(self) -> None:
        """Count the hidden states that have been read since the last call."""
        for arrival in () if self._receiver is None else self._receiver.arrivals():
            self._blocked = False
            self._progress[arrival.req_id].arrived(arrival.count)
            self._arrived.setdefault(arrival.req_id, []).append(arrival.found)
            self._begin_parked(arrival.req_id)

    def _begin_parked(self, req_id: str) -> None:
        if req_id in self._parked and self._can_begin(self._parked[req_id]):
            super().add_request(self._parked.pop(req_id))

    def _can_begin(self, request: Request) -> bool:
        """Return whether position 0, and the first position after the blocks in the prefix cache, can be computed."""
        progress = self._progress[request.request_id]
        return progress.continues(0) and progress.continues(self.kv_cache_manager.get_computed_blocks(request)[1])

    def _get_local_prefix_cache_hit(self, request: Request, *limits: Any) -> Any:
        found, hit, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limits)
        progress = self._progress.get(request.request_id)
        if progress is None:
            return found, hit, boundary, diverged
        usable = hit
        while not progress.continues(usable) and usable > 0:
            usable -= self.block_size
        progress.cached = usable
        if usable < hit:
            found = self.kv_cache_manager.truncate_computed_blocks(found, usable)
        return found, usable, boundary, diverged

    def _starved(self, request: Request) -> bool:
        progress = self._progress.get(request.request_id)
        limit = None if progress is None else progress.limit()
        return limit is not None and request.num_computed_tokens >= limit

    def _stuck(self, request: Request) -> bool:
        return not request.num_in_flight_tokens and self._starved(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._blocked = False
        super()._preempt_request(request, *args, **kwargs)

    def _preempt_all(self) -> None:
        now = time.monotonic()
        while self.running:
            self._preempt_request(self.running.pop(), now)
        self.prev_step_scheduled_req_ids.clear()

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        progress = self._progress.get(request.request_id)
        limit = None if progress is None else progress.limit()
        return count if limit is None else max(0, min(count, limit - num_computed_tokens))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step without the requests whose input is missing.

        A pause that waits for running requests (`PAUSED_NEW`) completes when no running request has input: the stage
        that sends the missing input may be paused too. These requests are preempted. They run again after the pause.
        """
        self._take_arrivals()
        if self.pause_state is PauseState.PAUSED_NEW and all(map(self._stuck, self.running)):
            self._preempt_all()
        for request in self.running:
            if self._starved(request):
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        output = super().schedule(throttle_prefills)
        due = [req_id for req_id in output.num_scheduled_tokens if req_id in self._chunks]
        output.chunks = {req_id: self._chunks.pop(req_id) for req_id in due}  # type: ignore[attr-defined]
        read = [req_id for req_id in output.num_scheduled_tokens if req_id in self._arrived]
        output.arrived = {req_id: self._arrived.pop(req_id) for req_id in read}  # type: ignore[attr-defined]
        # During a pause a step computes nothing although waiting requests may have places.
        unpaused = self.pause_state is PauseState.UNPAUSED
        self._blocked = unpaused and not output.num_scheduled_tokens and self._needs_input()
        return output

    def _needs_input(self) -> bool:
        """Return whether only new input, or the end of a request, can make a step compute something.

        That is so after a step without tokens if all running requests lack input: they have the places, or the memory,
        of the waiting requests.
        """
        queued = all(each.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for each in self.waiting)
        return self.connector is None and bool(self.running) and queued and all(map(self._starved, self.running))

    def has_requests(self) -> bool:
        self._take_arrivals()
        if not super().has_requests():
            return False
        if self.pause_state is PauseState.PAUSED_NEW:  # the next step preempts them
            return True
        if self._blocked and not self.has_finished_requests():
            return False
        if self.has_finished_requests() or len(self.waiting) or len(self.kv_holding_waiting):
            return True
        return any(not self._starved(request) for request in self.running)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update as vLLM does, and join outputs of requests with groups.

        Requests end that the worker has ended, or for which it returns a `StageError`.
        """
        if scheduler_output.num_scheduled_tokens:
            self._blocked = False
        self._cache_blocks(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        ended = frozenset(getattr(model_runner_output, "ended", ()))
        for each in chain.from_iterable(group.outputs for group in outputs.values()):
            if each.request_id in ended and each.finish_reason is None:
                self.finish_requests(each.request_id, RequestStatus.FINISHED_STOPPED)
                each.finish_reason = FinishReason.STOP
            if each.pooling_output is not None and isinstance(unpack(each.pooling_output), StageError):
                self.finish_requests(each.request_id, RequestStatus.FINISHED_ERROR)
                each.finish_reason = FinishReason.ERROR
        return self._joined(outputs) if self._groups else outputs

    def _joined(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Return the outputs to send now: those of requests with a group are joined with held ones, or held.

        The held outputs of a request are sent if its next step may not follow soon: it lacks input, or is preempted.
        """
        now, groups = time.monotonic(), self._groups
        for group in outputs.values():
            sent: list[EngineCoreOutput] = []
            for each in group.outputs:
                if (joiner := groups.get(each.request_id)) is None:
                    sent.append(each)
                    continue
                joiner.add(each, now, sent)
                if each.finish_reason is not None:
                    del groups[each.request_id]
            group.outputs = sent
        for name, joiner in tuple(groups.items()):
            if (request := self.requests.get(name) or self._parked.get(name)) is None:
                del groups[name]
            elif joiner.held and (request.status is not RequestStatus.RUNNING or self._stuck(request)):
                joiner.take(outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs)
        return {client: group for client, group in outputs.items() if _has_news(group)}

    def _cache_blocks(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Add the blocks that a step has computed to the prefix cache, if they have keys and no input was lost."""
        starts: dict[str, int] | None = None
        for index, req_id in enumerate(result.req_ids):
            request = self.requests.get(req_id)
            if request is None or not request.block_hashes:
                continue
            starts = scheduled_starts(step) if starts is None else starts
            keyed = len(request.block_hashes) * self.hash_block_size
            start, stop = starts[req_id], starts[req_id] + step.num_scheduled_tokens[req_id]
            preempted = request.num_computed_tokens < stop or request.num_stale_output_tokens
            if start >= keyed or preempted:
                continue
            tensor = result.pooler_output[index] if result.pooler_output else None
            if tensor is None or not isinstance(unpack(tensor), StageError):
                self.kv_cache_manager.cache_blocks(request, min(stop, keyed))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """End requests, including held requests; return the requests that have ended, whose clients vLLM notifies."""
        self._blocked = False
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        names = list(self._progress) if request_ids is None else list(request_ids)
        parked = [self._parked.pop(req_id) for req_id in names if req_id in self._parked]
        for request in parked:
            request.status = finished_status
            self._forget(request.request_id)
            self._groups.pop(request.request_id, None)
        return [*parked, *super().finish_requests(None if request_ids is None else names, finished_status)]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._forget(request.request_id)
        if request.status is RequestStatus.FINISHED_ABORTED:  # after another end, an output follows
            self._groups.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _forget(self, req_id: str) -> None:
        self._progress.pop(req_id, None)
        self._chunks.pop(req_id, None)
        self._arrived.pop(req_id, None)
        if self._receiver is not None:
            self._receiver.forget(req_id)

    def shutdown(self) -> None:
        """Shut down as vLLM does, and end the threads that read hidden states."""
        if self._receiver is not None:
            self._receiver.close()
        super().shutdown()


def _has_news(group: EngineCoreOutputs) -> bool:
    return bool(group.outputs or group.finished_requests) or group.scheduler_stats is not None


LONGEST_STEP_S = 0.025
"""Longest step in seconds of a stage with `DueFirst`, unless one request alone takes longer."""


class DueFirst(Scheduler):
    """Keeps steps short while requests wait; with the policy `fcfs` it schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most: int = self.max_num_scheduled_tokens  # type: ignore[has-type]
        self._budget = StepBudget(LONGEST_STEP_S)
        self._began = self._ended = 0.0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one step; while requests wait, limit its tokens to those that fit into `LONGEST_STEP_S`."""
        if self.policy is SchedulingPolicy.PRIORITY and self.waiting:
            least = self.waiting.peek_request().num_tokens
            self.max_num_scheduled_tokens = min(self._most, max(least, self._budget.tokens(self._most)))
        self._began = time.monotonic()
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = self._most

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now = time.monotonic()
        if scheduler_output.total_num_scheduled_tokens:
            self._budget.note(scheduler_output.total_num_scheduled_tokens, now - max(self._began, self._ended))
        self._ended = now
        return super().update_from_output(scheduler_output, model_runner_output)


class OrphanedExports(Scheduler):
    """Handles hidden states in outputs that vLLM drops: an output contains the only reference to its hidden states.

    Those of requests that were aborted during the step that exported the first of them are received by no stage. The
    worker gets their names with the next step, and frees them. Requests that were preempted during the step, and whose
    output vLLM drops (`reset_prefix_cache`), compute the step again, but the worker exports hidden states only once:
    they are returned without the tokens of the output.

    The client gets no output that carries only hidden states. vLLM's events and statistics of the prompt, which vLLM
    adds to the first output, are sent with the first one that the client gets.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._orphaned: list[str] = []
        super().__init__(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        tensors = model_runner_output.pooler_output or ()
        dropped: list[tuple[Request, torch.Tensor]] = []
        for req_id, tensor in zip(model_runner_output.req_ids, tensors, strict=False):
            if tensor is None:
                continue
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                message = unpack(tensor)
                # After the first chunk the API server has the name, and frees the hidden states itself: another stage
                # may still read them if the request has ended before an output that was scheduled ahead.
                if isinstance(message, HiddenStatesChunkReady) and message.first == message.start:
                    self._orphaned.append(message.name)
            elif request.num_stale_output_tokens and request.drop_stale_output:
                dropped.append((request, tensor))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for each in chain.from_iterable(group.outputs for group in outputs.values()):
            running = self.requests.get(each.request_id)
            if running is not None and not each.new_token_ids and each.finish_reason is None:
                running.events[:0], each.events = each.events or (), None
                running.prefill_stats, each.prefill_stats = each.prefill_stats, None
        for request, tensor in dropped:
            group = outputs.setdefault(request.client_index, EngineCoreOutputs())
            group.outputs.append(EngineCoreOutput(request.request_id, [], pooling_output=tensor))
        return outputs

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        output.orphaned, self._orphaned = self._orphaned, []  # type: ignore[attr-defined]
        return output

    def has_requests(self) -> bool:
        return super().has_requests() or bool(self._orphaned)


def scheduler_factory(*features: type[Scheduler]) -> Callable[..., Scheduler]:
    """Return a `scheduler_cls` that builds vLLM's scheduler, with or without async scheduling as configured.

    Args:
        features: subclasses of `Scheduler` whose methods override vLLM's; the first has precedence.
    """

    def build(**kwargs: Any) -> Scheduler:
        base = AsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else Scheduler
        made: type[Scheduler] = type(base.__name__, (*features, base), {})
        return made(**kwargs)

    return build


streaming_input_scheduler = scheduler_factory(StreamingInput)
"""`scheduler_cls` of a stage whose input arrives in chunks."""

due_first_scheduler = scheduler_factory(DueFirst)
"""`scheduler_cls` of a stage whose flow sets due times (`plugins.flow.Submit.due`). It needs the scheduling policy
`priority`."""

export_scheduler = scheduler_factory(KeptExports, OrphanedExports)
"""`scheduler_cls` of a stage whose worker exports hidden states."""
