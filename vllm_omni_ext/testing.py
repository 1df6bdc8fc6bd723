"""Tools for tests of model plugins: a check of flows on simulated stages, and a tokenizer for tiny checkpoints.

`check_flow` runs a flow (`plugins.flow.Flow`) on simulated stages. At every step a replica may die, stop responding or
come back, and the client may disconnect. A stage is simulated by a generator function, e.g.

    def painter(work: Work) -> Iterator[Reply | None]:
        paint = work.take().payload
        for done in range(1, 3):
            yield Reply(payload=StageProgress(done, 3))
        yield Reply(payload=picture_of(paint), finish="stop")

The function is called once for each request that is sent to a replica, and once for each stream of parts
(`plugins.flow.Submit`). It yields one `Reply` per step, or None while it waits for more input. Its replies must depend
only on its input.

A stage exports hidden states with `Reply(hidden_states=...)`; the flow gets `HiddenStatesChunkReady`, as from a real
stage. Another stage reads them with `Work.read`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.chunks import AudioChunk, ImageChunk, TextChunk
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.flow import Extend, Finish, Flow, Forward, Open, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageError
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

BYTES = 256
SPECIAL_TOKENS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

MOST_STEPS = 10_000
"""Most steps of one run; a flow that needs more is assumed never to end."""

Disturbance = Literal["none", "kill", "restart", "gone", "freeze", "abort", "refuse"]
DISTURBANCES: tuple[Disturbance, ...] = ("kill", "restart", "gone", "freeze", "abort", "refuse")
"""Events that `check_flow` simulates. kill: the replica with the requests dies, and another one exists. restart: the
only replica dies, and is restarted later. gone: the only replica dies. freeze: the requests fail over to another
replica, and the first one continues them too. abort: the client disconnects. refuse: the stage returns an error.
"""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Result of one step of a simulated stage.

    Attributes:
        tokens: new token ids.
        payload: the payload for the flow, as `ModelRuntime.decode` would return it.
        finish: the reason that the request, or the part of a stream, ends with this step; None if it continues.
        hidden_states: hidden states that this step exports, one value for each position; `payload` must then be None.
    """

    tokens: tuple[int, ...] = ()
    payload: Any = None
    finish: Finish | None = None
    hidden_states: Sequence[Any] = ()


Stores = dict[str, dict[str, list[Any]]]
"""Hidden states that all simulated replicas store: address of the replica -> name -> values (see `HiddenStatesRef`)."""


@dataclass
class Work:
    """Input that a simulated stage gets for one request, or for one stream: the argument of its generator function.

    Attributes:
        resumed: tokens that another replica has generated already for a forwarded request (`plugins.flow.Forward`).
        recompute: the stage only computes the prompt again, to export its hidden states again
            (`plugins.flow.Recompute`).
        messages: (engine id, message) that the stage has not taken yet; see `take`.
        engine_id: id of the engine request of the message that was taken last.
        last: whether the next `Reply.finish` ends the whole request or stream; False after a part with
            `Submit.last=False`.
        stores: hidden states of all replicas.
        source: the location that `read` has read last.
        joins: numbers of tokens in the next outputs (`plugins.flow.Open.group`).
        later: the reply of a step that the output before it could not include.
    """

    resumed: tuple[int, ...] = ()
    recompute: bool = False
    messages: deque[tuple[str, Forward | Open | Extend | Submit]] = field(default_factory=deque)
    engine_id: str = ""
    last: bool = True
    stores: Stores = field(default_factory=dict)
    source: HiddenStatesRef | None = None
    joins: Iterator[int] = field(default_factory=lambda: itertools.repeat(1))
    later: Reply | None = None

    def read(self, ref: HiddenStatesRef) -> list[Any] | None:
        """Return the first `ref.count` hidden states at a location; None if they are lost, e.g. with their replica.

        The location is freed when the request ends in this stage, or when the stage reads from another location.
        """
        if self.source is not None and (self.source.source, self.source.name) != (ref.source, ref.name):
            self.free()
        self.source = ref
        stored = self.stores.get(ref.source, {}).get(ref.name)
        return None if stored is None else stored[: ref.count]

    def free(self) -> None:
        """Free the hidden states at the location that was read last."""
        if self.source is not None:
            self.stores.get(self.source.source, {}).pop(self.source.name, None)

    def take(self) -> Any:
        """Return and remove the next message (`Forward`, `Open`, `Extend` or `Submit`); None if there is none yet."""
        if not self.messages:
            return None
        self.engine_id, message = self.messages.popleft()
        self.last = not isinstance(message, Submit) or message.last
        return message


