"""Passes events to the request machine (`machine.RequestMachine`), and executes the effects that the machine returns.

The orchestrator makes no decision itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, Protocol

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_ext.errors import OmniError, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.observer import Observer
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.orchestrator.router import Pair
from vllm_omni_ext.plugins.flow import Flow
from vllm_omni_ext.plugins.runtime import ModelRuntime
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError, unpack

log = logging.getLogger(__name__)

FREE_HIDDEN_STATES = "forget_hidden_states"
"""Name of the worker's method that frees stored hidden states."""

NEW_INPUT = m.SendPrompt | m.SendOpen | m.SendChunk | m.SendPart
"""Types of queued messages that are dropped when their replica is lost, as another replica gets the same input."""


class Replica(Protocol):
    """The methods of a replica's client that the orchestrator calls."""

    id: ReplicaId

    async def add(self, request: EngineCoreRequest) -> None:
        """Send an engine request. A chunk for an open request is also sent as an engine request."""

    async def abort(self, request_ids: list[str]) -> None:
        """Abort engine requests; the engine ignores unknown ids."""

    async def call(self, utility: str, *args: Any) -> Any:
        """Call a utility method of vLLM's engine client, e.g. `sleep_async`; EngineDeadError if the replica is dead."""


class Orchestrator:
    """Sends requests through the stages of their flows: assigns replicas, sends inputs, receives outputs.

    Each API server has one orchestrator, which runs in the server's event loop.

    Args:
        settings: settings of the request machine.
        runtime: the plugin's code that decodes the tensors of stage outputs.
        pools: one pool of replicas per stage, by stage.
        replicas: clients of all replicas, by id.
        requests: builds engine requests.
        observer: records requests and replicas; None: nothing is recorded.
        failed: called with (request id, error) for every failed request.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        runtime: ModelRuntime,
        pools: Mapping[str, StagePool],
        replicas: Mapping[ReplicaId, Replica],
        requests: EngineRequests,
        observer: Observer | None = None,
        failed: Callable[[str, OmniError], None] = lambda request_id, error: None,
    ) -> None:
        self.runtime = runtime
        self.pools = pools
        self.replicas = dict(replicas)
        self.frontend = settings.frontend
        self.observer = observer or Observer.unseen(settings.frontend, replicas)
        self.machine = RequestMachine(settings, pools, self.observer)
        self._requests = requests
        self._failed = failed
        self._model_stages = dict.fromkeys(self.machine.router.stages, settings.model_frontend or settings.frontend)
        self._queue: deque[tuple[Replica, m.Effect]] = deque()
        self._sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        """Set when no request is in flight; `idle` clears and awaits it."""

    def held(self) -> int:
        """Return the number of requests, bindings, waits, deadlines and queued messages that are held (0 when idle)."""
        return self.machine.held() + len(self._queue)

    def count(self, *, frontend: bool) -> int:
        """Return the number of requests that use the frontend, or with `frontend=False` of those that do not."""
        return sum(state.forwarded == frontend for state in self.machine.requests.values())

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        self._idle.clear()
        if self.machine.requests:
            await self._idle.wait()

    def pairs(self) -> list[Pair]:
        """Return the pairs of a prefill and a decode replica between which KV caches were transferred."""
        return self.machine.router.pairs()

    # -- requests -----------------------------------------------------------------------------------------------

    def require(self, flow: Flow) -> None:
        """Check that all stages of a flow are available, before the request is sent to any stage.

        Raises:
            StageUnavailable: a stage that the flow may use has no live replica and can get none.
        """
        if (stage := self.unavailable(flow.stages)) is not None:
            raise StageUnavailable(f"stage '{stage}' has no live replica")

    def unavailable(self, stages: Iterable[str]) -> str | None:
        """Return the first of these stages (named as in flows) that has no replica and can get none, or None."""
        return self.machine.unavailable(stages)

    async def open(self, event: m.Opened) -> None:
        """Start a planned request. An error is put into the request's sink (a queue) and passed to `failed`."""
        await self._shielded(event)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests in all stages; unknown ids are ignored, because a request may just have ended."""
        await self._shielded(*map(m.Aborted, request_ids))

    async def text_stopped(self, request_ids: Iterable[str]) -> None:
        """End requests in the frontend, because the API server found stop strings; other stages continue."""
        await self._shielded(*map(m.TextStopped, request_ids))

    async def text_only(self, request_ids: Iterable[str]) -> None:
        """End all outputs of these requests except vLLM's text output, which continues; unknown ids are ignored."""
        await self._shielded(*map(m.TextOnly, request_ids))

    def fail_all(self, error: OmniError) -> None:
        """Put an error into the sink of every request; called before the server ends."""
        for state in self.machine.requests.values():
            if state.sink is not None:
                state.sink.put_nowait(error)

    # -- replicas -----------------------------------------------------------------------------------------------

    def announce(self, replica: ReplicaId, *, coming: bool = True) -> None:
        """Let requests wait for a replica that is starting or may come back.

        Args:
            coming: False: the replica is expected no longer.
        """
        self._decide(m.ReplicaAnnounced(replica, coming))
        self._send_later()

    def pools_changed(self) -> None:
        """Open waiting requests that can get a replica now; called after replicas were woken, and after each view."""
        if self.machine.placement.waiting:
            self._decide(m.PoolsChanged())
            self._send_later()

    async def replica_up(self, replica: Replica) -> None:
        """Add a replica that accepts requests, and open the requests that wait for its stage."""
        self.replicas[replica.id] = replica
        self.observer.replica_up(replica.id)  # before the machine, whose pools report bindings to the observer
        await self._apply(m.ReplicaUp(replica.id))

    async def replica_down(self, replica: ReplicaId, reason: str, *, ended: bool = True) -> tuple[str, ...]:
        """Remove a lost replica. Other replicas of its stage take over its requests, at once or when one is up.

        Args:
            reason: why the replica is lost, for error messages.
            ended: the replica's process has ended; False: it does not answer.

        Returns:
            The ids of the engine requests that the replica had.
        """
        known = tuple(self.machine.placement.routes.get(replica, ()))
        lost = self.replicas.pop(replica, None)
        self.observer.replica_down(replica)
        self._queue = deque(each for each in self._queue if each[0] is not lost or not isinstance(each[1], NEW_INPUT))
        await self._apply(m.ReplicaLost(replica, reason, ended))
        return known

    async def replica_ended(self, replica: ReplicaId, reason: str) -> None:
        """Record the end of a replica's process. The replica was removed before, because it did not answer."""
        await self._apply(m.ReplicaEnded(replica, reason))

    async def never_up(self, replica: ReplicaId, reason: str) -> None:
        """Stop waiting for an announced replica, which will not start."""
        await self._apply(m.NeverUp(replica, reason))

    # -- outputs ------------------------------------------------------------------------------------------------

    async def produced(self, replica: ReplicaId, output: EngineCoreOutput) -> bool:
        """Handle one engine output: pass it to the request machine, and send the messages that result.

        The output's tensor is removed, and so are its tokens if the request has ended or is on another replica now. If
        the output cannot be handled, e.g. because the plugin does not decode its tensor, its request fails.

        Returns:
            True if vLLM's output processor must receive the output; its `request_id` is then the client's.
        """
        engine_id = output.request_id
        try:
            accepted = self._produced(replica, output)
        except Exception as error:  # only this request fails
            accepted = self._decide(m.Output(replica=replica, engine_id=engine_id, payload=error))
        if self._queue:
            await self._send_all()
        if accepted is None:
            output.new_token_ids = []  # no caller receives them, so statistics must not count them
            return False
        output.request_id = accepted.name
        return accepted.to_client

    def _produced(self, replica: ReplicaId, output: EngineCoreOutput) -> m.Accept | None:
        tensor, output.pooling_output = output.pooling_output, None
        payload = hidden_states = None
        if tensor is not None:
            payload = unpack(tensor)
            if payload is None:
                payload = self.runtime.decode(self._model_stages.get(replica.stage, replica.stage), tensor)
            elif isinstance(payload, HiddenStatesChunkReady):
                hidden_states = payload.source, payload.name
        reason = output.finish_reason
        event = m.Output(
            replica=replica,
            engine_id=output.request_id,
            tokens=tuple(output.new_token_ids),
            payload=payload,
            finish=None if reason is None else str(reason),  # type: ignore[arg-type]
            hidden_states=hidden_states,
            kv=output.kv_transfer_params,
            stream_lost=isinstance(payload, StageError) and payload.lost,
            waited_s=_waited_s(output) if output.events else None,
            cached=None if output.prefill_stats is None else output.prefill_stats.num_local_cached_tokens,
        )
        if self.machine.router.private_kv:
            output.kv_transfer_params = None  # internal addresses must not reach the client
        return self._decide(event)

    # -- effects ------------------------------------------------------------------------------------------------

    async def _shielded(self, *events: m.Event) -> None:
        """Call `_apply` in a task of its own, which continues if the caller is cancelled."""
        await asyncio.shield(self._spawn(self._apply(*events)))

    async def _apply(self, *events: m.Event) -> None:
        """Pass all events to the machine, then execute its effects in their order."""
        for event in events:
            self._decide(event)
        if self._queue:
            await self._send_all()

    def _decide(self, event: m.Event) -> m.Accept | None:
        """Pass an event to the machine, and execute or queue its effects; return the `Accept` effect, or None."""
        accepted = None
        for effect in self.machine.handle(event, asyncio.get_running_loop().time()):
            match effect:
                case m.Accept():
                    accepted = effect
                case m.ToCaller(sink, item):
                    if sink is not None:
                        sink.put_nowait(item)
                case m.FailRequest():
                    self._fail_request(effect)
                case m.ToReplica(name) if (replica := self.replicas.get(name)) is not None:
                    if isinstance(effect, m.FreeHiddenStates):
                        self._spawn(self._free_hidden_states(replica, effect.name))
                    else:
                        self._queue.append((replica, effect))
        if self.machine.deadline < self._armed_for:
            if self._timer is not None:
                self._timer.cancel()
            self._armed_for = self.machine.deadline
            self._timer = asyncio.get_running_loop().call_at(self._armed_for, self._deadline_passed)
        if not self.machine.requests:
            self._idle.set()
        return accepted

    async def _send_all(self) -> None:
        if self._sending:
            return
        self._sending = True
        try:
            while self._queue:
                replica, effect = self._queue.popleft()
                try:
                    if isinstance(effect, m.AbortEngineRequests):
                        await replica.abort(list(effect.engine_ids))
                    else:
                        assert isinstance(effect, m.Send)
                        await replica.add(self._requests.make(effect))
                except Exception as error:  # only this request fails
                    if not isinstance(error, OmniError):
                        log.exception("sending to %s failed", replica.id)
                    if isinstance(effect, m.Send):
                        self._decide(m.SendFailed(effect.request_id, replica.id.stage, error))
        finally:
            self._sending = False

    def _fail_request(self, effect: m.FailRequest) -> None:
        if effect.error.__cause__ is not None:
            log.error("request %s failed at stage %s", effect.request_id, effect.stage, exc_info=effect.error)
        if effect.sink is not None:
            effect.sink.put_nowait(effect.error)
        self._failed(effect.request_id, effect.error)

    def _deadline_passed(self) -> None:
        self._timer, self._armed_for = None, inf
        self._decide(m.DeadlinePassed())
        self._send_later()

    def _send_later(self) -> None:
        if self._queue:
            self._spawn(self._send_all())

    async def _free_hidden_states(self, replica: Replica, name: str) -> None:
        try:
            await replica.call("collective_rpc_async", FREE_HIDDEN_STATES, None, ([name],))
        except EngineDeadError:
            log.debug("the hidden states of %s are gone with %s", name, replica.id)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _waited_s(output: EngineCoreOutput) -> float | None:
    """Return the seconds from a request's receipt by the engine to its first scheduling; None if one is missing."""
    times = {event.type: event.timestamp for event in output.events or ()}
    queued, scheduled = times.get(EngineCoreEventType.QUEUED), times.get(EngineCoreEventType.SCHEDULED)
    return None if queued is None or scheduled is None else scheduled - queued
