"""Executes request flows: turns actions into engine requests and engine outputs into events.

It holds no rule of any model: what follows from what is the flow's decision, where it goes is the pool's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import OmniError, RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.observability.observer import REST, TEXT, Observer
from vllm_omni_ext.orchestrator.deadlines import Deadlines
from vllm_omni_ext.orchestrator.disaggregated import Asked, text_way
from vllm_omni_ext.orchestrator.engine_requests import opening
from vllm_omni_ext.orchestrator.flow import Action, Emit, Extend, Fail, Feed, Finish, Finished, Open, Produced, Repeat
from vllm_omni_ext.orchestrator.held_rows import HeldRows
from vllm_omni_ext.orchestrator.live import Live, Sink, Ticket
from vllm_omni_ext.orchestrator.parts import Parts
from vllm_omni_ext.orchestrator.pieces import audio_output
from vllm_omni_ext.orchestrator.planning import planned
from vllm_omni_ext.orchestrator.repeats import Repeats
from vllm_omni_ext.orchestrator.requests import OmniOptions, RequestPlugin, TextRequest
from vllm_omni_ext.orchestrator.text_replay import TextReplay
from vllm_omni_ext.orchestrator.waiting import Waiting
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.runtime.replica import Replica, chunk_request
from vllm_omni_ext.wire.handoff import CHUNK, TICKET

log = logging.getLogger(__name__)


class Orchestrator:
    """One per API server; runs in its event loop.

    Args:
        plugin: the pipeline's request plugin.
        text_stage: name of the stage that answers text.
        pools: one per stage.
        replicas: all replicas, by id.
        sampling: default `SamplingParams` fields by stage.
        limits: longest sequence in tokens, by stage.
        observer: told what happens; None: nobody is.
        wait_s: how long a request waits for a replica of a stage that has none while one may come, in seconds.
        joinable: replicas may come from other hosts at any time.
        failed: told of every request that fails here, whatever it asked for.
        chunk_deadline_s: how long a stage waits for more input that it is owed before its request fails.
        prefill_stage: the stage that computes the prompts of the text stage; None: it does that itself.
    """

    def __init__(
        self,
        *,
        plugin: RequestPlugin,
        text_stage: str,
        pools: Mapping[str, StagePool],
        replicas: Mapping[ReplicaId, Replica],
        sampling: Mapping[str, Mapping[str, Any]],
        limits: Mapping[str, int],
        observer: Observer | None = None,
        wait_s: float = 0.0,
        joinable: bool = False,
        failed: Callable[[str, OmniError], None] = lambda request_id, error: None,
        chunk_deadline_s: float = OmniConfig.chunk_deadline_s,
        prefill_stage: str | None = None,
    ) -> None:
        self.plugin = plugin
        self.text_stage = text_stage
        self.pools = pools
        self.replicas = dict(replicas)
        self._sampling = sampling
        self._limits = limits
        self.observer = observer or Observer.unseen(text_stage, replicas)
        self._tickets: dict[str, Ticket] = {}
        self._live: dict[str, Live] = {}
        self._texts: dict[str, TextReplay] = {}
        self._failed = failed
        self.waiting = Waiting(wait_s, joinable=joinable, expired=self._waited_too_long, changed=self.observer.waiting)
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._chunk_deadline_s = chunk_deadline_s
        self._parts = Parts()
        self._rows = HeldRows(self.replicas)
        self._repeats = Repeats()
        self._deadlines = Deadlines(chunk_deadline_s, self._late)
        ask = Asked(admit=self._admit_text, rows=self._prefilled, failed=self._fail)
        self.way = text_way(prefill_stage, text_stage, pools, self.replicas, self.observer, ask)

    def held(self) -> int:
        """Requests and tickets this orchestrator holds (0 when idle)."""
        bound = sum(pool.in_flight(replica) for pool in self.pools.values() for replica in pool.replicas)
        tables: tuple[Sized, ...] = (self._tickets, self._live, self._texts, self.waiting, self._parts)
        return bound + sum(map(len, (*tables, self._deadlines, self._rows, self._repeats, self.way)))

    @property
    def recitals(self) -> int:
        """Requests that have no text stage."""
        return sum(live.recital for live in self._live.values())

    # -- requests -----------------------------------------------------------------------------------------------

    def room(self, prompt: Sequence[int], options: OmniOptions) -> Mapping[str, int]:
        """Most tokens each later stage may make; refuses what is known to fail before anything is started.

        Raises:
            RequestError: the options or the prompt cannot be served.
            StageUnavailable: a stage has no live replica.
        """
        self.plugin.check(options)
        room = self.plugin.room(prompt, options, self._limits)
        for pool in self.pools.values():
            if self.way.needs(pool.stage) and not pool.replicas and not self.waiting.hopeful(pool.stage):
                raise StageUnavailable(f"stage '{pool.stage}' has no live replica")
        return room

    async def recite(
        self,
        request_id: str,
        *,
        external_id: str,
        prompt: Sequence[int],
        reply: Sequence[int],
        options: OmniOptions,
        sink: Sink,
    ) -> None:
        """Speak a reply that is known already: the text stage is left out.

        Args:
            prompt: ids of a conversation that ends where the reply begins.
            reply: ids of the reply.
        """
        flow = self.plugin.open(TextRequest(prompt=prompt), options)
        room = self.plugin.room(prompt, options, self._limits)
        done = {self.text_stage}
        self._live[request_id] = Live(flow, options, sink, external_id, room, recital=True, done=done)
        self.observer.opened(request_id, external_id, options.modalities, parts=(REST,), arrival=time.time())
        # A text stage never hands its last token on; here the last one is a filler.
        await self._event(request_id, Produced(self.text_stage, (*reply, reply[-1]), finish="stop"))

    def expect(self, options: OmniOptions, sink: Sink) -> str:
        """Announce a request that wants more than text; the ticket goes into its `extra_args[TICKET]`."""
        self.plugin.check(options)
        ticket = str(next(self._numbers))
        self._tickets[ticket] = Ticket(options, sink)
        return ticket

    async def withdraw(self, ticket: str) -> None:
        """The caller is gone or has everything: release whatever the request still holds."""
        known = self._tickets.pop(ticket, None)
        if known is not None and known.request_id is not None:
            await self.abort([known.request_id])

    async def open(self, request: EngineCoreRequest) -> None:
        """Send a text request to a replica; plan its further way if it came with a ticket.

        Raises:
            StageUnavailable: the text stage has no live replica.
            RequestError: the plugin cannot serve this prompt.
        """
        try:
            self._plan(request)
            self._texts[request.request_id] = TextReplay(request)
            await self._send_text(request)
            await self._begin(request.request_id)
        except BaseException as error:
            self.observer.failed(request.request_id, self.text_stage, error)
            await self.abort([request.request_id])
            raise

    async def _begin(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            await self._do(request_id, live, self.text_stage, live.flow.begin())

    async def _send_text(self, request: EngineCoreRequest) -> None:
        stage, sent = self.way.begin(request)
        if (replica := self._admit_text(stage, request)) is not None:
            self.observer.sent(request.request_id, None, replica)
            await self.replicas[replica].add(sent)

    def _admit_text(self, stage: str, request: EngineCoreRequest) -> ReplicaId | None:
        media = [feature.identifier for feature in request.mm_features or ()]
        return self.waiting.admit(self.pools[stage], request.request_id, session=request.session_id, media=media)

    def _plan(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        extra = params.extra_args if params is not None else None
        ticket = self._tickets.get(extra.pop(TICKET, "")) if extra else None
        self.observer.opened(
            request.request_id,
            request.external_req_id or request.request_id,
            (TEXT,) if ticket is None else ticket.options.modalities,
            parts=(TEXT,) if ticket is None else (TEXT, REST),
            arrival=request.arrival_time,
            trace_headers=request.trace_headers,
        )
        if ticket is not None:
            self._live[request.request_id] = planned(request, ticket, self.plugin, self._limits)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests in every stage; unknown ids are ignored (they may just have ended)."""
        for request_id in (*request_ids, *self._repeats.of(request_ids)):
            self.observer.aborted(request_id)
            self._live.pop(request_id, None)
            self._texts.pop(request_id, None)
            self._rows.finished(request_id, taken=False)
            await self.way.forget(request_id)
            await self._withdraw(request_id, self.pools)
            self._repeats.finished(request_id)

    async def _withdraw(self, request_id: str, stages: Iterable[str]) -> None:
        """Take a request out of stages that may still have it."""
        for stage in stages:
            self.waiting.forget(request_id, stage)
            self._deadlines.settle(request_id, stage)
            parts, farewell = self._parts.end(request_id, stage)
            bound = self.pools[stage].release(request_id)
            if bound is not None and (replica := self.replicas.get(bound)) is not None:
                await replica.abort(parts or [request_id])
                if farewell is not None:
                    await replica.add(farewell)  # it may have ended meanwhile, which does no harm

    async def text_stopped(self, request_ids: list[str]) -> None:
        """A stop string ended these requests on our side: the text stage must stop, the others go on."""
        for request_id in request_ids:
            self.observer.finished(request_id, TEXT)
            self._texts.pop(request_id, None)
            await self.way.forget(request_id)
            self.waiting.forget(request_id, self.text_stage)
            replica = self.pools[self.text_stage].release(request_id)
            if replica is not None:
                await self.replicas[replica].abort([request_id])
            await self._event(request_id, Produced(self.text_stage, finish="stop"))

    # -- outputs ------------------------------------------------------------------------------------------------

    async def produced(self, replica: ReplicaId, output: EngineCoreOutput) -> bool:
        """Take one engine output; its tensor is removed from it.

        Returns:
            False for what is of no use any more: the request has ended there, or is another replica's now.
        """
        part, stage = self._parts.answered(output), replica.stage
        tensor, output.pooling_output = output.pooling_output, None
        payload = None if tensor is None else self.plugin.decode(self._heard_as(stage), tensor)
        current = await self.way.current(replica, output)
        request_id = output.request_id
        if not current or self.pools[stage].replica_of(request_id) != replica:
            self._rows.unwanted(replica, payload)
            return False
        self.observer.produced(stage, output)
        if await self.way.passed(replica, output, payload):
            return False
        reason = output.finish_reason
        finish: Finish | None = None if reason is None else str(reason)  # type: ignore[assignment]
        if stage == self.text_stage:
            self._texts[request_id].tokens += output.new_token_ids
        if part is not None and not part.last and finish == "stop":
            finish = None  # of the part, not of the stream
        if finish is not None:
            self._release(request_id, stage)
            if stage == self.text_stage:
                del self._texts[request_id]
        owner = self._repeats.owner(request_id)
        if owner in self._live:
            self._rows.noticed(owner, replica, payload)
            number = None if part is None else part.number
            tokens, now = tuple(output.new_token_ids), asyncio.get_running_loop().time()
            if owner != request_id:
                tokens, finish = (), finish if finish in ("abort", "error") else None
            await self._event(owner, Produced(stage, tokens, payload, finish, number, now))
        else:
            self._rows.unwanted(replica, payload)
        if output.finished:
            self._repeats.finished(request_id)
        return owner == request_id

    def _heard_as(self, stage: str) -> str:
        """What flows know a stage as: the one that computes the prompts of the text stage is a part of that."""
        return self.text_stage if stage in self.way.stages else stage

    async def _prefilled(self, replica: ReplicaId, request_id: str, payload: Any) -> None:
        """Take what the stage that computes prompts made beside one."""
        owner = self._repeats.owner(request_id)
        if owner not in self._live:
            self._rows.unwanted(replica, payload)
            return
        self._rows.noticed(owner, replica, payload)
        now = asyncio.get_running_loop().time()
        await self._event(owner, Produced(self.text_stage, payload=payload, at=now))

    def _release(self, request_id: str, stage: str) -> None:
        """A stage has nothing more to do for a request."""
        self.pools[stage].release(request_id)
        self._deadlines.settle(request_id, stage)
        self._parts.finished(request_id, stage)

    async def _late(self, request_id: str, stage: str, source: str) -> None:
        if self.waiting.waits(request_id):  # for a replica, which has a limit of its own
            self._deadlines.given(request_id, stage, source, last=False)
            return
        limit = f"{self._chunk_deadline_s:g} s (chunk_deadline_s)"
        error = RequestFailed(f"the {stage} stage got nothing more from the {source} stage for {limit}")
        await self._fail(request_id, stage, error)

    # -- replicas -----------------------------------------------------------------------------------------------

    async def replica_up(self, replica: Replica) -> None:
        """A replica takes requests, for the first time or again; those that have waited for its stage go there."""
        self.replicas[replica.id] = replica
        self.waiting.settle(replica.id)
        self.pools[replica.id.stage].add(replica.id)
        self.observer.replica_up(replica.id)
        await self.way.replica_up(replica.id)
        for request_id in self.waiting.take(replica.id.stage):
            await self._place_again(request_id, replica.id.stage, "it could not be opened")

    async def replica_down(self, replica: ReplicaId, reason: str) -> tuple[str, ...]:
        """A replica is gone: others of its stage take its requests over from where they were, now or when one is up.

        If none will be, all requests that need the stage end with an error, everywhere.

        Returns:
            The requests it had, as its engine calls them.
        """
        self.replicas.pop(replica, None)
        self.observer.replica_down(replica)
        lost = self.pools[replica.stage].remove(replica)
        known = self.way.engine_ids(replica.stage, lost)
        for request_id in (*lost, *await self.way.replica_down(replica)):
            await self._place_again(request_id, replica.stage, f"replica {replica} is gone: {reason}")
            if request_id in self._texts or request_id in self._live:
                self.observer.taken_over(replica.stage)
        await self._give_up(replica.stage, StageUnavailable(f"replica {replica} is gone: {reason}"))
        return known

    async def never_up(self, replica: ReplicaId, reason: str) -> None:
        """A replica that was announced will not come."""
        self.waiting.settle(replica)
        await self._give_up(replica.stage, StageUnavailable(f"replica {replica} is gone: {reason}"))

    async def _give_up(self, stage: str, error: StageUnavailable) -> None:
        if self.pools[stage].replicas or self.waiting.hopeful(stage) or not self.way.needs(stage):
            return
        need = [request_id for request_id, live in self._live.items() if stage not in live.done]
        for request_id in dict.fromkeys([*self.waiting.take(stage), *need]):
            await self._fail(request_id, stage, error)

    def _waited_too_long(self, stage: str, request_id: str) -> None:
        error = StageUnavailable(
            f"stage '{stage}' has had no live replica for {self.waiting.limit_s:g} s (replica_wait_s)"
        )
        task = asyncio.ensure_future(self._fail(request_id, stage, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _place_again(self, request_id: str, stage: str, reason: str) -> None:
        """Open a request again in a stage that lost it; it fails where that cannot be done."""
        try:
            if stage in self.way.stages:
                await self._text_again(request_id)
            elif (live := self._live.get(request_id)) is not None:
                live.moves[stage] += 1
                await self._do(request_id, live, stage, live.flow.replay(stage))
        except StageUnavailable as error:
            await self._fail(request_id, stage, StageUnavailable(f"{reason}; {error}"))
        except Exception as error:  # the others that were lost with it must still be placed
            log.exception("request %s cannot be given to another replica of %s", request_id, stage)
            await self._fail(request_id, stage, RequestFailed(f"{reason}; {error}"))

    async def _text_again(self, request_id: str) -> None:
        text = self._texts.get(request_id)
        if text is None:
            return
        if not text.possible:
            raise StageUnavailable("what it had made of this answer cannot be continued elsewhere")
        text = self._texts[request_id] = text.another_time()
        await self.way.forget(request_id)
        if self._texts.get(request_id) is text:  # neither aborted meanwhile nor lost once more
            await self._send_text(text.again())

    def fail_all(self, error: OmniError) -> None:
        """Tell every waiting caller that this is the end."""
        for live in self._live.values():
            live.sink.put_nowait(error)

    async def _event(self, request_id: str, event: Produced) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        live.heard.add(event.stage)
        if event.finish is not None:
            live.done.add(event.stage)
        try:
            await self._do(request_id, live, event.stage, live.flow.handle(event))
        except Exception as error:  # one request's failure must not stop the stage's output loop
            log.exception("request %s failed at stage %s", live.external_id, event.stage)
            failure = error if isinstance(error, OmniError) else RequestFailed(str(error))
            await self._fail(request_id, event.stage, failure)

    async def _do(self, request_id: str, live: Live, source: str, actions: Sequence[Action]) -> None:
        before = live.moves.copy()
        for action in actions:
            if isinstance(action, Open | Extend | Feed) and live.moves[action.stage] != before[action.stage]:
                continue  # lost and given anew while this waited its turn
            await self._act(request_id, live, source, action)

    async def _act(self, request_id: str, live: Live, source: str, action: Action) -> None:
        match action:
            case Open():
                await self._open_stage(request_id, live, source, action)
            case Extend():
                await self._extend(request_id, live, source, action)
            case Repeat() if request_id in self._live:  # it may have ended while this waited its turn
                await self._repeat(request_id, live)
            case Feed():
                await self._feed(request_id, source, action)
            case Emit():
                piece = audio_output(live.external_id, action)
                self.observer.emitted(request_id, source, piece)
                live.sink.put_nowait(piece)
            case Fail(message):
                await self._fail(request_id, source, RequestFailed(message))
            case Finished():
                self._live.pop(request_id, None)
                # Of several replicas that opened the rows one may have died, and the others' leaving frees nothing.
                taken = bool(live.heard - {self.text_stage}) and not live.moves
                self._rows.finished(request_id, taken=taken)
                self.observer.finished(request_id, REST)
                await self._withdraw(request_id, [stage for stage in self.pools if stage not in self.way.stages])
                await self.abort(self._repeats.of([request_id]))

    async def _open_stage(self, request_id: str, live: Live, source: str, action: Open) -> None:
        given = live.options.sampling.get(action.stage)
        params = SamplingParams(**self._sampling[action.stage]) if given is None else given.clone()
        request = opening(request_id, action, params, live.room.get(action.stage))
        live.done.discard(action.stage)
        try:
            replica = self.waiting.admit(self.pools[action.stage], request_id)
        except StageUnavailable as error:
            await self._fail(request_id, action.stage, error)
            return
        if source in live.heard:  # before that it may be queued for any time
            self._deadlines.given(request_id, action.stage, source, last=action.last)
        if replica is None:
            return
        live.opened[action.stage] = request
        self.observer.sent(request_id, source, replica, action.handoff)
        await self.replicas[replica].add(request)

    async def _extend(self, request_id: str, live: Live, source: str, action: Extend) -> None:
        replica = self.pools[action.stage].replica_of(request_id)
        if replica is not None:  # else the stage has ended the request already: nothing to extend
            self._deadlines.given(request_id, action.stage, source, last=action.last)
            chunk: dict[str, Any] = {"track": list(action.track), "last": action.last, **action.more}
            if action.prompt:
                chunk["text"] = list(action.prompt)
            self.observer.sent(request_id, source, replica, chunk)
            await self.replicas[replica].add(chunk_request(live.opened[action.stage], extra_args={CHUNK: chunk}))

    async def _repeat(self, request_id: str, live: Live) -> None:
        assert live.text is not None, "nothing was exported that could be lost"
        request = self._repeats.request(request_id, live.text)
        self._texts[request.request_id] = TextReplay(request)
        try:
            await self._send_text(request)
        except StageUnavailable as error:
            await self._fail(request_id, self.text_stage, error)

    async def _feed(self, request_id: str, source: str, action: Feed) -> None:
        replica = self.pools[action.stage].replica_of(request_id)
        if action.part == 0:
            try:
                replica = self.waiting.admit(self.pools[action.stage], request_id)
            except StageUnavailable as error:
                await self._fail(request_id, action.stage, error)
                return
            self._deadlines.given(request_id, action.stage, source, last=action.last)
        if replica is not None:  # else the stream has ended there already, or waits to be begun anew
            self._deadlines.given(request_id, action.stage, source, last=action.last)
            self.observer.sent(request_id, source, replica, action.prompt)
            await self.replicas[replica].add(self._parts.request(request_id, action))

    async def _fail(self, request_id: str, stage: str, error: OmniError) -> None:
        request_id = self._repeats.owner(request_id)
        self.observer.failed(request_id, stage, error)
        live = self._live.get(request_id)
        await self.abort([request_id])
        if live is not None:
            live.sink.put_nowait(error)
        self._failed(request_id, error)