Stage = Callable[[Work], Iterator[Reply | None]]


@dataclass(frozen=True)
class Answer:
    """All outputs that a client has received for one request.

    Attributes:
        text: token ids of the frontend.
        outputs: outputs by modality. "audio": all samples in one array; "text": one str; "image": a list of the pixels
            of finished pictures; others: the list of chunks.
        failed: message of the error with which the request failed; "" if it did not fail.
    """

    text: tuple[int, ...]
    outputs: Mapping[str, Any]
    failed: str


def check_flow(
    make_flow: Callable[[], Flow],
    stages: Mapping[str, Stage],
    *,
    frontend: str,
    disturbances: Sequence[Disturbance] = DISTURBANCES,
    requests: int = 2,
    options: RequestOptions | None = None,
) -> Answer:
    """Check that a flow gives the same answer under every disturbance at every step, and releases all resources.

    Args:
        make_flow: returns a new flow for the same request.
        stages: generator function that simulates a stage, for each stage of the pipeline.
        frontend: name of the frontend stage.
        disturbances: disturbances to apply, each at every step and to every stage that the flow may use.
        requests: number of concurrent requests.
        options: options of the requests.

    Returns:
        The answer of an undisturbed run, for the caller to check.

    Raises:
        AssertionError: a check failed; the message contains the disturbance, its step and the check.
    """
    given = options or RequestOptions(modalities=tuple(sorted(make_flow().outputs)))

    def run(disturbance: Disturbance, stage: str, step: int, seed: int) -> World:
        world = World(make_flow, stages, frontend, given, requests, random.Random(seed))
        where = f"{disturbance} of {stage} at step {step}: " if stage else "undisturbed: "
        try:
            world.run(disturbance, stage, step)
        except Exception as error:
            raise AssertionError(f"{where}{error}") from error
        return world

    calm = run("none", "", -1, 0)
    expected = calm.answers["request 0"]
    assert not expected.failed, f"undisturbed: the request fails: {expected.failed}"
    for disturbance in disturbances:
        for stage in sorted(make_flow().stages):
            for step in range(calm.steps + 1):
                for name, answer in run(disturbance, stage, step, seed=step).answers.items():
                    if disturbance == "refuse" or (disturbance == "abort" and name == "request 0"):
                        continue
                    wrong = f"{disturbance} of {stage} at step {step}: {name} "
                    assert not answer.failed or disturbance == "gone", f"{wrong}fails: {answer.failed}"
                    assert answer.failed or _same(answer, expected), f"{wrong}gets {answer} instead of {expected}"
    return expected


