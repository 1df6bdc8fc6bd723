"""Three stages that compute something simple, whose replicas die, fall silent and come back at any moment.

What comes out depends on the prompt alone: a token lost, made twice or fed to the wrong request changes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from tests.orchestrator.fakes import OPTIONS, POOLING, FakePlugin, output, owners, text_request
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.model_plugins.qwen3_omni.flow import Rows
from vllm_omni_ext.orchestrator.flow import Action, Emit, Extend, Feed, Finished, Open, Produced, Repeat
from vllm_omni_ext.orchestrator.orchestrator import TICKET, Orchestrator
from vllm_omni_ext.orchestrator.requests import OmniOptions, TextRequest
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.handoff import CHUNK, EXPORT, GIVEN, PROMPT
from vllm_omni_ext.wire.parts import END as END_OF_STREAM
from vllm_omni_ext.wire.parts import PartMark
from vllm_omni_ext.wire.rows import Given, Notice

STAGES = ("text", "voice", "sound")
TOKENS = 4
"""Of every text."""

ROWS = 2
PREFILL = ROWS - 1
"""Steps of a prompt with rows before its first token: each brings one row."""

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
    """The flow: text -> voice (opened with the request, and told of rows as they come) -> sound, each code a part and
    the end one more -> the client."""

    def __init__(self) -> None:
        self.rows = Rows(ROWS)
        self.told: Given | None = None
        self.opened = False
        self.track: list[int] = []
        self.frames: list[int] = []
        self.last = self.ended = False
        self.parts = self.heard = self.known = 0

    def begin(self) -> list[Action]:
        return self.replay("voice")

    def handle(self, event: Produced) -> list[Action]:
        match event.stage:
            case "text":
                if event.payload is not None:
                    self.rows.add(event.payload)
                more = self._more()
                if not event.tokens and event.finish is None:
                    return more
                self.track += event.tokens
                self.last |= event.finish is not None
                return [*more, Extend("voice", event.tokens, self.last)]
            case "voice" if isinstance(event.payload, str):
                assert self.told is not None
                self.rows.lose(self.told)
                again: list[Action] = [] if self.rows.complete else [Repeat("text")]
                return [*again, *self.replay("voice")]
            case "voice":
                self.ended = event.finish is not None
                new = [token for token in event.tokens if token != END]
                self.frames += new
                self.parts += 1
                return [Feed("sound", self.parts - 1, new, POOLING, self.ended)]
        return self._sounded(event.payload[1], event.finish is not None)

    def _more(self) -> list[Action]:
        given = self.rows.given
        if given is None or not self.opened or (self.told is not None and given.count <= self.told.count):
            return []
        self.told = given
        return [Extend("voice", (), self.last, more={GIVEN: given.plain()})]

    def _sounded(self, wave: torch.Tensor, last: bool) -> list[Action]:
        new, self.known = wave[self.known :], max(0, self.known - len(wave))
        self.heard += len(new)
        emit = Emit("audio", new, {"sample_rate": 1, "frames": np.zeros((0, 0)), "note": None}, last)
        return [emit, Finished()] if last else [emit]

    def replay(self, stage: str) -> list[Action]:
        if stage == "sound":
            self.parts, self.known = 1, self.heard
            return [Feed("sound", 0, list(self.frames), POOLING, self.ended)]
        handoff: dict[str, Any] = {"track": list(self.track), "last": self.last}
        self.opened, self.told = True, self.rows.given
        if self.told is not None:
            handoff[GIVEN] = self.told.plain()
        prompt, done = [0, 0, *self.frames], len(self.frames)
        return [Open("voice", prompt, handoff, stop=(END,), done=done)]


class Plugin(FakePlugin):
    """Every request that is heard exports rows; notices of them and refusals are what they are."""

    def open(self, request: TextRequest, options: OmniOptions) -> Any:
        request.extra_args[EXPORT] = [[0, ROWS]]
        return Speech()

    def decode(self, stage: str, tensor: Any) -> Any:
        return tensor if isinstance(tensor, Notice | str) else (stage, tensor)


@dataclass
class Work:
    """One request in an engine."""

    request: EngineCoreRequest
    tokens: list[int]
    track: list[int] = field(default_factory=list)
    last: bool = False
    rows: int = 0
    given: Given | None = None
    taken: bool = False


class Engine:
    """A replica's process and the connection to it."""

    def __init__(self, replica: ReplicaId, others: list[Engine]) -> None:
        self.id = replica
        self.others = others
        self.kept: dict[str, int] = {}
        """Rows of requests, by the name under which they were put."""
        self.works: dict[str, Work] = {}
        self.known: set[str] = set()
        self.takes: dict[str, int] = {}
        """How often each request was opened here."""
        self.commands: deque[Any] = deque()
        """Sent to it and not read yet."""
        self.said: asyncio.Queue[EngineCoreOutput | None] = asyncio.Queue()
        self.streams: dict[str, list[int]] = {}
        self.marks: dict[str, PartMark] = {}
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
        assert (utility, method) == ("collective_rpc_async", "forget_rows")
        for name in args[0]:
            self.kept.pop(name, None)

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
        if not request.resumable:
            if name in self.works:
                self.wrong.append(f"{name} was opened twice in {self.id}")
            extra = (request.sampling_params and request.sampling_params.extra_args) or {}
            handoff = extra.get(PROMPT, {})
            if request.pooling_params is not None:
                self.marks[name] = PartMark.of(request.pooling_params.extra_kwargs)
            work = Work(request, list(request.prompt_token_ids or ()), handoff.get("track", []), handoff.get("last"))
            work.given = Given.of(handoff)
            self.works[name] = work
            self.takes[name] = self.takes.get(name, -1) + 1
            self.known.add(name)
        elif name not in self.known:
            self.wrong.append(f"{self.id} got a chunk of {name}, which it does not have")
        elif name in self.works:
            work, chunk = self.works[name], request.sampling_params.extra_args[CHUNK]
            work.track += chunk.get("track", [])
            work.last |= chunk.get("last", False)
            work.given = Given.of(chunk) or work.given

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
        if work is not None and work.taken and work.given is not None and (source := self._source(work.given)):
            source.kept.pop(work.given.name, None)
        if work is not None and 0 < work.rows < ROWS:
            self.kept.pop(self._name(request_id), None)

    def _source(self, given: Given) -> Engine | None:
        """Who has these rows; None if it is gone or does not answer."""
        found = [each for each in self.others if each.address == given.source and not each.dead and not each.frozen]
        return found[0] if found and given.name in found[0].kept else None

    @property
    def address(self) -> str:
        return f"{self.id}#{id(self)}"

    def _name(self, request_id: str) -> str:
        return f"{self.takes[request_id]}/{request_id}"

    def _text(self, work: Work) -> EngineCoreOutput:
        request, notice = work.request, None
        params = request.sampling_params
        if params is not None and params.extra_args and EXPORT in params.extra_args and work.rows < ROWS:
            notice = Notice(source=self.address, name=self._name(request.request_id), first=work.rows, count=1)
            work.rows += 1
            self.kept[notice.name] = work.rows
            if work.rows < ROWS:  # the prefill goes on
                return output(request.request_id, tensor=notice)
        work.tokens.append(following(work.tokens))
        made = len(work.tokens) - 3
        done = made == TOKENS or (params is not None and params.max_tokens == 1)
        return output(request.request_id, work.tokens[-1], tensor=notice, end="stop" if done else "")

    def _voice(self, work: Work) -> EngineCoreOutput | None:
        frames = work.tokens[2:]
        if work.given is None or work.given.count < ROWS or (len(frames) == len(work.track) and not work.last):
            return None
        if not work.taken and self._source(work.given) is None:
            return output(work.request.request_id, 0, tensor="the rows are gone", end="error")
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
        ids = [ReplicaId(stage, i) for stage in STAGES for i in range(counts.get(stage, 1))]
        self.all: list[Engine] = []
        self.engines = {replica: Engine(replica, self.all) for replica in ids}
        self.all += self.engines.values()
        self.failures: dict[str, OmniError] = {}
        self.pools = {s: StagePool(s, [r for r in ids if r.stage == s]) for s in STAGES}
        self.orchestrator = Orchestrator(
            plugin=Plugin(lambda event: []),
            text_stage="text",
            pools=self.pools,
            replicas=self.engines,
            sampling={"voice": {}},
            limits=dict.fromkeys(STAGES, 1000),
            wait_s=wait_s,
            joinable=joinable,
            failed=self.failures.__setitem__,
        )
        self.texts: dict[str, list[int]] = {}
        self.sinks: dict[str, asyncio.Queue[Any]] = {}
        self.tickets: dict[str, str] = {}
        self._stale: dict[ReplicaId, tuple[str, ...]] = {}
        self._tasks = [asyncio.create_task(self._read(engine)) for engine in self.all]

    async def start(self, name: str, *, sound: bool = True) -> None:
        """Open a request; text alone without `sound`."""
        self.texts[name] = []
        extra = None
        if sound:
            self.sinks[name] = asyncio.Queue()
            self.tickets[name] = self.orchestrator.expect(OPTIONS, self.sinks[name])
            extra = {TICKET: self.tickets[name]}
        request = text_request(name, extra)
        request.prompt_token_ids = self.prompt(name)
        await self.orchestrator.open(request)

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
                self.orchestrator.waiting.announce(replica)
            engine.dead = True
            engine.said.put_nowait(None)

    async def freeze(self, replica: ReplicaId) -> None:
        """A process is stopped for so long that its requests are given to others."""
        engine = self.engines.get(replica)
        if engine is not None and not engine.dead and not engine.frozen:
            engine.frozen = engine.was_frozen = True
            self.orchestrator.waiting.announce(replica)
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
            engine = self.engines[replica] = Engine(replica, self.all)
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
        waiting = [PartMark.of(each.pooling_params.extra_kwargs) for each in sent if each.pooling_params is not None]
        marks = [*waiting, *(mark for engine in self.all for mark in engine.marks.values())]
        return any(mark.last for mark in marks if owners([mark.stream]) == [name])

    def finished(self, name: str) -> bool:
        """Whether the last piece of a request's sound has come."""
        return name not in self.orchestrator._live

    def steppable(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if not engine.dead and not engine.frozen]

    async def settle(self) -> None:
        """Let everything run that can, without a step of any engine."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def expire(self) -> None:
        """Every wait has become too long."""
        waiting = self.orchestrator.waiting
        for key, timer in list(waiting._timers.items()):
            timer.cancel()
            waiting._too_long(key)
        await self.settle()

    async def run(self) -> None:
        """Until no engine has anything to do."""
        await self.settle()
        while sum(engine.step() for engine in self.steppable()):
            await self.settle()

    async def end(self) -> None:
        """Withdraw everything; nothing may be held, and no engine may have met anything strange."""
        for ticket in self.tickets.values():
            await self.orchestrator.withdraw(ticket)
        await self.settle()
        assert self.orchestrator.held() == 0
        assert [line for engine in self.all for line in engine.wrong] == []
        for engine in self.steppable():
            while engine.step():  # the ends of streams
                pass
            assert engine.works == {}, f"{engine.id} still works for nobody"
            # What was opened before it fell silent is forgotten for being idle.
            assert engine.was_frozen or engine.streams == {}, f"{engine.id} still has streams"
        frozen = any(engine.was_frozen for engine in self.all)
        assert frozen or not any(engine.kept for engine in self.steppable()), "rows are kept for nobody"
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            assert task.cancelled() or not task.done() or task.exception() is None

    def check(self, name: str) -> None:
        """A request has come out as if nothing had happened."""
        assert name not in self.failures
        whole = text_of(self.prompt(name))
        assert self.texts[name] == whole
        if name in self.sinks:
            assert self.samples(name) == spoken(whole)

    def answers(self, name: str) -> list[Any]:
        """Everything that the caller of a request was given beside its text."""
        return [self.sinks[name].get_nowait() for _ in range(self.sinks[name].qsize())]

    def samples(self, name: str) -> list[float]:
        """The whole sound of a request; its last piece says so, and no other."""
        pieces = self.answers(name)
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        return [sample for piece in pieces for sample in piece.samples.tolist()]
