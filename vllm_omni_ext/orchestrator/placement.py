"""Binds requests to replicas, and records requests that wait for a replica or for input. Pure.

A request that was on a replica when the replica was lost is a suspect: it may have ended the replica's process. Each
replica runs one suspect at a time, which is then on trial. So if another process ends, the suspect that ended it is
known. Other suspects wait. A trial ends after `TRIAL_OUTPUTS` outputs, when the stage has ended the request, or when
the replica is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from vllm_omni_ext.errors import OmniError, RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.state import Binding, Prompt, RequestObserver, RequestState
from vllm_omni_ext.plugins.flow import Submit
from vllm_omni_ext.pool.stage_pool import StagePool

TRIAL_OUTPUTS = 3
"""Number of outputs after which a trial ends: by then the step that ended the replica's process was repeated."""

MOST_LOSSES = 3
"""Number of lost replicas of one stage after which a suspect on trial fails in any case."""

INPUT_CHECKS = 8
"""Number of checks in a wait for input. Each check restarts the wait of a request that a sleeping replica has, so that
most of the wait is left when the replica wakes up."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the request machine.

    Attributes:
        frontend: name in the plan of the frontend, i.e. of the stage that runs vLLM's engine requests for clients.
        model_frontend: name of the frontend in flows; "" = also `frontend`.
        prefill: the stage that computes prompts for the frontend; None: the frontend computes them itself.
        wait_s: seconds that a request waits for a replica of a stage that has none but may get one.
        joinable: replicas may join without announcement (from other hosts).
        input_deadline_s: seconds without further input after which a request fails in a stage that needs more input.
        client: index of this API server.
        clients: number of API servers. Suspects of different API servers get different replicas, if there are as many.
        limits: longest sequence of each stage, in tokens; no entry: unlimited.
        chunked: stages that accept input in chunks, and join outputs (`plugins.flow.Open.group`); None: all.
    """

    frontend: str
    model_frontend: str = ""
    prefill: str | None = None
    wait_s: float = 0.0
    joinable: bool = False
    input_deadline_s: float = 30.0
    client: int = 0
    clients: int = 1
    limits: Mapping[str, int] = field(default_factory=dict)
    chunked: frozenset[str] | None = None