class Replica:
    """One simulated replica: its inbox, the generators of its requests and streams, and exported hidden states.

    Args:
        stage: the generator function that simulates the stage.
        address: unique among all replicas and their restarts.
        stores: hidden states of all replicas; this replica stores its own under `address`.

    Attributes:
        inbox: effects of the request machine that `read` has not processed yet.
        running: input and generator of each request or stream, by engine id of the request or id of the stream.
    """

    def __init__(self, stage: Stage, address: str, stores: Stores) -> None:
        self._stage = stage
        self.address = address
        self._stores = stores
        stores[address] = {}
        self._exports: dict[str, HiddenStatesRef] = {}
        self._freed: set[str] = set()
        self._numbers = itertools.count()
        self.inbox: deque[m.Effect] = deque()
        self.running: dict[str, tuple[Work, Iterator[Reply | None]]] = {}
        self._streams: dict[str, str] = {}

    def read(self) -> None:
        """Process the messages in the inbox: start and end requests, and pass them input."""
        while self.inbox:
            match self.inbox.popleft():
                case m.SendPrompt(engine_id=engine_id, tokens=tokens, recompute=recompute, replica=replica):
                    self._begin(engine_id, engine_id, Forward(replica.stage), tokens, recompute)
                case m.SendOpen(engine_id=engine_id, action=action):
                    self._begin(engine_id, engine_id, action)
                case m.SendChunk(engine_id=engine_id, action=action):
                    if engine_id in self.running:  # otherwise the request has ended on this replica
                        self.running[engine_id][0].messages.append((engine_id, action))
                case m.SendPart(engine_id=engine_id, stream=stream, action=action) if action.part == 0:
                    self._streams[engine_id] = stream
                    self._begin(stream, engine_id, action)
                case m.SendPart(engine_id=engine_id, stream=stream, action=action):
                    assert stream in self.running, f"part {action.part} of a stream comes that {action.stage} has not"
                    self._streams[engine_id] = stream
                    self.running[stream][0].messages.append((engine_id, action))
                case m.SendStreamEnd(stream=stream):
                    self._end(stream)
                case m.AbortEngineRequests(engine_ids=engine_ids):
                    for engine_id in engine_ids:
                        self._end(self._streams.get(engine_id, engine_id))
                case m.FreeHiddenStates(name=name):
                    self._stores[self.address].pop(name, None)
                    self._freed.add(name)

    def _begin(
        self, key: str, engine_id: str, message: Any, resumed: tuple[int, ...] = (), recompute: bool = False
    ) -> None:
        assert key not in self.running, f"{key} is opened twice"
        work = Work(resumed, recompute, stores=self._stores)
        if isinstance(message, Open):
            work.joins = itertools.cycle(range(1, message.group + 1))
        work.messages.append((engine_id, message))
        self.running[key] = work, self._stage(work)

    def step(self, key: str, *, refuse: bool = False) -> tuple[str, Reply] | None:
        """Run one step of a request or stream; return (engine id, reply), or None if it waits for input.

        With `Open.group`, run 1 to `group` steps, and join their replies as the engine does.

        Args:
            key: key of the request or stream in `running`.
            refuse: replace the reply by an error.
        """
        work, replies = self.running[key]
        reply, work.later = work.later or next(replies, None), None
        if reply is None:
            return None
        size = next(work.joins)
        while 0 < len(reply.tokens) < size and (more := next(replies, None)) is not None:
            if (joined := _joined(reply, more)) is None:
                work.later = more
                break
            reply = joined
        if refuse:
            reply = Reply(payload=StageError("refused"), finish="error")
        if reply.hidden_states:
            assert reply.payload is None, "a step that exports hidden states has no other payload"
            reply = replace(reply, payload=self._export(work.engine_id, reply.hidden_states))
        if reply.finish is not None:
            self._streams.pop(work.engine_id, None)
            if work.last or reply.finish != "stop":
                self._end(key)
        return work.engine_id, reply

    def _export(self, engine_id: str, values: Sequence[Any]) -> HiddenStatesChunkReady | None:
        """Store hidden states of a request; return the message with their location, or None if it was freed already."""
        known = self._exports.get(engine_id)
        if known is None:
            name = f"{next(self._numbers)}/{engine_id}"
            known = HiddenStatesRef(source=self.address, name=name, count=0)
        if known.name in self._freed:
            return None
        self._stores[self.address].setdefault(known.name, []).extend(values)
        count = known.count + len(values)
        self._exports[engine_id] = HiddenStatesRef(source=self.address, name=known.name, count=count)
        return HiddenStatesChunkReady(source=self.address, name=known.name, first=known.count, count=len(values))

    def _end(self, key: str) -> None:
        self._exports.pop(key, None)
        if (ended := self.running.pop(key, None)) is not None:
            ended[0].free()


