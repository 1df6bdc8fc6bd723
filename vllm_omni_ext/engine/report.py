"""Schedulers that tell the coordinator how busy they are. They schedule exactly as vLLM's own."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.compat import use_keys
from vllm_omni_ext.coordinator.keys import Keys
from vllm_omni_ext.coordinator.members import Descriptor, Member
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.lifeline import end_with
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.titles import name_process
from vllm_omni_ext.wire.enrollment import Enrollment
from vllm_omni_ext.wire.handoff import FORGET

log = logging.getLogger(__name__)


class ReportMixin(Scheduler):
    """Reports from its construction to its shutdown, if this process is enrolled with a coordinator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        enrolled = Enrollment.read()
        if enrolled is not None and enrolled.parent is not None:
            end_with(enrolled.parent)
            name_process(f"{enrolled.stage}/{enrolled.index}")
        self._reporter: Reporter | None = None
        if enrolled is None or enrolled.events is None:
            return
        keys = Keys.read(enrolled.secret_file)
        if keys is not None:
            use_keys(keys.connecting)  # the engine makes its sockets after its scheduler
        self._reporter = _reporter(enrolled, self, keys)
        self._reporter.start()

    def load(self) -> Load:
        """What it has to do now. Read by the reporter's thread: the figures may be a step apart."""
        running, waiting = self.get_request_counts()
        return Load(waiting, running, self.kv_cache_manager.usage)

    def add_request(self, request: Request) -> None:
        """Add a request; one with the key `FORGET` only ends others."""
        params = request.sampling_params
        order = None if params is None or params.extra_args is None else params.extra_args.get(FORGET)
        if order is None:
            self.take_request(request)
            return
        stale = [
            each.request_id
            for each in self.held_requests()
            if each.client_index == order["client"] and each.arrival_time < order["before"]
        ]
        self.finish_requests(stale, RequestStatus.FINISHED_ABORTED)

    def take_request(self, request: Request) -> None:
        """Add a request, as vLLM does."""
        super().add_request(request)

    def held_requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self.requests.values()

    def shutdown(self) -> None:
        """Take leave, then end as vLLM's."""
        if self._reporter is not None:
            self._reporter.stop()
        super().shutdown()


class ReportScheduler(ReportMixin):
    """For engines without async scheduling."""


class ReportAsyncScheduler(ReportMixin, AsyncScheduler):
    """For engines with async scheduling."""


def report_scheduler(**kwargs: Any) -> Scheduler:
    """Build the scheduler vLLM would, reporting; vLLM calls `scheduler_cls` with keywords only."""
    cls = ReportAsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else ReportScheduler
    return cls(**kwargs)


def _reporter(enrolled: Enrollment, scheduler: ReportMixin, keys: Keys | None) -> Reporter:
    name = ReplicaId(enrolled.stage, enrolled.index)
    assert enrolled.events is not None
    return Reporter(
        enrolled.events,
        Descriptor(
            instance=enrolled.instance,
            stage=enrolled.stage,
            model=enrolled.model,
            config_hash=enrolled.config_hash,
            version=enrolled.version,
            address=enrolled.host,
        ),
        scheduler.load,
        index=enrolled.index,
        keys=keys,
        admitted=_Bearer(name),
    )


class _Bearer:
    """Sees to it that the replica stays who it is: API servers reach it under the name and epoch it began with.

    One that was silent for so long that its name was given away cannot be reached any more. It ends, and whoever
    started it starts another.
    """

    def __init__(self, name: ReplicaId) -> None:
        self._name = name
        self._member: Member | None = None

    def __call__(self, member: Member) -> None:
        if member.id == self._name and self._member in (None, member):
            self._member = member
            return
        log.error("this replica was %s and is %s now, where nobody reaches it: it ends", self._member, member)
        os.kill(os.getpid(), signal.SIGKILL)
