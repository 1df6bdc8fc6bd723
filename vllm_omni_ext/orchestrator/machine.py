"""State machine of all requests: takes events, returns effects. Pure: no vLLM, no asyncio, no sockets, no clock.

The machine owns the state of every request (`state.RequestState`). It executes the actions of flows, binds requests
to replicas, opens them again on another replica after a failure, queues them while a stage has no replica, fails them
when input is late, and releases all their resources when they end. `Placement` selects the replica of a request.
`PromptRouter` sends a prompt to the frontend, or to a prefill stage and then to a decode stage: a client's request, and
in a split frontend also a request that the flow opens itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import TEXT, OutputChunk, ProgressChunk
from vllm_omni_ext.observability.request_trace import Outcome
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.placement import Placement, Settings
from vllm_omni_ext.orchestrator.router import PromptRouter
from vllm_omni_ext.orchestrator.state import Binding, FlowPrompt, Prompt, RequestObserver, RequestState, Routed
from vllm_omni_ext.plugins.flow import (
    Action,
    Close,
    Emit,
    Extend,
    Fail,
    Finish,
    Finished,
    Forward,
    ForwardFlow,
    Open,
    Produced,
    Progress,
    Recompute,
    StreamsFlow,
    Submit,
)
from vllm_omni_ext.pool.stage_pool import StagePool


class RequestMachine:
    """Holds the state of all requests of one API server.

    Args:
        pools: one per stage; only the machine binds requests to replicas.
        observer: records requests; it has no influence on effects.
    """

    def __init__(
        self, settings: Settings, pools: Mapping[str, StagePool], observer: RequestObserver | None = None
    ) -> None:
        self.settings = settings
        self.requests: dict[str, RequestState] = {}
        self._observer = observer or RequestObserver()
        self._effects: list[m.Effect] = []
        self.placement = Placement(settings, pools, self._observer)
        self.router = PromptRouter(
            self.placement, self._observer, self._out, target=settings.frontend, source=settings.prefill
        )
        self._model_frontend = settings.model_frontend or settings.frontend
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Output: self._output,
            m.Opened: self._opened,
            m.TextStopped: self._text_stopped,
            m.TextOnly: self._text_only,
            m.Aborted: self._aborted,
            m.SendFailed: self._send_failed,
            m.ReplicaAnnounced: self._replica_announced,
            m.ReplicaUp: self._replica_up,
            m.ReplicaLost: self._replica_lost,
            m.ReplicaEnded: self._replica_ended,
            m.NeverUp: self._never_up,
            m.PoolsChanged: self._pools_changed,
            m.DeadlinePassed: self._deadline_passed,
        }

    def handle(self, event: m.Event, now: float = 0.0) -> list[m.Effect]:
        """Handle an event; return the effects in the order of their execution.

        Args:
            now: time of the event, in seconds of a monotonic clock.
        """
        effects: list[m.Effect] = []
        self._effects = effects
        self.placement.now = now
        self._handlers[type(event)](event)
        while self.placement.freed and (suspect := self.placement.take_suspect()) is not None:
            self._place_again(suspect, "no other suspect is on the replica now")
        return effects

    @property
    def deadline(self) -> float:
        """Monotonic time in seconds at which `DeadlinePassed` must be handled; infinite while no request waits."""
        return self.placement.deadline

    def held(self) -> int:
        """Return the number of requests, bindings, waits and deadlines that are held (0 when idle)."""
        return len(self.requests) + len(self.placement)

    def unavailable(self, stages: Iterable[str]) -> str | None:
        """Return the first of these stages (named as in flows) that has no replica and can get none, or None."""
        planned = sorted(map(self._planned, stages))
        return next((stage for stage in planned if not self.placement.available(stage)), None)

    def check(self) -> None:
        """Raise AssertionError if the machine's state is inconsistent; tests call this after every event."""
        self.placement.check()
        for request_id, state in self.requests.items():
            assert state.request_id == request_id, f"{request_id} is kept under another id"
            assert not state.finished or state.prompts, f"{request_id} has ended and is held"
            assert not state.finished or not state.hidden_states, f"{request_id} has ended and keeps hidden states"
            for binding in state:
                self.placement.check_binding(binding)
                assert not state.finished or isinstance(binding, Prompt) or binding.replica is None, (
                    f"{request_id} has ended and is bound in {binding.stage}"
                )
        owners = {binding.state.request_id for routes in self.placement.routes.values() for binding in routes.values()}
        assert owners <= self.requests.keys(), f"engine requests of {owners - self.requests.keys()} are left"

    def _out(self, effect: m.Effect) -> None:
        self._effects.append(effect)

    def _planned(self, stage: str) -> str:
        """Return the name in the plan of a stage named as in flows; for a split frontend, its decode stage."""
        return self.settings.frontend if stage == self._model_frontend else stage

    def _model_stage(self, stage: str) -> str:
        return self._model_frontend if stage in self.router.stages else stage

    # -- the beginning ----------------------------------------------------------------------------------------------

    def _opened(self, event: m.Opened) -> None:
        frontend = self.settings.frontend
        state = self.requests[event.request_id] = RequestState.of(event)
        actions = event.flow.begin() if event.actions is None else event.actions
        state.forwarded = any(isinstance(action, Forward) for action in actions)
        state.trace = self._observer.opened(event)
        try:
            self._perform(state, frontend if state.forwarded else None, actions)
        except Exception as error:
            self._fail(state, frontend if state.forwarded else "", error)

    # -- outputs ------------------------------------------------------------------------------------------------

    def _output(self, event: m.Output) -> None:
        routes = self.placement.routes.get(event.replica)
        binding = None if routes is None else routes.get(event.engine_id)
        if binding is None:  # the request has ended in the stage, or another replica has it
            if event.hidden_states is not None and not self._stored((event.replica, *event.hidden_states)):
                self._out(m.FreeHiddenStates(event.replica, event.hidden_states[1]))
            self.router.unclaimed(event)
            return
        if isinstance(event.payload, Exception):
            self._fail(binding.state, binding.stage, event.payload)
            return
        self.placement.output(binding)
        if isinstance(binding, Prompt):
            self._out(m.Accept(binding.name, self.router.answers(binding)))
            self._observer.produced(binding.trace, event)
            self._prompt_output(binding, event)
        else:
            self._out(m.Accept(binding.state.request_id))
            self._observer.produced(binding.state.trace, event)
            if isinstance(binding, FlowPrompt):
                self._flow_prompt_output(binding, event)
            else:
                self._stage_output(binding, event)

    def _stored(self, place: tuple[ReplicaId, str, str]) -> bool:
        """Return whether a request has hidden states there: of a step that began before its text was stopped."""
        return any(place in state.hidden_states for state in self.requests.values())

    def _stage_output(self, binding: Binding, event: m.Output) -> None:
        state, stage, finish = binding.state, binding.stage, event.finish
        part = binding.engine_ids[event.engine_id]
        if event.stream_lost and part is not None and part.part:
            self._place_again(binding, f"stage '{stage}' has dropped the stream, as no part came for too long")
            return
        if finish is not None:
            if part is None or part.last or finish != "stop":
                binding.part = None
                self.placement.release(binding)
                self._done(state, stage)
            else:
                self.placement.unroute(binding, event.engine_id)
        self._keep(state, event)
        number, load = None if part is None else part.part, self.placement.pools[stage].load(event.replica)
        now, stream = self.placement.now, binding.stream_name
        self._decide(state, stage, Produced(stage, event.tokens, event.payload, finish, number, now, load, stream))

    def _done(self, state: RequestState, stage: str) -> None:
        """Record that a stage has ended a request, unless it still has a stream of the request."""
        streams = (binding for binding in state.bindings.values() if binding.stage == stage)
        if not any(binding.replica is not None or binding.waiting_since is not None for binding in streams):
            state.done.add(stage)

    def _flow_prompt_output(self, prompt: FlowPrompt, event: m.Output) -> None:
        state, stage = prompt.state, self.settings.frontend
        if not self.router.output(prompt, event):
            self._prefill_output(prompt, event)
            return
        if event.finish is not None:
            self._done(state, stage)
        self._keep(state, event)
        now, load = self.placement.now, self.placement.pools[stage].load(event.replica)
        finish, name = event.finish, self._model_frontend
        self._decide(state, stage, Produced(name, event.tokens, event.payload, finish, None, now, load))

    def _prefill_output(self, prompt: Routed, event: m.Output) -> None:
        """Pass the payload of the prefill stage to the flow; after the last output, send the prompt to the frontend."""
        state, frontend, now, attempts = prompt.state, self.settings.frontend, self.placement.now, prompt.attempts
        self._keep(state, event)
        if event.payload is not None:
            self._decide(state, frontend, Produced(self._model_frontend, payload=event.payload, at=now))
        if event.finish is None or prompt.attempts != attempts or not self._wanted(prompt):
            return
        try:
            self.router.fetch(prompt, event.replica)
        except StageUnavailable as error:
            self._fail(state, frontend, error)

    def _wanted(self, prompt: Routed) -> bool:
        """Return whether the flow has not ended this prompt."""
        state = prompt.state
        if isinstance(prompt, Prompt):
            return prompt.name in state.prompts
        return not state.finished and self.settings.frontend not in state.done

    def _prompt_output(self, prompt: Prompt, event: m.Output) -> None:
        state, now = prompt.state, self.placement.now
        if not self.router.output(prompt, event):
            self._prefill_output(prompt, event)
            return
        self._keep(state, event)
        prompt.tokens += event.tokens
        if event.finish is not None:
            del state.prompts[prompt.name]
        if not prompt.recompute:
            self._text_output(state, event.tokens, event.payload, event.finish)
        elif event.payload is not None or event.finish in ("abort", "error"):
            failed = event.finish if event.finish in ("abort", "error") else None
            self._decide(state, prompt.stage, Produced(self._model_frontend, (), event.payload, failed, None, now))
        self._drop_if_over(state)

    def _text_output(self, state: RequestState, tokens: tuple[int, ...], payload: Any, finish: Finish | None) -> None:
        frontend = self.settings.frontend
        if finish is not None:
            state.done.add(frontend)
            state.open_outputs.discard(TEXT)
            if isinstance(state.flow, ForwardFlow):
                state.open_outputs.clear()
        if finish == "abort":
            self._observe_end(state, "aborted")
        elif finish == "error":
            self._observe_failure(state, frontend, RequestFailed("the engine ended the request"))
        now = self.placement.now
        self._decide(state, frontend, Produced(self._model_frontend, tokens, payload, finish, None, now))

    def _keep(self, state: RequestState, event: m.Output) -> None:
        """Record that a replica stores hidden states for a request; free them if no stage will read them."""
        if event.hidden_states is None:
            return
        if state.finished:
            self._out(m.FreeHiddenStates(event.replica, event.hidden_states[1]))
        else:
            state.hidden_states.add((event.replica, *event.hidden_states))

    # -- decisions of flows -----------------------------------------------------------------------------------------

    def _decide(self, state: RequestState, stage: str, event: Produced) -> None:
        """Pass an output of a stage (named as in the plan) to the flow, and execute the actions that it returns."""
        state.history.append((stage, len(event.tokens), event.finish, event.part))
        if state.finished:
            return
        state.stages_seen.add(stage)
        try:
            self._perform(state, stage, state.flow.handle(event))
        except Exception as error:  # one request's failure must not stop the others
            self._fail(state, stage, error)

    def _perform(self, state: RequestState, source: str | None, actions: Sequence[Action]) -> None:
        for action in actions:
            if state.finished:
                return  # an earlier action has ended the request
            match action:
                case Emit(chunk):
                    self._to_caller(state, source, replace(chunk, request_id=state.external_id))
                    if chunk.last:
                        state.open_outputs.discard(chunk.modality)
                case Fail():
                    self._fail(state, source or "", _failure(action))
                case Finished():
                    self._finish_flow(state)
                case Progress(stage, done, total):
                    chunk = ProgressChunk(request_id=state.external_id, stage=stage, done=done, total=total)
                    self._to_caller(state, source, chunk)
                case _:
                    self._stage_action(state, source, action)
        if not (state.open_outputs or state.finished):
            self._finish_flow(state)

    def _to_caller(self, state: RequestState, source: str | None, chunk: OutputChunk) -> None:
        self._observer.emitted(state.trace, source or "", chunk)
        self._out(m.ToCaller(state.sink, chunk))

    def _stage_action(
        self, state: RequestState, source: str | None, action: Forward | Open | Extend | Submit | Recompute | Close
    ) -> None:
        stage = self._planned(action.stage)
        if isinstance(action, Open | Extend) and action.hidden_states is not None:
            state.announced = action.hidden_states
        if action.stage not in state.flow.stages or stage not in self.placement.pools:
            raise RequestFailed(f"the flow names stage '{action.stage}', which is none of those it may use")
        try:
            match action:
                case Open():
                    self._open(state, source, stage, action)
                case Extend():
                    self._extend(state, source, stage, action)
                case Submit():
                    self._submit(state, source, stage, action)
                case Close():
                    self._close(state, stage, action.stream)
                case _:
                    self._start_prompt(state, stage, action)
        except StageUnavailable as error:
            self._fail(state, stage, error)

    def _start_prompt(self, state: RequestState, stage: str, action: Forward | Recompute) -> None:
        if state.client is None or stage != self.settings.frontend:
            raise RequestFailed(f"the flow forwards a request to stage '{stage}' that was not made for it")
        name = state.request_id
        prompt = Prompt(state, stage, name)
        if isinstance(action, Recompute):
            name = f"{name}/again/{state.recomputations}"
            state.recomputations += 1
            prompt = Prompt(state, stage, name, recompute=True, tokens=list(action.tokens))
        state.prompts[name] = prompt
        self.router.begin(prompt)

    def _binding(
        self, state: RequestState, source: str | None, stage: str, stream: str = "", kind: type[Binding] = Binding
    ) -> Binding:
        if (stage, stream) not in state.bindings:
            # In the frontend, the client's own request has the plain request id as its name.
            name = f"{state.request_id}/{stage}" if stage in self.router.stages else state.request_id
            name = f"{name}/stream/{stream}" if stream else name
            state.bindings[stage, stream] = kind(state, stage, name, source=source, stream_name=stream)
        return state.bindings[stage, stream]

    def _open(self, state: RequestState, source: str | None, stage: str, action: Open) -> None:
        self._check_length(stage, len(action.prompt) + 1)
        self._check_chunks(stage, action)
        split = stage == self.settings.frontend and self.settings.prefill is not None
        binding = self._binding(state, source, stage, kind=FlowPrompt if split else Binding)
        state.done.discard(stage)
        if isinstance(binding, FlowPrompt):
            self._open_split(binding, action)
            return
        replica = self.placement.bind(binding, cached=bool(action.prefix_keys))
        if source in state.stages_seen:  # a source without an output may still be queued, so no input is due
            self.placement.input_sent(binding, last=action.last)
        if replica is None:
            return
        self.placement.route(binding, binding.name)
        self._observer.sent(state.trace, source, replica, action.payload or action.prompt)
        params, budget = _params(state, action), state.budgets.get(action.stage)
        self._out(
            m.SendOpen(
                replica,
                state.request_id,
                binding.name,
                action=action,
                params=params,
                budget=budget,
                priority=state.priority,
                scope=state.scope if stage in self.router.stages else (None, None),
            )
        )

    def _open_split(self, prompt: FlowPrompt, action: Open) -> None:
        """Open a request in a split frontend."""
        if prompt.action is not None and prompt.action.prompt != action.prompt:
            self.router.end(prompt)  # its KV cache, if there is one, is that of another prompt
        prompt.action, prompt.params = action, _params(prompt.state, action)
        prompt.budget = prompt.state.budgets.get(action.stage)
        self.router.begin(prompt)

    def _check_chunks(self, stage: str, action: Open | Extend) -> None:
        """Raise RequestFailed if the action is for a stage that accepts chunks, and this one accepts none."""
        chunked = self.settings.chunked
        if chunked is None or stage in chunked:
            return
        if isinstance(action, Extend) or not action.last:
            does = "sends input in chunks to"
        elif action.group > 1:
            does = f"sets group={action.group} for"
        else:
            return
        raise RequestFailed(f"the flow {does} stage '{action.stage}', which takes no chunks")

    def _check_length(self, stage: str, tokens: int) -> None:
        """Raise RequestError if a sequence exceeds the stage's `max_model_len`; its engine does not check that.

        Args:
            tokens: length of the input, plus 1 if the stage generates tokens.
        """
        limit = self.settings.limits.get(stage)
        if limit is not None and tokens > limit:
            message = f"the input of stage '{stage}' and its shortest output have {tokens} tokens"
            raise RequestError(f"{message}; its limit (max_model_len) is {limit}", parameter=stage)

    def _extend(self, state: RequestState, source: str | None, stage: str, action: Extend) -> None:
        self._check_chunks(stage, action)
        binding = state.bindings.get((stage, ""))
        if binding is None or binding.replica is None:
            return  # the stage has ended the request, or a pending open will include the chunk
        self.placement.input_sent(binding, last=action.last)
        self._observer.sent(state.trace, source, binding.replica, action.payload)
        self._out(m.SendChunk(binding.replica, state.request_id, binding.name, action=action))

    def _submit(self, state: RequestState, source: str | None, stage: str, action: Submit) -> None:
        self._check_length(stage, len(action.prompt) + (action.pooling_task is None))
        binding = self._binding(state, source, stage, action.stream)
        if action.part == 0:
            for engine_id in tuple(binding.engine_ids):  # parts of an earlier stream
                self.placement.unroute(binding, engine_id)
            state.done.discard(stage)
            if self.placement.bind(binding) is not None:
                binding.streams += 1
        elif binding.replica is None:
            return  # the stage has ended the stream, or the stream will restart with part 0
        self.placement.input_sent(binding, last=action.last)
        if (replica := binding.replica) is None:
            return
        binding.part, stream = action, binding.stream
        engine_id = f"{stream}/{action.part}"
        self.placement.route(binding, engine_id, action)
        self._observer.sent(state.trace, source, replica, action.prompt or action.payload)
        params, priority = _params(state, action), state.priority
        self._out(
            m.SendPart(
                replica, state.request_id, engine_id, stream=stream, action=action, params=params, priority=priority
            )
        )

    def _close(self, state: RequestState, stage: str, stream: str) -> None:
        binding = state.bindings.get((stage, stream))
        if binding is not None:
            self._withdraw(binding)
            binding.name += "/reopened"  # a request that is opened later must not get late outputs of this one
            self._done(state, stage)
        elif any(prompt.stage == stage for prompt in state.prompts.values()):
            raise RequestFailed(f"the flow closes stage '{stage}', to which the client's own request was forwarded")

    # -- the end ------------------------------------------------------------------------------------------------

    def _text_stopped(self, event: m.TextStopped) -> None:
        state = self.requests.get(event.request_id)
        prompt = None if state is None else state.prompts.pop(event.request_id, None)
        if state is not None and prompt is not None:
            self.router.end(prompt)
            self._text_output(state, (), None, "stop")
            self._drop_if_over(state)

    def _text_only(self, event: m.TextOnly) -> None:
        state = self.requests.get(event.request_id)
        if state is not None and not state.finished:
            self._finish_flow(state)

    def _aborted(self, event: m.Aborted) -> None:
        if (state := self.requests.get(event.request_id)) is not None:
            self._observe_end(state, "aborted")
            self._end(state)

    def _send_failed(self, event: m.SendFailed) -> None:
        if (state := self.requests.get(event.request_id)) is not None:
            self._fail(state, event.stage, event.error)

    def _fail(self, state: RequestState, stage: str, error: Exception) -> None:
        """End a request in all stages, and send its caller the error; do nothing if it has ended already."""
        if self.requests.get(state.request_id) is not state:
            return
        if not isinstance(error, OmniError):
            cause, error = error, RequestFailed(str(error))
            error.__cause__ = cause
        error.add_note(state.history_text())
        self._end(state)
        self._observe_failure(state, stage, error)
        self._out(m.FailRequest(state.request_id, stage, error, state.sink))

    def _observe_failure(self, state: RequestState, stage: str, error: OmniError) -> None:
        self._observer.failed(state.trace, stage, error)
        state.trace = None

    def _observe_end(self, state: RequestState, outcome: Outcome) -> None:
        self._observer.ended(state.trace, outcome)
        state.trace = None

    def _end(self, state: RequestState) -> None:
        """End a request in all stages, and release all its resources."""
        self.requests.pop(state.request_id, None)
        state.finished = True
        prompts = list(state.prompts.values())
        state.prompts.clear()
        for prompt in prompts:
            self.router.end(prompt)
        for binding in state.bindings.values():
            self._withdraw(binding)
        self._free_hidden_states(state, taken=False)

    def _finish_flow(self, state: RequestState) -> None:
        """End the flow: release the request's resources in all stages but the frontend, which may continue the text."""
        state.finished = True
        # A stage frees the hidden states that it has read. After a failover, the replica that read them may have died,
        # so the stage frees nothing.
        replayed = any(binding.replays for binding in state.bindings.values())
        self._free_hidden_states(state, taken=bool(state.stages_seen - {*self.router.stages}) and not replayed)
        for binding in state.bindings.values():
            self._withdraw(binding)
        for prompt in [prompt for prompt in state.prompts.values() if prompt.recompute]:
            del state.prompts[prompt.name]
            self.router.end(prompt)
        self._out(m.ToCaller(state.sink, m.END))
        self._drop_if_over(state)

    def _drop_if_over(self, state: RequestState) -> None:
        if state.finished and not state.prompts:
            self.requests.pop(state.request_id, None)
            self._observe_end(state, "finished")

    def _free_hidden_states(self, state: RequestState, *, taken: bool) -> None:
        """Free the hidden states that replicas store for a request.

        Args:
            taken: a stage has read the hidden states that were announced last, and frees them itself. If there are no
                others, nothing is sent.
        """
        announced = () if state.announced is None else state.announced.places()
        stored = {(source, name) for _, source, name in state.hidden_states}
        if not taken or stored != {(ref.source, ref.name) for ref, _ in announced}:
            for replica, _, name in sorted(state.hidden_states):
                self._out(m.FreeHiddenStates(replica, name))
        state.hidden_states.clear()

    def _withdraw(self, binding: Binding) -> None:
        """End a request in one stage: abort its engine requests, and end its stream."""
        if isinstance(binding, FlowPrompt):
            self.router.end(binding)
            return
        part, binding.part = binding.part, None
        if (released := self.placement.release(binding)) is None:
            return
        replica, engine_ids = released
        if engine_ids:
            self._out(m.AbortEngineRequests(replica, engine_ids))
        if part is not None:  # without effect if the stream has ended meanwhile
            stream, state = binding.stream, binding.state
            end_id, priority = f"{stream}/end", state.priority
            self._out(m.SendStreamEnd(replica, state.request_id, end_id, stream=stream, action=part, priority=priority))

    def _deadline_passed(self, event: m.DeadlinePassed) -> None:
        for binding, error in self.placement.expired():
            self._fail(binding.state, binding.stage, error)

    # -- replicas -----------------------------------------------------------------------------------------------

    def _replica_announced(self, event: m.ReplicaAnnounced) -> None:
        if event.coming:
            self.placement.announced.add(event.replica)
        else:
            self.placement.announced.discard(event.replica)
        self.placement.freed.add(event.replica.stage)

    def _replica_up(self, event: m.ReplicaUp) -> None:
        """Add the replica to its pool, and open the requests that wait for its stage.

        `handle` opens the suspects among them (see `placement`), as far as replicas have none.
        """
        replica = event.replica
        self.placement.announced.discard(replica)
        self.placement.pools[replica.stage].add(replica)
        self.placement.clear_silence(replica)
        self.router.replica_up(replica)
        self.placement.freed.add(replica.stage)
        for binding in self.placement.take_waiting(replica.stage, suspects=False):
            self._place_again(binding, "it could not be opened")

    def _replica_lost(self, event: m.ReplicaLost) -> None:
        """Open the requests of a lost replica on other replicas of the stage, at once or when one is up.

        If the stage has no replica and can get none, all requests that need it fail.
        """
        replica, reason = event.replica, f"replica {event.replica} is gone: {event.reason}"
        lost, fatal = self.placement.lose(replica, ended=event.ended)
        if fatal is not None:
            self._fail_fatal(fatal, replica, reason)
        self.placement.freed.add(replica.stage)
        for binding in (*lost, *self.router.replica_lost(replica)):
            if self.requests.get(binding.state.request_id) is not binding.state:
                continue
            self._place_again(binding, reason)
            if self.requests.get(binding.state.request_id) is binding.state:
                self._observer.taken_over(replica.stage)
        self._give_up(replica.stage, reason)

    def _replica_ended(self, event: m.ReplicaEnded) -> None:
        """Count the end of a process that had stopped answering; fail requests that were lost `MOST_LOSSES` times."""
        reason = f"replica {event.replica} is gone: {event.reason}"
        for binding in self.placement.ended(event.replica):
            self._fail_fatal(binding, event.replica, reason)
        self._give_up(event.replica.stage, reason)

    def _fail_fatal(self, binding: Binding, replica: ReplicaId, reason: str) -> None:
        """Fail a request because its stage has repeatedly lost the replica that had it."""
        losses = f"stage '{replica.stage}' has lost {binding.losses[replica.stage]} replicas that had this request"
        error = RequestFailed(f"{losses}, so it is not sent to another one; {reason}")
        self._fail(binding.state, replica.stage, error)

    def _never_up(self, event: m.NeverUp) -> None:
        self.placement.clear_silence(event.replica)
        self.placement.announced.discard(event.replica)
        self.placement.freed.add(event.replica.stage)
        self._give_up(event.replica.stage, f"replica {event.replica} is gone: {event.reason}")

    def _pools_changed(self, event: m.PoolsChanged) -> None:
        self.placement.freed.update(binding.stage for binding in self.placement.waiting)

    def _give_up(self, stage: str, reason: str) -> None:
        """Fail all requests that need the stage, if it has no replica and can get none.

        A prefill stage without an awake replica fails no request: its waiting prompts are sent to decode replicas,
        which compute them.
        """
        if stage in self.router.stages[:-1]:
            if not self.placement.pools[stage].takes_requests:
                for binding in self.placement.take_waiting(stage):
                    self._place_again(binding, reason)
            return
        if self.placement.available(stage):
            return
        waiting = [binding.state for binding in self.placement.waiting if binding.stage == stage]
        name = self._model_stage(stage)
        need = [s for s in self.requests.values() if name in s.flow.stages and stage not in s.done and not s.finished]
        for state in dict.fromkeys([*waiting, *need]):
            self._fail(state, stage, StageUnavailable(reason))

    def _place_again(self, binding: Binding, reason: str) -> None:
        """Open a request again in a stage after the loss of its replica or a wait for one; on an error, fail it."""
        state, stage = binding.state, binding.stage
        if state.prompts.get(binding.name) is not binding if isinstance(binding, Prompt) else state.finished:
            return  # the request has ended meanwhile
        state.history.append((reason,))
        try:
            if isinstance(binding, Prompt):
                self._begin_again(binding)
            else:
                self._perform(state, binding.source, self._replay(binding))
        except StageUnavailable as error:
            self._fail(state, stage, StageUnavailable(f"{reason}; {error}"))
        except Exception as error:  # the other requests must still be placed
            failure = RequestFailed(f"{reason}; {error}")
            failure.__cause__ = error
            self._fail(state, stage, failure)

    def _replay(self, binding: Binding) -> Sequence[Action]:
        flow, stage = binding.state.flow, self._model_stage(binding.stage)
        if not binding.stream_name:
            return flow.replay(stage)
        streams: StreamsFlow = flow  # type: ignore[assignment]
        return streams.replay_stream(stage, binding.stream_name)

    def _begin_again(self, prompt: Prompt) -> None:
        client = prompt.state.client
        if prompt.tokens and not prompt.recompute and client is not None and not client.can_resume:
            raise StageUnavailable("no other replica can continue the tokens that it has generated")
        self.router.begin(prompt)


def _failure(action: Fail) -> OmniError:
    match action.status:
        case 400:
            return RequestError(action.message, parameter=action.parameter)
        case 503:
            return StageUnavailable(action.message)
        case _:
            return RequestFailed(action.message)


def _params(state: RequestState, action: Open | Submit) -> Any:
    return state.options.params.get(action.stage) if action.params is None else action.params