class World:
    """A request machine (`orchestrator.machine.RequestMachine`) and simulated replicas that execute its effects.

    One step of one request is run at a time.

    Args:
        make_flow: returns a new flow for each request.
        stages: generator function by stage.
        options: options of all requests.
        requests: number of concurrent requests.
        order: chooses the request that makes the next step.
    """

    def __init__(
        self,
        make_flow: Callable[[], Flow],
        stages: Mapping[str, Stage],
        frontend: str,
        options: RequestOptions,
        requests: int,
        order: random.Random,
    ) -> None:
        self._stages, self._order = stages, order
        self._flows = {f"request {i}": make_flow() for i in range(requests)}
        self._options = options
        pools = {stage: StagePool(stage, ()) for stage in stages}
        self.machine = RequestMachine(Settings(frontend=frontend), pools)
        self.replicas: dict[ReplicaId, Replica] = {}
        self._stores: Stores = {}
        self._starts = itertools.count()
        self.steps = 0
        self._texts: dict[str, list[int]] = {name: [] for name in self._flows}
        self._chunks: dict[str, list[OutputChunk]] = {name: [] for name in self._flows}
        self._ends: Counter[str] = Counter()
        self._forwarded: set[str] = set()
        self._failed: dict[str, str] = {}
        self._refuse = ""

    @property
    def answers(self) -> dict[str, Answer]:
        """Return the outputs that each client has received, by request id."""
        return {
            name: Answer(tuple(self._texts[name]), _outputs(self._chunks[name]), self._failed.get(name, ""))
            for name in self._flows
        }

    def run(self, disturbance: Disturbance, stage: str, at: int) -> None:
        """Run all requests to their end, with one of `DISTURBANCES` or none; check the state at the end.

        Args:
            stage: the stage whose replica dies, freezes or refuses.
            at: the number of steps, of all replicas together, before the disturbance.
        """
        for name in self._stages:
            for index in range(2 if disturbance in ("kill", "freeze") else 1):
                self._up(ReplicaId(name, index))
        for name, flow in self._flows.items():
            opened = m.Opened(
                request_id=name,
                external_id=name,
                flow=flow,
                options=self._options,
                sink=name,
                client=m.ClientRequest(request=None),
            )
            self._handle(opened)
        after: Callable[[], None] | None = None
        while True:
            if self.steps == at and disturbance != "none":
                after, at = self._disturb(disturbance, stage), -1
            if self._step():
                continue
            if after is None:
                break
            after()
            after = None
        self._check_the_end(disturbance)

    # -- disturbances --------------------------------------------------------------------------------------------

    def _disturb(self, disturbance: Disturbance, stage: str) -> Callable[[], None]:
        """Apply a disturbance; return the function to call when no request makes progress any more.

        That function starts the lost replica again for "restart" and "freeze", and does nothing for the others.
        """
        if disturbance == "abort":
            self._handle(m.Aborted("request 0"))
        elif disturbance == "refuse":
            self._refuse = stage
        else:
            return self._lose(disturbance, stage)
        return lambda: None

    def _lose(self, disturbance: Disturbance, stage: str) -> Callable[[], None]:
        busy = self.machine.placement.routes
        replica = max((r for r in self.replicas if r.stage == stage), key=lambda r: (len(busy.get(r, ())), -r.index))
        old = self.replicas.pop(replica)
        coming = disturbance in ("restart", "freeze")
        if coming:
            self._handle(m.ReplicaAnnounced(replica))
        self._handle(m.ReplicaLost(replica, "it is gone"))
        if disturbance == "freeze":  # its outputs still arrive
            old.read()
            for key in list(old.running):
                if (returned := old.step(key)) is not None:
                    self._returned(replica, *returned)
        del self._stores[old.address]
        return (lambda: self._up(replica)) if coming else (lambda: None)

    def _up(self, replica: ReplicaId) -> None:
        address = f"{replica}, start {next(self._starts)}"
        self.replicas[replica] = Replica(self._stages[replica.stage], address, self._stores)
        self._handle(m.ReplicaUp(replica))

    # -- progress ------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run one step of a random request; return False if no request makes progress."""
        for replica in self.replicas.values():
            replica.read()
        choices = [(name, key) for name, replica in self.replicas.items() for key in replica.running]
        self._order.shuffle(choices)
        for name, key in choices:
            refuse = name.stage == self._refuse
            if (returned := self.replicas[name].step(key, refuse=refuse)) is not None:
                self.steps += 1
                assert self.steps < MOST_STEPS, f"the flow has not ended after {MOST_STEPS} steps"
                if refuse:
                    self._refuse = ""
                self._returned(name, *returned)
                return True
        return False

    def _returned(self, replica: ReplicaId, engine_id: str, reply: Reply) -> None:
        ready = reply.payload
        output = m.Output(
            replica=replica,
            engine_id=engine_id,
            tokens=reply.tokens,
            payload=ready,
            finish=reply.finish,
            hidden_states=(ready.source, ready.name) if isinstance(ready, HiddenStatesChunkReady) else None,
        )
        self._handle(output, reply.tokens)

    def _handle(self, event: m.Event, tokens: tuple[int, ...] = ()) -> None:
        for effect in self.machine.handle(event):
            if isinstance(effect, m.SendPrompt):
                self._forwarded.add(effect.request_id)
            match effect:
                case m.Send() | m.AbortEngineRequests() | m.FreeHiddenStates():
                    if effect.replica in self.replicas:
                        self.replicas[effect.replica].inbox.append(effect)
                case m.Accept(name=name, to_client=True):
                    self._texts[name] += tokens
                case m.ToCaller(sink=sink, item=m.END):
                    self._ends[sink] += 1
                case m.ToCaller(sink=sink, item=item):
                    assert sink not in self._failed and not self._ends[sink], f"{sink} gets more after its end"
                    self._chunks[sink].append(item)
                case m.FailRequest(sink=sink, error=error):
                    self._failed[sink] = str(error)
        self.machine.check()

    # -- checks at the end ---------------------------------------------------------------------------------------

    def _check_the_end(self, disturbance: Disturbance) -> None:
        waiting = ", ".join(f"{state.history_text()}" for state in self.machine.requests.values())
        assert not self.machine.requests, f"no message is left, and requests have not ended: {waiting}"
        assert not self.machine.held(), f"{self.machine.held()} entries are held after the end"
        for replica_id, replica in self.replicas.items():
            assert not replica.running, f"{replica_id} still works on {list(replica.running)}"
            assert not (left := self._stores[replica.address]), f"{replica_id} still stores hidden states of {left}"
        for name, flow in self._flows.items():
            if name in self._failed or (disturbance == "abort" and name == "request 0"):
                continue
            assert self._ends[name] == 1, f"{name} has ended {self._ends[name]} times"
            last = Counter(chunk.modality for chunk in self._chunks[name] if chunk.last)
            assert set(last.values()) <= {1}, f"{name} has several last chunks: {last}"
            missing = set(flow.outputs) - set(last) - ({"text"} if name in self._forwarded else set())
            assert not missing, f"{name} has no last chunk of {sorted(missing)}"


