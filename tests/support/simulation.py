"""Three stages that compute something simple, whose replicas die, fall silent and come back at any moment.

What comes out depends on the prompt alone: a token lost, made twice or fed to the wrong request changes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from tests.support.fakes import (
    OPTIONS,
    FakeRuntime,
    Words,
    check_always,
    drained,
    opened,
    output,
    owners,
    part,
    text_request,
)
from tests.support.loop_clock import settle
from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.model_plugins.qwen3_omni.flow import HiddenStates
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.flow import Action, Emit, Extend, Finished, Forward, Open, Produced, Recompute
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError, pack
from vllm_omni_ext.wire.stage_input import CHUNK, EXPORT, INPUT, HiddenStatesRef, PartHeader, StageInput
from vllm_omni_ext.wire.stage_input import END as END_OF_STREAM

STAGES = ("text", "voice", "sound")
PREFILL = "prefill"
"""A fourth one, where prompts are computed for "text" alone."""

TOKENS = 4
"""Of every text."""

HIDDEN_STATES = 2
AHEAD = HIDDEN_STATES - 1
"""Steps of a prompt with hidden states before its first token: each exports one."""

END = 75
MODULUS = 1009


def following(tokens: list[int]) -> int:
    """The token that comes after these; never one of the small ones that mean something."""
    return 100 + sum((i + 1) * token for i, token in enumerate(tokens)) % MODULUS


def spoken(track: list[int]) -> list[float]:
    """The sound of a text: one sample for each code, made of all codes up to it."""
    codes: list[int] = []
    for token in track:
        codes.append(following([*codes, token]))
    return [float(following(codes[: i + 1])) for i in range(len(codes))]


def text_of(prompt: list[int], tokens: int = TOKENS) -> list[int]:
    made: list[int] = []
    for _ in range(tokens):
        made.append(following([*prompt, *made]))
    return made


class Speech:
    """The flow: text -> voice (opened with the request, and told of hidden states as they come) -> sound, each code a
    part and the end one more -> the client."""

    stages = frozenset(STAGES)
    outputs = frozenset({"text", "audio"})

    def __init__(self) -> None:
        self.hidden = HiddenStates(HIDDEN_STATES)
        self.told: HiddenStatesRef | None = None
        self.opened = False
        self.track: list[int] = []
        self.frames: list[int] = []
        self.last = self.ended = False
        self.parts = self.heard = self.known = self.answered = 0

    def begin(self) -> list[Action]:
        return [Forward("text"), *self.replay("voice")]

    def handle(self, event: Produced) -> list[Action]:
        match event.stage:
            case "text":
                if event.payload is not None:
                    self.hidden.add(event.payload)
                more = self._more()
                if not event.tokens and event.finish is None:
                    return more
                self.track += event.tokens
                self.last |= event.finish is not None
                return [*more, Extend(stage="voice", payload=Words(list(event.tokens)), last=self.last)]
            case "voice" if isinstance(event.payload, StageError):
                assert self.told is not None
                self.hidden.lose(self.told)
                again: list[Action] = [] if self.hidden.complete else [Recompute("text")]
                return [*self.replay("voice"), *again]
            case "voice":
                self.ended = event.finish is not None
                new = [token for token in event.tokens if token != END]
                self.frames += new
                self.parts += 1
                return [part(new, self.parts - 1, last=self.ended)]
        assert event.part == self.answered and event.finish == "stop"
        self.answered += 1
        return self._sounded(event.payload[1], self.ended and self.answered == self.parts)

    def _more(self) -> list[Action]:
        ref = self.hidden.ref
        if ref is None or not self.opened or (self.told is not None and ref.count <= self.told.count):
            return []
        self.told = ref
        return [Extend(stage="voice", last=self.last, hidden_states=ref)]

    def _sounded(self, wave: torch.Tensor, last: bool) -> list[Action]:
        new, self.known = wave[self.known :], max(0, self.known - len(wave))
        self.heard += len(new)
        emit = Emit(AudioChunk(samples=new.numpy(), sample_rate=1, last=last))
        return [emit, Finished()] if last else [emit]

    def replay(self, stage: str) -> list[Action]:
        if stage == "sound":
            self.parts, self.answered, self.known = 1, 0, self.heard
            return [part(list(self.frames), last=self.ended)]
        self.opened, self.told = True, self.hidden.ref
        prompt, done = [0, 0, *self.frames], len(self.frames)
        payload = Words(list(self.track))
        return [
            Open(
                stage="voice",
                prompt=prompt,
                payload=payload,
                last=self.last,
                hidden_states=self.told,
                stop=(END,),
                done=done,
            )
        ]


@dataclass
class Work:
    """One request in an engine."""

    request: EngineCoreRequest
    tokens: list[int]
    track: list[int] = field(default_factory=list)
    last: bool = False
    exported: int = 0
    given: HiddenStatesRef | None = None
    taken: bool = False
    begun: bool = False

    @property
    def extra(self) -> dict[str, Any]:
        return (self.request.sampling_params and self.request.sampling_params.extra_args) or {}


class Engine:
    """A replica's process and the connection to it.

    Args:
        processes: all of them, by a name that none has twice.
    """

    def __init__(self, replica: ReplicaId, processes: dict[str, Engine]) -> None:
        self.id = replica
        self.name = f"{replica} as process {len(processes)}"
        self.processes = processes
        processes[self.name] = self
        self.kept: dict[str, list[int]] = {}
        """Prompts by the transfer under which they are to be fetched."""
        self.hidden_states: dict[str, int] = {}
        """How many of a request, by the name under which they were put."""
        self.fetched = self.recomputed = self.prefilled = self.farewells = 0
        self.works: dict[str, Work] = {}
        self.known: set[str] = set()
        self.takes: dict[str, int] = {}
        """How often each request was opened here."""
        self.commands: deque[Any] = deque()
        """Sent to it and not read yet."""
        self.said: asyncio.Queue[EngineCoreOutput | None] = asyncio.Queue()
        self.streams: dict[str, list[int]] = {}
        self.marks: dict[str, PartHeader] = {}
        self.dead = self.frozen = self.was_frozen = False
        self.wrong: list[str] = []

    async def add(self, request: EngineCoreRequest) -> None:
        await asyncio.sleep(0)
        self.commands.append(request)

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(0)
        self.commands.append(list(request_ids))

    async def call(self, utility: str, method: str, timeout: None, args: tuple[list[str]]) -> None:
        await asyncio.sleep(0)
        assert (utility, method) == ("collective_rpc_async", "forget_hidden_states")
        for name in args[0]:
            self.hidden_states.pop(name, None)

    async def outputs(self) -> Any:
        raise AssertionError("the simulation reads")

    def close(self, timeout: float | None = None) -> None:
        raise AssertionError("the orchestrator does not own replicas")

    def read(self) -> None:
        while self.commands:
            match self.commands.popleft():
                case [*ids]:
                    for request_id in ids:
                        self._end(request_id)
                case request:
                    self._take(request)

    def _take(self, request: EngineCoreRequest) -> None:
        name = request.request_id
        if request.abort_immediately:
            self.farewells += 1
            self._fetch(Work(request, []))
        elif not request.resumable:
            if name in self.works:
                self.wrong.append(f"{name} was opened twice in {self.id}")
            extra = (request.sampling_params and request.sampling_params.extra_args) or {}
            given, _ = StageInput.of({INPUT: extra[INPUT]} if INPUT in extra else None)
            if request.pooling_params is not None:
                self.marks[name] = PartHeader.of(request.pooling_params.extra_kwargs)
            work = Work(request, list(request.prompt_token_ids or ()), last=given.last, given=given.hidden_states)
            work.track += given.payload["track"] if given.payload else []
            self.works[name] = work
            self.takes[name] = self.takes.get(name, -1) + 1
            self.known.add(name)
        elif name not in self.known:
            self.wrong.append(f"{self.id} got a chunk of {name}, which it does not have")
        elif name in self.works:
            work = self.works[name]
            chunk, later = StageInput.of(request.sampling_params.extra_args)
            assert later and CHUNK in request.sampling_params.extra_args
            work.track += chunk.payload["track"] if chunk.payload else []
            work.last |= chunk.last
            work.given = chunk.hidden_states or work.given

    def step(self) -> bool:
        """One step of every request; false if there was nothing to do."""
        self.read()
        made = [(name, getattr(self, f"_{self.id.stage}")(work)) for name, work in list(self.works.items())]
        for name, out in made:
            if out is not None:
                if out.finish_reason is not None:
                    self._end(name)
                self.said.put_nowait(out)
        return any(out is not None for _, out in made)

    def _end(self, request_id: str) -> None:
        work = self.works.pop(request_id, None)
        if work is None:
            return
        if self.id.stage == "text" and not work.begun:
            self._fetch(work)  # a connector has what it will not use freed
        if work.taken and work.given is not None and (source := self._source(work.given)):
            source.hidden_states.pop(work.given.name, None)
        if 0 < work.exported < HIDDEN_STATES:
            self.hidden_states.pop(self._name(request_id), None)

    def _source(self, given: HiddenStatesRef) -> Engine | None:
        """The replica that stores these hidden states; None if it is gone or does not answer."""
        found = self.processes[given.source]
        return None if found.dead or found.frozen or given.name not in found.hidden_states else found

    def _name(self, request_id: str) -> str:
        return f"{self.takes[request_id]}/{request_id}"

    def _put(self, work: Work) -> torch.Tensor | None:
        """Export the next hidden state of a prompt; None if all are exported."""
        if EXPORT not in work.extra or work.exported == HIDDEN_STATES:
            return None
        name = self._name(work.request.request_id)
        ready = HiddenStatesChunkReady(source=self.name, name=name, first=work.exported, count=1)
        work.exported += 1
        self.hidden_states[name] = work.exported
        return pack(ready)

    def _fetch(self, work: Work) -> list[int] | None:
        """The prompt that another process has computed; None if it cannot be had."""
        transfer = work.extra.get(KEY)
        holder = None if transfer is None else self.processes[transfer["remote_engine_id"]]
        if transfer is None or holder is None or holder.dead or holder.frozen:
            return None
        return holder.kept.pop(transfer["transfer_id"], None)

    def _prefill(self, work: Work) -> EngineCoreOutput:
        name, transfer = work.request.request_id, work.extra[KEY]
        if transfer.get("do_remote_prefill"):
            self.wrong.append(f"{self.id} was asked to fetch {name}")
        notice = self._put(work)
        if notice is not None and work.exported < HIDDEN_STATES:  # the prefill goes on
            return output(name, tensor=notice)
        self.prefilled += 1
        self.kept[transfer["transfer_id"]] = list(work.tokens)
        out = output(name, 7, tensor=notice, end="length")
        out.kv_transfer_params = {
            "do_remote_prefill": True,
            "transfer_id": transfer["transfer_id"],
            "remote_engine_id": self.name,
        }
        return out

    def _text(self, work: Work) -> EngineCoreOutput:
        name, params = work.request.request_id, work.request.sampling_params
        if not work.begun:
            work.begun = True
            prompt = self._fetch(work)
            if KEY in work.extra and EXPORT in work.extra:
                self.wrong.append(f"{self.id} was asked for the hidden states of {name}, which it does not compute")
            if prompt is not None and prompt != work.tokens:
                self.wrong.append(f"{self.id} fetched another prompt for {name}")
            self.fetched += prompt is not None
            self.recomputed += prompt is None
        notice = self._put(work)
        if notice is not None and work.exported < HIDDEN_STATES:  # the prefill goes on
            return output(name, tensor=notice)
        work.tokens.append(following(work.tokens))
        made = len(work.tokens) - 3
        done = made == TOKENS or (params is not None and params.max_tokens == 1)
        return output(name, work.tokens[-1], tensor=notice, end="stop" if done else "")

    def _voice(self, work: Work) -> EngineCoreOutput | None:
        frames = work.tokens[2:]
        if work.given is None or work.given.count < HIDDEN_STATES or (len(frames) == len(work.track) and not work.last):
            return None
        if not work.taken and self._source(work.given) is None:
            return output(
                work.request.request_id, 0, tensor=pack(StageError("the hidden states are gone")), end="error"
            )
        work.taken = True
        if len(frames) == len(work.track):
            return output(work.request.request_id, END, end="stop")
        work.tokens.append(following([*frames, work.track[len(frames)]]))
        return output(work.request.request_id, work.tokens[-1])

    def _sound(self, work: Work) -> EngineCoreOutput:
        name = work.request.request_id
        mark = self.marks[name]
        if mark.part in (0, END_OF_STREAM):
            self.streams[mark.stream] = []
        codes = self.streams.get(mark.stream)
        if codes is None:
            self.wrong.append(f"{self.id} got {name}, whose stream it does not have")
            return output(name, tensor=torch.zeros(0), end="stop")
        new = [] if mark.empty else work.tokens
        wave = [float(following([*codes, *new[: i + 1]])) for i in range(len(new))]
        codes += new
        if mark.last:
            del self.streams[mark.stream]
        return output(name, tensor=torch.tensor(wave), end="stop")


class World:
    """An orchestrator, its engines, and a reader for each, as in the server."""

    def __init__(self, wait_s: float = 60.0, joinable: bool = False, **counts: int) -> None:
        stages = (PREFILL, *STAGES) if PREFILL in counts else STAGES
        ids = [ReplicaId(stage, i) for stage in stages for i in range(counts.get(stage, 1))]
        self.processes: dict[str, Engine] = {}
        self.engines = {replica: Engine(replica, self.processes) for replica in ids}
        self.all = list(self.engines.values())
        self.failures: dict[str, OmniError] = {}
        self.pools = {s: StagePool(s, [r for r in ids if r.stage == s]) for s in stages}
        self.orchestrator = Orchestrator(
            Settings(frontend="text", prefill=PREFILL if PREFILL in counts else None, wait_s=wait_s, joinable=joinable),
            runtime=FakeRuntime(),  # type: ignore[arg-type]
            pools=self.pools,
            replicas=self.engines,
            requests=EngineRequests(),
            failed=self.failures.__setitem__,
        )
        check_always(self.orchestrator)
        self.texts: dict[str, list[int]] = {}
        self.sinks: dict[str, asyncio.Queue[Any]] = {}
        self.flows: dict[str, Speech] = {}
        self._stale: dict[ReplicaId, tuple[str, ...]] = {}
        self._tasks = [asyncio.create_task(self._read(engine)) for engine in self.all]

    async def start(self, name: str, *, sound: bool = True) -> None:
        """Open a request; text alone without `sound`."""
        self.texts[name] = []
        request = text_request(name, {EXPORT: [[0, HIDDEN_STATES]]} if sound else None)
        request.prompt_token_ids = self.prompt(name)
        if not sound:
            await self.orchestrator.open(opened(request))
            return
        assert request.sampling_params is not None
        request.sampling_params.skip_reading_prefix_cache = True
        self.sinks[name], self.flows[name] = asyncio.Queue(), Speech()
        await self.orchestrator.open(opened(request, self.flows[name], self.sinks[name], OPTIONS))

    @staticmethod
    def prompt(name: str) -> list[int]:
        return [1, 2, ord(name)]

    async def _read(self, engine: Engine) -> None:
        while (out := await engine.said.get()) is not None:
            tokens = list(out.new_token_ids)
            if await self.orchestrator.produced(engine.id, out) and engine.id.stage == "text":
                self.texts[out.request_id] += tokens
        if self.engines.get(engine.id) is engine:
            del self.engines[engine.id]
            if engine.id in self.pools[engine.id.stage].replicas:
                await self.orchestrator.replica_down(engine.id, "killed")

    def kill(self, replica: ReplicaId, *, again: bool = True) -> None:
        """A process ends; what it has said is read first, then the orchestrator is told."""
        engine = self.engines.get(replica)
        if engine is not None and not engine.dead:
            if again:
                self.orchestrator.announce(replica)
            engine.dead = True
            engine.said.put_nowait(None)

    async def freeze(self, replica: ReplicaId) -> None:
        """A process is stopped for so long that its requests are given to others."""
        engine = self.engines.get(replica)
        if engine is not None and not engine.dead and not engine.frozen:
            engine.frozen = engine.was_frozen = True
            self.orchestrator.announce(replica)
            self._stale[replica] = await self.orchestrator.replica_down(replica, "silent")

    async def thaw(self, replica: ReplicaId) -> None:
        """It goes on: makes some more of what it had, then learns that others have taken over, then is used again."""
        engine = self.engines.get(replica)
        if engine is not None and engine.frozen and not engine.dead:
            engine.step()
            await engine.abort(list(self._stale.pop(replica)))
            engine.step()
            while not engine.said.empty():
                await asyncio.sleep(0)
            engine.frozen = False
            await self.orchestrator.replica_up(engine)

    async def up(self, replica: ReplicaId) -> None:
        """A replica that is gone is there again, as another process."""
        if replica not in self.engines:
            engine = self.engines[replica] = Engine(replica, self.processes)
            self.all.append(engine)
            self._tasks.append(asyncio.create_task(self._read(engine)))
            await self.orchestrator.replica_up(engine)

    def sent_to(self, replica: ReplicaId) -> set[str]:
        """Requests, or parts of such, that a replica was ever given, by their owners."""
        engine = next(engine for engine in self.all if engine.id == replica)
        waiting = {each.request_id for each in engine.commands if isinstance(each, EngineCoreRequest)}
        return set(owners(engine.known | waiting))

    def closed(self, name: str) -> bool:
        """Whether the sound stage has been given the last part of a request."""
        sent = [each for engine in self.all for each in engine.commands if isinstance(each, EngineCoreRequest)]
        waiting = [PartHeader.of(each.pooling_params.extra_kwargs) for each in sent if each.pooling_params is not None]
        marks = [*waiting, *(mark for engine in self.all for mark in engine.marks.values())]
        return any(mark.last for mark in marks if owners([mark.stream]) == [name])

    def finished(self, name: str) -> bool:
        """Whether the last piece of a request's sound has come."""
        state = self.orchestrator.machine.requests.get(name)
        return state is None or state.finished

    def steppable(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if not engine.dead and not engine.frozen]

    async def settle(self) -> None:
        """Let everything run that can, without a step of any engine."""
        await settle()

    async def expire(self) -> None:
        """Every wait has become too long."""
        for timer, handle in list(self.orchestrator._timers.items()):
            if timer.kind == "replica" and timer in self.orchestrator._timers:
                handle.cancel()
                self.orchestrator._fire(timer)
        await self.settle()

    async def run(self) -> None:
        """Until no engine has anything to do."""
        await self.settle()
        while sum(engine.step() for engine in self.steppable()):
            await self.settle()

    async def end(self) -> None:
        """Withdraw everything; nothing may be held, and no engine may have met anything strange."""
        await self.orchestrator.abort(list(self.texts))
        await self.settle()
        assert self.orchestrator.held() == 0
        assert [line for engine in self.all for line in engine.wrong] == []
        await self.run()  # the ends of streams, and of prompts that nobody fetches
        for engine in self.steppable():
            assert engine.works == {}, f"{engine.id} still works for nobody"
            kept = engine.kept.keys() - self._unsaid()
            assert engine.was_frozen or not kept, f"{engine.id} keeps prompts for nobody"
            # What was opened before it fell silent is forgotten for being idle.
            assert engine.was_frozen or engine.streams == {}, f"{engine.id} still has streams"
        frozen = any(engine.was_frozen for engine in self.all)
        assert frozen or not any(engine.hidden_states for engine in self.steppable()), "hidden states are left"
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            assert task.cancelled() or not task.done() or task.exception() is None

    def _unsaid(self) -> set[str]:
        """Transfers of which nobody was told that they are unwanted, as the messenger died: they end after a while."""
        unread = [each for engine in self.all if engine.dead for each in engine.commands]
        farewells = [each for each in unread if isinstance(each, EngineCoreRequest) and each.abort_immediately]
        return {each.sampling_params.extra_args[KEY]["transfer_id"] for each in farewells}

    def check(self, name: str) -> None:
        """A request has come out as if nothing had happened."""
        assert name not in self.failures
        whole = text_of(self.prompt(name))
        assert self.texts[name] == whole
        if name in self.sinks:
            assert self.samples(name) == spoken(whole)

    def answers(self, name: str) -> list[Any]:
        """Everything that the caller of a request was given beside its text."""
        return drained(self.sinks[name])

    def samples(self, name: str) -> list[float]:
        """The whole sound of a request; its last piece says so, and no other."""
        pieces = self.answers(name)
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        return [sample for piece in pieces for sample in piece.samples.tolist()]
