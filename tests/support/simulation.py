"""A simulation of three stages whose replicas die, freeze and come back at any moment, under a real orchestrator.

Outputs depend on the prompt alone: a token that is lost, made twice or sent to the wrong request changes them.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
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
    replica_of,
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
"""An optional fourth stage, which computes the prompts of "text"."""

TOKENS = 4
"""Of every text."""

HIDDEN_STATES = 2
AHEAD = HIDDEN_STATES - 1
"""Steps of a prompt with hidden states before its first token: each exports one."""

STEPS = AHEAD + TOKENS + 4
"""Rounds of all engines that a request takes at least."""

END = 75
MODULUS = 1009


def following(tokens: list[int]) -> int:
    """The token that comes after these; never a small one, as some of these have a meaning."""
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
    """The flow: text -> voice (opened with the request, gets hidden states as they come) -> sound (codes and the end
    are parts) -> the client."""

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


class Plan:
    """The flow of a request that is opened in "text" by the flow itself: text -> sound (one part) -> the client."""

    stages = frozenset({"text", "sound"})
    outputs = frozenset({"audio"})

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.tokens = prompt, list[int]()

    def begin(self) -> list[Action]:
        return self.replay("text")

    def handle(self, event: Produced) -> list[Action]:
        if event.stage == "sound":
            return [Emit(AudioChunk(samples=event.payload[1].numpy(), sample_rate=1)), Finished()]
        assert event.stage == "text" and event.finish in (None, "stop")
        self.tokens += event.tokens
        return [] if event.finish is None else self.replay("sound")

    def replay(self, stage: str) -> list[Action]:
        if stage == "sound":
            return [part(list(self.tokens), 0, last=True)]
        return [Open(stage="text", prompt=[*self.prompt, *self.tokens], done=len(self.tokens))]


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
            runtime=FakeRuntime(),
            pools=self.pools,
            replicas=self.engines,
            requests=EngineRequests(),
            failed=self.failures.__setitem__,
        )
        check_always(self.orchestrator)
        self.texts: dict[str, list[int]] = {}
        self.sinks: dict[str, asyncio.Queue[Any]] = {}
        self.flows: dict[str, Speech] = {}
        self.plans: set[str] = set()
        self._stale: dict[ReplicaId, tuple[str, ...]] = {}
        self._tasks = [asyncio.create_task(self._read(engine)) for engine in self.all]

    async def start(self, *names: str, sound: bool = True) -> None:
        """Open requests; for text alone without `sound`."""
        for name in names:
            self.texts[name] = []
            request = text_request(name, {EXPORT: [[0, HIDDEN_STATES]]} if sound else None)
            request.prompt_token_ids = self.prompt(name)
            if sound:
                request.sampling_params.skip_reading_prefix_cache = True
                self.sinks[name], self.flows[name] = asyncio.Queue(), Speech()
                await self.orchestrator.open(opened(request, self.flows[name], self.sinks[name], OPTIONS))
            else:
                await self.orchestrator.open(opened(request))

    async def plan(self, *names: str) -> None:
        """Start requests that their flow opens in "text" itself."""
        for name in names:
            self.texts[name], self.sinks[name] = [], asyncio.Queue()
            self.plans.add(name)
            event = opened(text_request(name), Plan(self.prompt(name)), self.sinks[name], OPTIONS)
            await self.orchestrator.open(msgspec.structs.replace(event, client=None))

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
        """End a process; its outputs are read first, then the orchestrator gets the loss."""
        engine = self.engines.get(replica)
        if engine is not None and not engine.dead:
            if again:
                self.orchestrator.announce(replica)
            engine.dead = True
            engine.said.put_nowait(None)

    async def freeze(self, replica: ReplicaId) -> None:
        """Stop a process for so long that its requests move to other replicas."""
        engine = self.engines.get(replica)
        if engine is not None and not engine.dead and not engine.frozen:
            engine.frozen = engine.was_frozen = True
            self.orchestrator.announce(replica)
            self._stale[replica] = await self.orchestrator.replica_down(replica, "silent", ended=False)

    async def thaw(self, replica: ReplicaId) -> None:
        """Continue a process: one more step, then an abort of the requests that have moved, then new requests."""
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
        """Start a lost replica again, as another process."""
        if replica not in self.engines:
            engine = self.engines[replica] = Engine(replica, self.processes)
            self.all.append(engine)
            self._tasks.append(asyncio.create_task(self._read(engine)))
            await self.orchestrator.replica_up(engine)

    def replica_of(self, stage: str, name: str) -> ReplicaId | None:
        return replica_of(self.orchestrator, stage, name)

    def closed(self, name: str) -> bool:
        """Whether the sound stage has received the last part of a request."""
        sent = [each for engine in self.all for each in engine.commands if isinstance(each, EngineCoreRequest)]
        waiting = [PartHeader.of(each.pooling_params.extra_kwargs) for each in sent if each.pooling_params is not None]
        marks = [*waiting, *(mark for engine in self.all for mark in engine.marks.values())]
        return any(mark.last for mark in marks if owners([mark.stream]) == [name])

    def steppable(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if not engine.dead and not engine.frozen]

    async def settle(self) -> None:
        """Run all tasks, without a step of any engine."""
        await settle()

    async def rounds(self, count: int, *replicas: ReplicaId) -> None:
        """Make so many steps of these replicas; of all, if none is named."""
        for _ in range(count):
            for engine in [self.engines[each] for each in replicas] or self.steppable():
                engine.step()
            await self.settle()

    async def expire(self) -> None:
        """End the waits of all requests that wait for a replica."""
        for binding in self.orchestrator.machine.placement.waiting:
            binding.waiting_since = -inf
        self.orchestrator._deadline_passed()
        await self.settle()

    async def run(self) -> None:
        """Step all engines until none has anything to do."""
        await self.settle()
        while sum(engine.step() for engine in self.steppable()):
            await self.settle()

    async def end(self, *names: str) -> None:
        """Check the answers of these requests, then abort all; nothing may be held, and no engine may have received a
        wrong message."""
        if names:
            await self.run()
            self.check(*names)
        await self.orchestrator.abort(list(self.texts))
        await self.settle()
        assert self.orchestrator.held() == 0
        assert [line for engine in self.all for line in engine.wrong] == []
        await self.run()  # the ends of streams, and of prompts that no replica fetches
        for engine in self.steppable():
            assert engine.works == {}, f"{engine.id} still has requests"
            kept = engine.kept.keys() - self._unsaid()
            assert engine.was_frozen or not kept, f"{engine.id} keeps unclaimed prompts"
            # Streams from before a freeze end by their idle timeout.
            assert engine.was_frozen or engine.streams == {}, f"{engine.id} still has streams"
        frozen = any(engine.was_frozen for engine in self.all)
        assert frozen or not any(engine.hidden_states for engine in self.steppable()), "hidden states are left"
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            assert task.cancelled() or not task.done() or task.exception() is None

    def _unsaid(self) -> set[str]:
        """Transfers whose release was lost with the replica that was to read it: they end after a time."""
        unread = [each for engine in self.all if engine.dead for each in engine.commands]
        farewells = [each for each in unread if isinstance(each, EngineCoreRequest) and each.abort_immediately]
        return {each.sampling_params.extra_args[KEY]["transfer_id"] for each in farewells}

    def check(self, *names: str) -> None:
        """Check that the answers of these requests are the undisturbed ones."""
        for name in names:
            assert name not in self.failures
            whole = text_of(self.prompt(name))
            if name in self.plans:
                codes = [float(following(whole[: i + 1])) for i in range(TOKENS)]
                assert self.samples(name) == codes and self.texts[name] == []
                continue
            assert self.texts[name] == whole
            if name in self.sinks:
                assert self.samples(name) == spoken(whole)

    def answers(self, name: str) -> list[Any]:
        """All items of a request's sink."""
        return drained(self.sinks[name])

    def samples(self, name: str) -> list[float]:
        """The whole sound of a request; its last piece alone is marked as the last."""
        pieces = self.answers(name)
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        return [sample for piece in pieces for sample in piece.samples.tolist()]


