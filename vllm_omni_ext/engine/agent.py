"""Functions that every replica (one vLLM engine process of a stage) has, with any scheduler class.

A replica reports its load to the coordinator, ends with its parent process, sets its process title, aborts the requests
of an API server that has died, and kills itself when its engine loop hangs. `ReplicaAgent` implements these functions
through vLLM's `SchedulerInterface`, so a plugin's own scheduler needs no code for them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.compat import use_keys
from vllm_omni_ext.config.schema import MAX_MEDIA_TOKENS
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.engine.core_queue import input_queue
from vllm_omni_ext.engine.replica_identity import ReplicaIdentity
from vllm_omni_ext.engine.step_watch import LockFreeTimer, LoopClock, StepWatch, end_hung_process
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.lifeline import die_with_parent, end_with_process, leave_interrupts_to_parent
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.wire.stage_input import ABORT_CLIENT


class ReplicaAgent:
    """Reports a replica's load to the coordinator and detects a hung engine loop, from `start` until `stop`.

    `with_agent` creates one agent for each engine's scheduler. Without a coordinator (`LLM`) no load is reported.

    Args:
        scheduler: the scheduler of this replica's engine. It keeps the `Request` of every unfinished request.
        step_timeout_s: seconds that an engine loop with work may take for one iteration (see `step_watch`); None: no
            limit.
    """

    def __init__(self, scheduler: SchedulerInterface, step_timeout_s: float | None = None) -> None:
        self._scheduler = scheduler
        self._step_timeout_s = step_timeout_s
        self._watch: StepWatch | None = None
        self.clock = LoopClock(self._paused)
        self._requests: WeakSet[Request] = WeakSet()
        self._reporter: Reporter | None = None

    def start(self) -> None:
        """Make this process end with its parent; start the watch of the engine loop and the load reports.

        `ReplicaIdentity.read` gives the parent and the coordinator's address.
        """
        enrolled = ReplicaIdentity.read()
        if enrolled is not None and enrolled.parent is not None:
            die_with_parent(enrolled.parent)
            leave_interrupts_to_parent()
            name_process(f"{enrolled.stage}/{enrolled.index}")
        if enrolled is not None and enrolled.program is not None:
            end_with_process(enrolled.program)
        self._watch_steps(enrolled)
        if enrolled is None or enrolled.events is None:
            return
        keys = Keys.read(enrolled.secret_file)
        if keys is not None:
            use_keys(keys.connecting)  # the engine creates its sockets after its scheduler
        member = Member(enrolled.stage, enrolled.index, enrolled.epoch)
        self._reporter = Reporter(
            enrolled.events, member, enrolled.proof, self.load, interval_s=enrolled.interval_s, keys=keys
        )
        self._reporter.start()

    def load(self) -> Load | None:
        """Return the scheduler's load for the next heartbeat; None while an iteration of the loop exceeds its limit.

        `Reporter` sends no heartbeat for None. It calls this method in its own thread, so the numbers may be one step
        old.
        """
        if self._watch is not None and self._watch.late:
            return None
        running, waiting = self._scheduler.get_request_counts()
        return Load(waiting, running, self._scheduler.get_kv_cache_usage(), asleep=self._paused())

    def intercept(self, request: Request) -> bool:
        """Execute a request that is a command to the agent (key `ABORT_CLIENT` in `extra_args`); return whether it is.

        The command aborts all unfinished requests that the API server `client` (an index) sent before the Unix time
        `before`. The scheduler does not receive the command.
        """
        params = request.sampling_params
        order = None if params is None or params.extra_args is None else params.extra_args.get(ABORT_CLIENT)
        if order is None:
            self._requests.add(request)
            return False
        stale = [
            each.request_id
            for each in self._requests
            if each.client_index == order["client"] and each.arrival_time < order["before"] and not each.is_finished()
        ]
        self._scheduler.finish_requests(stale, RequestStatus.FINISHED_ABORTED)
        return True

    def stop(self) -> None:
        """Stop the reports to the coordinator and the watch of the engine loop."""
        if self._watch is not None:
            self._watch.stop()
        if self._reporter is not None:
            self._reporter.stop()

    def _paused(self) -> bool:
        return self._scheduler.pause_state != PauseState.UNPAUSED

    def _watch_steps(self, enrolled: ReplicaIdentity | None) -> None:
        if self._step_timeout_s is None:
            return
        if (inputs := input_queue()) is not None:
            self.clock.follow(inputs, EngineCoreRequestType.UTILITY)
        name = "this replica" if enrolled is None else f"{enrolled.stage}/{enrolled.index}"
        hung = partial(end_hung_process, name, self._step_timeout_s)
        timer = LockFreeTimer() if multiprocessing.parent_process() else None  # an engine may share the user's process
        self._watch = StepWatch(self.clock, self._step_timeout_s, hung, timer)
        self._watch.start()


def with_agent(scheduler: SchedulerInterface, step_timeout_s: float | None = None) -> SchedulerInterface:
    """Start a `ReplicaAgent` for a scheduler; return the same scheduler with four replaced methods.

    `add_request` executes commands to the agent, `schedule` and `update_from_output` count begun and ended steps in
    `agent.clock`, and `shutdown` stops the agent. `update_from_output` also sets `SchedulerStats.step_counter` to the
    current Unix time in nanoseconds, for the metrics; vLLM uses that field between data parallel ranks only.

    Args:
        step_timeout_s: see `ReplicaAgent`.
    """
    agent = ReplicaAgent(scheduler, step_timeout_s)
    add_request, shutdown = scheduler.add_request, scheduler.shutdown
    schedule, update_from_output = scheduler.schedule, scheduler.update_from_output

    def intercepted(request: Request) -> None:
        if not agent.intercept(request):
            add_request(request)

    def stopped() -> None:
        agent.stop()
        shutdown()

    def begun(*args: Any, **kwargs: Any) -> Any:
        agent.clock.begun += 1
        return schedule(*args, **kwargs)

    def ended(*args: Any, **kwargs: Any) -> Any:
        outputs = update_from_output(*args, **kwargs)
        agent.clock.ended += 1
        for each in outputs.values():
            if each.scheduler_stats is not None:
                each.scheduler_stats.step_counter = time.time_ns()
        return outputs

    vars(scheduler).update(add_request=intercepted, shutdown=stopped, schedule=begun, update_from_output=ended)
    agent.start()
    return scheduler


@dataclass(frozen=True)
class WithAgent:
    """A `scheduler_cls` for vLLM that builds any scheduler and adds a `ReplicaAgent` to it.

    Attributes:
        scheduler_cls: class or factory function of the scheduler, or its import path; None = vLLM's choice.
        step_timeout_s: see `ReplicaAgent`.
    """

    scheduler_cls: Any = None
    step_timeout_s: float | None = None

    def __call__(self, **kwargs: Any) -> SchedulerInterface:
        """Build the scheduler and start its agent. vLLM calls a `scheduler_cls` with keyword arguments only.

        `additional_config[MAX_MEDIA_TOKENS]`, if set, limits the tokens that the encoder computes in one step.

        vLLM's engine creates its receiver cache for media after the scheduler, and only if `_api_process_count` is 1.
        In the config that API servers and engines share, the count is at least 2, so that each API server keeps the
        media itself (`_FEWEST_API_PROCESSES`). This method sets the count in the engine's copy to 1. `SentMedia` in the
        API servers keeps the engine's cache consistent, with any number of API servers.

        Raises:
            ConfigError: `MAX_MEDIA_TOKENS` is set, but the scheduler is no subclass of vLLM's `Scheduler`.
        """
        kwargs["vllm_config"].parallel_config._api_process_count = 1
        config = copy(kwargs["vllm_config"].scheduler_config)
        config.scheduler_cls = self.scheduler_cls
        scheduler: Any = config.get_scheduler_cls()(**kwargs)
        given = kwargs["vllm_config"].additional_config
        limit = given.get(MAX_MEDIA_TOKENS) if isinstance(given, Mapping) else None
        if limit is not None:
            if not isinstance(scheduler, Scheduler):
                raise ConfigError(
                    f"{MAX_MEDIA_TOKENS}: {type(scheduler).__name__} is no scheduler of vLLM's; leave it out"
                )
            scheduler.max_num_encoder_input_tokens = min(scheduler.max_num_encoder_input_tokens, limit)
        return with_agent(scheduler, self.step_timeout_s)