def _joined(one: Reply, other: Reply) -> Reply | None:
    """Return one reply with the tokens and arrays of two successive replies; None if an engine sends two outputs."""
    pair = (one, other)
    if any(each.finish is not None or each.hidden_states or not each.tokens for each in pair):
        return None
    payload = None
    if all(isinstance(each.payload, np.ndarray) for each in pair):
        payload = np.concatenate([one.payload, other.payload])
    elif any(each.payload is not None for each in pair):
        return None
    return Reply(tokens=one.tokens + other.tokens, payload=payload)


def _outputs(chunks: Sequence[OutputChunk]) -> dict[str, Any]:
    """Join the chunks of an answer; return the outputs by modality (`Answer.outputs`)."""
    outputs: dict[str, Any] = {}
    for chunk in chunks:
        match chunk:
            case ProgressChunk() | ImageChunk(partial=True):
                continue
            case AudioChunk(samples=samples):
                before = outputs.get(chunk.modality, np.zeros(0, samples.dtype))
                outputs[chunk.modality] = np.concatenate([before, samples])
            case TextChunk(text=text):
                outputs[chunk.modality] = outputs.get(chunk.modality, "") + text
            case ImageChunk(pixels=pixels):
                outputs.setdefault(chunk.modality, []).append(pixels)
            case _:
                outputs.setdefault(chunk.modality, []).append(replace(chunk, request_id=""))
    return outputs


def _same(one: Answer, other: Answer) -> bool:
    same = one.text == other.text and one.outputs.keys() == other.outputs.keys()
    return same and all(_equal(value, other.outputs[name]) for name, value in one.outputs.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def write_byte_tokenizer(
    directory: Path, *, chat_template: str = CHAT_TEMPLATE, special_tokens: tuple[str, str] = SPECIAL_TOKENS
) -> int:
    """Write a tokenizer whose tokens are bytes to a checkpoint's directory; return the size of its vocabulary.

    Args:
        special_tokens: tokens for the beginning and the end of a text, which get the last two ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    begin, end = special_tokens
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=end)
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return BYTES + len(SPECIAL_TOKENS)