async def down_from_any_step_to_any_other(stage: str, how: str, steps: int, **counts: int) -> None:
    """Kill or freeze a replica of a stage after any step until after any later one; no answer changes."""
    gone = ReplicaId(stage, 0)
    for at in range(steps):
        for until in range(at, steps + 1):
            world = World(**counts)
            await world.start("a", "b")
            await world.start("c", sound=False)
            await world.plan("d")
            await world.rounds(at)
            if how == "kill":
                world.kill(gone)
            else:
                await world.freeze(gone)
            await world.settle()
            await world.rounds(until - at)
            await (world.up if how == "kill" else world.thaw)(gone)
            await world.end(*"abcd")


async def any_course_of_events(seed: int, *stages: str, plans: float = 0.0) -> None:
    """Replicas die, freeze and come back, and clients leave, at random; once all replicas are up, every answer is the
    undisturbed one. A request whose replica was lost while it was the only suspect there has failed alone.

    Args:
        plans: share of the requests that their flow opens in "text" itself.
    """
    rng, kinds = random.Random(seed), random.Random(-seed)
    world = World(**{stage: rng.randint(1, 3) for stage in stages})
    everybody = list(world.engines)
    names = [chr(ord("a") + i) for i in range(rng.randint(1, 6))]
    late, left = list(names), set[str]()
    for _ in range(rng.randint(10, 80)):
        match rng.randrange(9):
            case 0 if late and kinds.random() < plans:
                await world.plan(late.pop())
            case 0 if late:
                await world.start(late.pop(), sound=rng.random() < 0.8)
            case 1:
                world.kill(rng.choice(everybody))
            case 2:
                await world.up(rng.choice(everybody))
            case 3:
                await world.freeze(rng.choice(everybody))
            case 4:
                await world.thaw(rng.choice(everybody))
            case 5 if rng.random() < 0.3 and len(late) < len(names):
                left.add(rng.choice([name for name in names if name not in late]))
                await world.orchestrator.abort(sorted(left))
            case _:
                for engine in world.steppable():
                    if rng.random() < 0.7:
                        engine.step()
        for _ in range(rng.choice((0, 1, 3, 20))):
            await asyncio.sleep(0)
    while late:
        await world.start(late.pop())
    await world.settle()
    for replica in everybody:
        await world.thaw(replica)
        await world.up(replica)
    await world.run()
    lost_twice = {
        name for name in set(names) - left if "replicas that had this request" in str(world.failures.get(name))
    }
    world.check(*set(names) - left - lost_twice)
    await world.end()
