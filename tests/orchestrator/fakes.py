"""Replicas that write down what they are sent, and a plugin whose flows do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from vllm_omni_ext.errors import OmniError, RequestError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator.flow import Action, Feed, Open, Produced
from vllm_omni_ext.orchestrator.orchestrator import TICKET, Orchestrator
from vllm_omni_ext.orchestrator.requests import OmniOptions, TextRequest
from vllm_omni_ext.pool.stage_pool import StagePool

STAGES = ("text", "voice", "sound")
VOICE_ROOM = 50
POOLING = {"task": "token_embed"}
OPTIONS = OmniOptions(modalities=("text", "audio"))


class FakeReplica:
    """Remembers requests and aborts; `error` is raised by the next `add`."""

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
    """Answers each event with what `script` says."""

    def __init__(self, script: Callable[[Produced], list[Action]], beginning: list[Action]) -> None:
        self.script = script
        self.beginning = beginning
        self.events: list[Produced] = []

    def begin(self) -> list[Action]:
        return self.beginning

    def handle(self, event: Produced) -> list[Action]:
        self.events.append(event)
        return self.script(event)

    def replay(self, stage: str) -> list[Action]:
        if stage == "sound":
            return [Feed(stage, 0, [9], POOLING, last=True)]
        return [Open(stage, [9, 9, 9], {"again": True}, stop=(75,), done=1)]


class FakePlugin:
    """Gives every request a scripted flow; `change` may alter the text request as a plugin would."""

    sample_rate = 24_000
    recital_prompt = ""
    output_modalities = ("text", "audio")
    voices = ("ethan",)
    default_voice = "ethan"

    def __init__(self, script: Callable[[Produced], list[Action]]) -> None:
        self.script = script
        self.beginning: list[Action] = []
        self.change: Callable[[TextRequest], None] = lambda request: None
        self.flows: list[ScriptedFlow] = []
        self.prompts: list[Sequence[int]] = []

    def check(self, options: OmniOptions) -> None:
        if "smell" in options.modalities:
            raise RequestError("modalities: 'smell' is not available", parameter="modalities")

    def room(self, prompt: Sequence[int], options: OmniOptions, limits: Mapping[str, int]) -> Mapping[str, int]:
        return {"voice": VOICE_ROOM}

    def open(self, request: TextRequest, options: OmniOptions) -> ScriptedFlow:
        self.change(request)
        self.prompts.append(request.prompt)
        self.flows.append(ScriptedFlow(self.script, self.beginning))
        return self.flows[-1]

    def decode(self, stage: str, tensor: Any) -> Any:
        return (stage, tensor)


class Bench:
    """An orchestrator over fake replicas, and short ways to drive it."""

    def __init__(
        self,
        script: Callable[[Produced], list[Action]],
        wait_s: float = 0.0,
        joinable: bool = False,
        chunk_deadline_s: float = 30.0,
        **counts: int,
    ) -> None:
        self.failures: list[tuple[str, OmniError]] = []
        ids = [ReplicaId(stage, i) for stage in STAGES for i in range(counts.get(stage, 1))]
        self.replicas = {replica: FakeReplica(replica) for replica in ids}
        self.plugin = FakePlugin(script)
        self._answered: set[str] = set()
        self.pools = {s: StagePool(s, [r for r in ids if r.stage == s]) for s in STAGES}
        self.orchestrator = Orchestrator(
            plugin=self.plugin,
            text_stage="text",
            pools=self.pools,
            replicas=self.replicas,
            sampling={"voice": {"temperature": 0.9, "max_tokens": 40}},
            limits={"text": 1000, "voice": 1000, "sound": 1000},
            wait_s=wait_s,
            joinable=joinable,
            failed=lambda request_id, error: self.failures.append((request_id, error)),
            chunk_deadline_s=chunk_deadline_s,
        )

    def of(self, name: str) -> FakeReplica:
        return self.replicas[ReplicaId.parse(name)]

    def bound(self, stage: str, request_id: str) -> FakeReplica:
        replica = self.pools[stage].replica_of(request_id)
        assert replica is not None
        return self.replicas[replica]

    async def start(self, request_id: str, options: OmniOptions = OPTIONS) -> tuple[str, asyncio.Queue[Any]]:
        """Open a request with a ticket: (ticket, sink)."""
        sink: asyncio.Queue[Any] = asyncio.Queue()
        ticket = self.orchestrator.expect(options, sink)
        await self.orchestrator.open(text_request(request_id, {TICKET: ticket}))
        return ticket, sink

    async def produce(self, stage: str, request_id: str, *tokens: int, tensor: Any = None, end: str = "") -> None:
        replica = self.pools[stage].replica_of(request_id) or ReplicaId(stage, 0)
        engine_id = self._part(request_id) if stage == "sound" else request_id
        await self.orchestrator.produced(replica, output(engine_id, *tokens, tensor=tensor, end=end))

    def _part(self, request_id: str) -> str:
        """The oldest part of a request that has no answer yet; any id if there is none."""
        replica = self.pools["sound"].replica_of(request_id)
        for request in () if replica is None else self.replicas[replica].added:
            if request.request_id.startswith(f"{request_id}/") and request.request_id not in self._answered:
                self._answered.add(request.request_id)
                return request.request_id
        return f"{request_id}/0/0"


def text_request(request_id: str, extra_args: dict[str, Any] | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(extra_args=extra_args),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=f"external {request_id}",
    )


def output(request_id: str, *tokens: int, tensor: Any = None, end: str = "") -> EngineCoreOutput:
    reason = FinishReason[end.upper()] if end else None
    return EngineCoreOutput(request_id, list(tokens), pooling_output=tensor, finish_reason=reason)


def owners(engine_ids: Iterable[str]) -> list[str]:
    """Whose requests or parts these are."""
    return [engine_id.partition("/")[0] for engine_id in engine_ids]