class Placement:
    """Holds the bindings of all requests, and their waits and deadlines.

    A `Binding` is the state of one request in one stage, e.g. its replica.

    Args:
        pools: one per stage; only this class binds requests to replicas.
    """

    def __init__(self, settings: Settings, pools: Mapping[str, StagePool], observer: RequestObserver) -> None:
        self.settings = settings
        self.pools = pools
        self.now = 0.0
        """Time of the current event, in seconds of a monotonic clock."""
        self.deadline = inf
        """Monotonic time in seconds at which `expired` must be called."""
        self.announced: set[ReplicaId] = set()
        self.waiting: dict[Binding, None] = {}
        """Bindings that wait for a replica, in order of arrival."""
        self.routes: dict[ReplicaId, dict[str, Binding]] = {}
        """Binding that receives the outputs of an engine request, by replica and engine id."""
        self.freed: set[str] = set()
        """Stages in which a waiting suspect may be able to get a replica now."""
        self._trials: dict[ReplicaId, Binding] = {}
        self._input_due: dict[Binding, None] = {}
        self._bound: dict[ReplicaId, dict[Binding, None]] = {}
        self._silent: dict[ReplicaId, list[Binding]] = {}
        """Bindings that a replica had when it stopped answering."""
        self._observer = observer

    def __len__(self) -> int:
        """Return the sum of: bindings with a replica, bindings that wait for a replica, and input deadlines."""
        return sum(map(len, self._bound.values())) + len(self.waiting) + len(self._input_due)

    def may_get_replica(self, stage: str) -> bool:
        """Return whether a replica of the stage is announced or may join."""
        return self.settings.joinable or any(replica.stage == stage for replica in self.announced)

    def available(self, stage: str) -> bool:
        """Return whether the stage has a replica or may get one."""
        return stage in self.pools and bool(self.pools[stage].replicas or self.may_get_replica(stage))

    # -- replicas -----------------------------------------------------------------------------------------------

    def bind(self, binding: Binding, *, cached: bool = False) -> ReplicaId | None:
        """Bind a request to a replica of its stage; return None if the request waits for a replica instead.

        `take_waiting` or `take_suspect` returns a waiting request later; it must then be opened again.

        Args:
            cached: the stage has a prefix cache, so a replica that had a request with the same session or media is
                preferred.

        Raises:
            StageUnavailable: the stage has no replica and can get none.
        """
        if binding.replica is not None:
            return binding.replica
        stage, client = binding.stage, binding.state.client
        pool, losses = self.pools[stage], binding.losses.get(stage, 0)
        if losses:
            if not self.available(stage):
                raise StageUnavailable(f"stage '{stage}' has no live replica")
            places = self._free_for_suspects(stage)
            if not places:
                self._wait(binding)
                return None
            replica = pool.admit(among=places)
            self._trials[replica] = binding
            binding.trial = TRIAL_OUTPUTS if losses == 1 else -1
        else:
            try:
                if client is not None and (cached or isinstance(binding, Prompt)):
                    replica = pool.admit(session=client.session, media=client.media)
                else:
                    replica = pool.admit()
            except StageUnavailable:
                if not self.may_get_replica(stage):
                    raise
                self._wait(binding)
                return None
        binding.replica = replica
        self._bound.setdefault(replica, {})[binding] = None
        return replica

    def _free_for_suspects(self, stage: str) -> set[ReplicaId]:
        """Return the replicas of a stage that may get a suspect of this API server now.

        A suspect is a request that may have ended the process of a lost replica. The replicas are divided among the API
        servers, so that no replica has suspects of two servers. With fewer replicas than servers, some servers share
        one.
        """
        open_now = self.pools[stage].open_replicas
        known = sorted({*open_now, *(each for each in self.announced if each.stage == stage)})
        share, clients = self.settings.client, self.settings.clients
        own = known[share::clients] or known[share % len(known) :][:1] if known else []
        return {replica for replica in open_now if replica in own} - self._trials.keys()

    def output(self, binding: Binding) -> None:
        """Record an output of a request in a stage.

        If the request is a suspect, i.e. may have ended the process of a lost replica, this may end its trial (see the
        module's docstring).
        """
        if binding.trial is not None and binding.trial > 0:
            binding.trial -= 1
            if not binding.trial:
                self._end_trial(binding)

    def _end_trial(self, binding: Binding) -> None:
        if binding.trial is not None and binding.replica is not None:
            binding.trial = None
            del self._trials[binding.replica]
            self.freed.add(binding.stage)

    def take_suspect(self) -> Binding | None:
        """Return a waiting suspect that can get a replica now, and end its wait; None if there is none.

        A suspect is a request that may have ended the process of a lost replica. It gets a replica without another
        suspect.
        """
        while self.freed:
            stage = min(self.freed)
            free = stage in self.pools and self._free_for_suspects(stage)
            waiting = (binding for binding in self.waiting if binding.stage == stage and binding.losses.get(stage))
            if free and (binding := next(waiting, None)) is not None:
                self._stop_waiting(binding)
                return binding
            self.freed.discard(stage)
        return None

    def route(self, binding: Binding, engine_id: str, part: Submit | None = None) -> None:
        """Register the binding as the receiver of its replica's outputs with this engine id.

        Args:
            part: the part of a stream that the engine request contains; None for a request without streams.
        """
        assert binding.replica is not None
        binding.engine_ids[engine_id] = part
        self.routes.setdefault(binding.replica, {})[engine_id] = binding

    def unroute(self, binding: Binding, engine_id: str) -> None:
        """Unregister an engine request, so that its further outputs are dropped."""
        assert binding.replica is not None
        del binding.engine_ids[engine_id]
        del self.routes[binding.replica][engine_id]

    def release(self, binding: Binding) -> tuple[ReplicaId, tuple[str, ...]] | None:
        """Unbind a request from its replica in one stage, and end its waits.

        Returns:
            (replica, ids of the engine requests there); None if the request was not bound.
        """
        self.input_complete(binding)
        self._stop_waiting(binding)
        if (replica := binding.replica) is None:
            return None
        engine_ids = tuple(binding.engine_ids)
        for engine_id in engine_ids:
            self.unroute(binding, engine_id)
        self._end_trial(binding)
        self.pools[binding.stage].release(replica)
        del self._bound[replica][binding]
        binding.replica = None
        return replica, engine_ids

    def lose(self, replica: ReplicaId, *, ended: bool) -> tuple[list[Binding], Binding | None]:
        """Remove a lost replica, and decide whether one of its requests has ended its process.

        The module's docstring defines suspects and trials. If the process has ended, the suspect on trial is assumed to
        have ended it. If the replica also had a former suspect, whose trial was over, either may have ended the
        process, and no request is blamed. With `MOST_LOSSES` losses the suspect on trial is blamed in any case: from
        the second loss on, a trial lasts until the stage has ended the request.

        Args:
            ended: the replica's process has ended. False: the replica does not answer, e.g. because its host or network
                hangs; its requests become no suspects until the method `ended` is called.

        Returns:
            (the bindings that the replica had; the binding of the blamed request, or None).
        """
        self.pools[replica.stage].remove(replica)
        self.routes.pop(replica, None)
        lost = list(self._bound.pop(replica, ()))
        tried, stage = self._trials.pop(replica, None), replica.stage
        former = [binding for binding in lost if binding is not tried and binding.losses.get(stage)]
        for binding in lost:
            binding.replica = binding.trial = None
            binding.replays += 1
            if ended:
                binding.losses[stage] = binding.losses.get(stage, 0) + 1
            binding.engine_ids.clear()
        if not ended:
            self._silent[replica] = lost
            return lost, None
        if tried is not None and former and tried.losses[stage] < MOST_LOSSES:
            tried = None
        return lost, tried

    def ended(self, replica: ReplicaId) -> list[Binding]:
        """Count a loss for each request that a replica had when it stopped answering; its process has ended now.

        Returns:
            The bindings with at least `MOST_LOSSES` losses in this stage.
        """
        lost, stage = self._silent.pop(replica, []), replica.stage
        for binding in lost:
            binding.losses[stage] = binding.losses.get(stage, 0) + 1
        return [binding for binding in lost if binding.losses[stage] >= MOST_LOSSES]

    def clear_silence(self, replica: ReplicaId) -> None:
        """Drop the list of requests that a replica had when it stopped answering.

        Called when the replica answers again, or will never start.
        """
        self._silent.pop(replica, None)

    def bound(self, stage: str) -> Iterator[Binding]:
        """Iterate over the bindings of all requests that have a replica of a stage."""
        for replica in self.pools[stage].replicas:
            yield from self._bound.get(replica, ())

    # -- waits for a replica, and for input -------------------------------------------------------------------------

    def _wait(self, binding: Binding) -> None:
        """Let a request wait for a replica. The deadline of a request that waits already stays the same."""
        if binding.waiting_since is None:
            binding.waiting_since = self.now
            self.waiting[binding] = None
            self.deadline = min(self.deadline, self.now + self.settings.wait_s)
            self._count_waiting(binding.stage)

    def _stop_waiting(self, binding: Binding) -> None:
        if binding.waiting_since is not None:
            binding.waiting_since = None
            del self.waiting[binding]
            self._count_waiting(binding.stage)

    def take_waiting(self, stage: str, *, suspects: bool = True) -> list[Binding]:
        """Return the requests that wait for a replica of a stage, in order of arrival, and end their waits.

        Args:
            suspects: also those that may have ended the process of a lost replica.
        """
        here = (binding for binding in self.waiting if binding.stage == stage)
        found = [binding for binding in here if suspects or not binding.losses.get(stage)]
        for binding in found:
            self._stop_waiting(binding)
        return found

    def _count_waiting(self, stage: str) -> None:
        self._observer.waiting(stage, sum(binding.stage == stage for binding in self.waiting))

    def input_sent(self, binding: Binding, *, last: bool) -> None:
        """Record input that was sent to a stage: restart the deadline for the next input, or end it after the last."""
        if last:
            self.input_complete(binding)
            return
        if binding.input_due_since is None:
            self._input_due[binding] = None
            self.deadline = min(self.deadline, self._next_input_check())
        binding.input_due_since = self.now  # only `expired` reads it: cheaper than a new deadline for each chunk

    def input_complete(self, binding: Binding) -> None:
        """End the deadline for further input, as the stage has all input of the request, or has ended the request."""
        if binding.input_due_since is not None:
            binding.input_due_since = None
            del self._input_due[binding]

    def _next_input_check(self) -> float:
        return self.now + self.settings.input_deadline_s / INPUT_CHECKS

    def expired(self) -> list[tuple[Binding, OmniError]]:
        """Return the requests that have waited too long for a replica or for input, each with its error.

        The wait for input begins again while a replica of the request sleeps, so that it continues after `/wake_up`.
        `deadline` is set to the earliest limit of the other requests, or to the next check for such a sleep.
        """
        found: list[tuple[Binding, OmniError]] = []
        self.deadline = inf
        for binding in self.waiting:
            assert binding.waiting_since is not None
            if not self._is_due(binding.waiting_since + self.settings.wait_s):
                continue
            suspect = binding.losses.get(binding.stage)
            why = "no replica for a request that may have ended one" if suspect else "no live replica"
            limit = f"{self.settings.wait_s:g} s (timeouts.replica_wait_timeout_s)"
            found.append((binding, StageUnavailable(f"stage '{binding.stage}' has had {why} for {limit}")))
        for binding in self._input_due:
            assert binding.input_due_since is not None
            if binding.state.waits or self._sleeps(binding.state):  # waiting for a replica has its own limit
                binding.input_due_since = self.now
            if self._is_due(binding.input_due_since + self.settings.input_deadline_s):
                late = f"the {binding.stage} stage got nothing more from the {binding.source} stage for"
                limit = f"{self.settings.input_deadline_s:g} s (timeouts.chunk_timeout_s)"
                found.append((binding, RequestFailed(f"{late} {limit}")))
            else:
                self.deadline = min(self.deadline, self._next_input_check())
        return found

    def _sleeps(self, state: RequestState) -> bool:
        """Return whether a replica that has the request is asleep."""
        return any(each.replica is not None and self.pools[each.stage].is_asleep(each.replica) for each in state)

    def _is_due(self, at: float) -> bool:
        """Return whether the time `at` has passed; if not, set `deadline` to `at` unless `deadline` is earlier."""
        if at > self.now:
            self.deadline = min(self.deadline, at)
        return at <= self.now

    # -- for tests ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        for replica, routes in self.routes.items():
            for engine_id, owner in routes.items():
                assert owner.replica == replica and engine_id in owner.engine_ids, f"{engine_id} is not at {replica}"
        for stage, pool in self.pools.items():
            here = sum(len(self._bound.get(replica, ())) for replica in pool.replicas)
            counted = sum(pool.in_flight(replica) for replica in pool.replicas)
            assert counted == here, f"the pool of {stage} counts {counted} requests of {here}"
        for replica, suspect in self._trials.items():
            assert suspect.replica == replica and suspect.trial, f"{suspect.name} is not on trial at {replica}"
        for waits in self.waiting:
            assert waits.waiting_since is not None, f"{waits.name} does not wait"
            assert self.deadline <= waits.waiting_since + self.settings.wait_s, f"{waits.name} waits without a limit"
        for waits in self._input_due:
            assert waits.input_due_since is not None, f"{waits.name} has all its input"
            assert self.deadline <= waits.input_due_since + self.settings.input_deadline_s, f"{waits.name} has no limit"

    def check_binding(self, binding: Binding) -> None:
        """Raise AssertionError if the state of one binding is inconsistent."""
        where = f"{binding.name} in {binding.stage}"
        assert binding.waiting_since is None or binding.replica is None, f"{where} waits and is bound"
        assert (binding.waiting_since is not None) == (binding in self.waiting), f"{where}: wrong about waiting"
        assert (binding.input_due_since is not None) == (binding in self._input_due), f"{where}: wrong about its input"
        assert binding.replica is not None or not binding.engine_ids, f"{where} has engine requests nowhere"
        tried = binding.replica is not None and self._trials.get(binding.replica) is binding
        assert (binding.trial is not None) == tried, f"{where}: wrong about its trial"
        if binding.replica is not None:
            assert binding in self._bound[binding.replica], f"{where} would not be missed"
            routes = self.routes.get(binding.replica, {})
            assert all(routes.get(each) is binding for each in binding.engine_ids), f"{where}: lost engine requests"
