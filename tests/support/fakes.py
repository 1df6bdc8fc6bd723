"""Replicas that record requests, and flows whose actions a test gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests, client_request
from vllm_omni_ext.orchestrator.messages import END, Opened
from vllm_omni_ext.orchestrator.orchestrator import Orchestrator
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.flow import Action, Flow, Forward, ForwardFlow, Open, Produced, Submit
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool

STAGES = ("text", "voice", "sound")
VOICE_BUDGET = 50
POOLING_TASK = "token_embed"
OPTIONS = RequestOptions(modalities=("text", "audio"))


class Words(msgspec.Struct):
    """The payload of the voice stage."""

    track: list[int] = []
    text: list[int] = []
    again: bool = False


def part(prompt: list[int], number: int = 0, *, last: bool = True, stage: str = "sound") -> Submit:
    return Submit(stage=stage, part=number, prompt=prompt, last=last, pooling_task=POOLING_TASK)


class FakeReplica:
    """Records requests and aborts; `add` raises `error` if there is one."""

    def __init__(self, replica: ReplicaId) -> None:
        self.id = replica
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    async def add(self, request: EngineCoreRequest) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.added.append(request)

    async def abort(self, request_ids: list[str]) -> None:
        await asyncio.sleep(0)
        self.aborted += request_ids

    async def call(self, utility: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        self.calls.append((utility, *args))

    def close(self, timeout: float | None = None) -> None:
        raise AssertionError("the orchestrator does not own replicas")


class ScriptedFlow:
    """Forwards the request, then returns the actions of `script` for each event."""

    stages, outputs = frozenset(STAGES), frozenset({"audio"})

    def __init__(self, script: Callable[[Produced], list[Action]], beginning: list[Action]) -> None:
        self.script, self.beginning = script, beginning
        self.events: list[Produced] = []

    def begin(self) -> list[Action]:
        return [Forward("text"), *self.beginning]

    def handle(self, event: Produced) -> list[Action]:
        self.events.append(event)
        return self.script(event)

    def replay(self, stage: str) -> list[Action]:
        if stage == "sound":
            return [part([9])]
        return [Open(stage=stage, prompt=[9, 9, 9], payload=Words(again=True), stop=(75,), done=1)]


class FakeRuntime:
    """Decodes a tensor to a pair with the name of its stage."""

    fields = object

    def decode(self, stage: str, tensor: Any) -> Any:
        return (stage, tensor)


class Bench:
    """An orchestrator over fake replicas."""

    def __init__(
        self,
        script: Callable[[Produced], list[Action]],
        wait_s: float = 0.0,
        joinable: bool = False,
        chunk_timeout_s: float = 30.0,
        beginning: tuple[Action, ...] = (),
        **counts: int,
    ) -> None:
        self.failures: list[tuple[str, OmniError]] = []
        ids = [ReplicaId(stage, i) for stage in STAGES for i in range(counts.get(stage, 1))]
        self.replicas = {replica: FakeReplica(replica) for replica in ids}
        self.runtime: Any = FakeRuntime()
        self.script, self.beginning = script, list(beginning)
        self.flows: list[ScriptedFlow] = []
        self._answered: set[str] = set()
        self.pools = {s: StagePool(s, [r for r in ids if r.stage == s]) for s in STAGES}
        self.orchestrator = Orchestrator(
            Settings(frontend="text", wait_s=wait_s, joinable=joinable, input_deadline_s=chunk_timeout_s),
            runtime=self.runtime,
            pools=self.pools,
            replicas=self.replicas,
            requests=EngineRequests({"voice": {"temperature": 0.9, "max_tokens": 40}}),
            failed=lambda request_id, error: self.failures.append((request_id, error)),
        )
        check_always(self.orchestrator)

    def of(self, name: str) -> FakeReplica:
        return self.replicas[ReplicaId.parse(name)]

    def replica_of(self, stage: str, request_id: str) -> ReplicaId | None:
        return replica_of(self.orchestrator, stage, request_id)

    def bound(self, stage: str, request_id: str) -> FakeReplica:
        replica = self.replica_of(stage, request_id)
        assert replica is not None
        return self.replicas[replica]

    async def start(
        self, request_id: str, options: RequestOptions = OPTIONS, request: EngineCoreRequest | None = None
    ) -> tuple[str, asyncio.Queue[Any]]:
        """Open a request for sound: (its id, sink)."""
        sink: asyncio.Queue[Any] = asyncio.Queue()
        self.flows.append(ScriptedFlow(self.script, self.beginning))
        await self.open(request or text_request(request_id), self.flows[-1], sink, options)
        return request_id, sink

    async def open(
        self,
        request: EngineCoreRequest,
        flow: Flow | None = None,
        sink: asyncio.Queue[Any] | None = None,
        options: RequestOptions = OPTIONS,
    ) -> None:
        """Open a request; without a flow, for text alone."""
        await self.orchestrator.open(opened(request, flow, sink, options, {"voice": VOICE_BUDGET}))

    async def settle(self) -> None:
        """Wait until all effects have been sent."""
        for _ in range(9):
            await asyncio.sleep(0)
        while self.orchestrator._sending:
            await asyncio.sleep(0)

    async def produce(self, stage: str, request_id: str, *tokens: int, tensor: Any = None, end: str = "") -> None:
        replica = self.replica_of(stage, request_id) or ReplicaId(stage, 0)
        engine_id = self._part(request_id) if stage == "sound" else request_id
        await self.orchestrator.produced(replica, output(engine_id, *tokens, tensor=tensor, end=end))

    def _part(self, request_id: str) -> str:
        """Id of the oldest part of a request without an answer; any id if there is none."""
        replica = self.replica_of("sound", request_id)
        for request in () if replica is None else self.replicas[replica].added:
            if request.request_id.startswith(f"{request_id}/") and request.request_id not in self._answered:
                self._answered.add(request.request_id)
                return request.request_id
        return f"{request_id}/0/0"


def opened(
    request: EngineCoreRequest,
    flow: Flow | None = None,
    sink: asyncio.Queue[Any] | None = None,
    options: RequestOptions = OPTIONS,
    budgets: dict[str, int] | None = None,
) -> Opened:
    return Opened(
        request_id=request.request_id,
        external_id=request.external_req_id or request.request_id,
        flow=flow or ForwardFlow("text"),
        options=options,
        sink=sink,
        client=client_request(request),
        budgets=budgets or {},
    )


def replica_of(orchestrator: Orchestrator, stage: str, name: str) -> ReplicaId | None:
    """The replica that a request is bound to in a stage; None if there is none."""
    bindings = (binding for state in orchestrator.machine.requests.values() for binding in state)
    return next((each.replica for each in bindings if (each.stage, each.name) == (stage, name)), None)


def check_always(orchestrator: Orchestrator) -> None:
    """Have the machine check itself after every event."""
    handle = orchestrator.machine.handle

    def checked(event: Any, now: float) -> Any:
        effects = handle(event, now)
        orchestrator.machine.check()
        return effects

    orchestrator.machine.handle = checked  # type: ignore[method-assign]


def drained(sink: asyncio.Queue[Any]) -> list[Any]:
    """Outputs for the caller, without the mark of the end."""
    return [item for item in (sink.get_nowait() for _ in range(sink.qsize())) if item != END]


def text_request(request_id: str, extra_args: dict[str, Any] | None = None) -> EngineCoreRequest:
    params = SamplingParams(extra_args=extra_args)
    external = {"arrival_time": 0.0, "external_req_id": f"external {request_id}"}
    unused = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    return EngineCoreRequest(request_id, [1, 2, 3], sampling_params=params, **external, **unused)


def output(request_id: str, *tokens: int, tensor: Any = None, end: str = "") -> EngineCoreOutput:
    reason = FinishReason[end.upper()] if end else None
    return EngineCoreOutput(request_id, list(tokens), pooling_output=tensor, finish_reason=reason)


def owners(engine_ids: Iterable[str]) -> list[str]:
    """The requests to which these requests or parts belong."""
    return [engine_id.partition("/")[0] for engine_id in engine_ids]
