"""Requests that a flow opens in a frontend with prefill and decode replicas: events in, effects out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.disaggregation.parameters import KEY
from vllm_omni_ext.errors import RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.engine_requests import EngineRequests
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.flow import Action, Close, Extend, Fail, Open, Produced
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool
from vllm_omni_ext.wire.envelope import StageError
from vllm_omni_ext.wire.stage_input import EXPORT, INPUT, OPEN_END

PREFILL, DECODE = ReplicaId("ar.prefill", 0), ReplicaId("ar.decode", 0)
KV = {"do_remote_prefill": True, "transfer_id": "t"}
PROMPT = [5, 6, 7]
SCOPE = ("adapter", "salt")


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A message of the flow to the frontend's worker."""

    text: str


class Plan:
    """Opens the frontend itself, and records what it receives."""

    stages = frozenset({"ar"})
    outputs = frozenset({"image"})

    def __init__(self, **given: Any) -> None:
        self.given = {"stage": "ar", "prompt": PROMPT, **given}
        self.events: list[Produced] = []
        self.answers: list[Action] = []

    def begin(self) -> list[Action]:
        return [Open(**self.given)]

    def handle(self, event: Produced) -> list[Action]:
        self.events.append(event)
        return self.answers

    def replay(self, stage: str) -> list[Action]:
        assert stage == "ar"
        tokens = [token for event in self.events for token in event.tokens]
        return [Open(**{**self.given, "prompt": [*PROMPT, *tokens], "done": len(tokens)})]


class Machine:
    """A machine with one replica of each side, which is checked after every event."""

    def __init__(self, flow: Plan, budget: int | None = None, params: Any = None) -> None:
        self.pools = {each.stage: StagePool(each.stage, [each]) for each in (PREFILL, DECODE)}
        settings = Settings(frontend="ar.decode", model_frontend="ar", prefill="ar.prefill", chunked=frozenset())
        self.machine = RequestMachine(settings, self.pools)
        self.flow = flow
        options = RequestOptions(modalities=("image",), params={} if params is None else {"ar": params})
        budgets = {} if budget is None else {"ar": budget}
        self.effects = self.send(
            m.Opened(
                request_id="r",
                external_id="r",
                flow=flow,
                options=options,
                sink="sink",
                budgets=budgets,
                scope=SCOPE,
            )
        )

    def send(self, event: m.Event) -> list[m.Effect]:
        effects = self.machine.handle(event)
        self.machine.check()
        return effects

    def out(self, replica: ReplicaId, engine_id: str, *tokens: int, **more: Any) -> list[m.Effect]:
        return self.send(m.Output(replica=replica, engine_id=engine_id, tokens=tokens, **more))

    def prefilled(self, **more: Any) -> list[m.Effect]:
        """The last output of the prefill replica."""
        return self.out(PREFILL, "r/ar.decode/p0", 9, finish="length", kv=KV, **more)


def of(effects: list[m.Effect], kind: Any) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_the_prompt_is_computed_by_prefill_and_the_flow_gets_the_outputs_of_decode_under_the_stage_s_name() -> None:
    machine = Machine(Plan(), budget=4)
    (first,) = of(machine.effects, m.SendOpen)
    assert (first.replica, first.side, first.kv, first.budget) == (PREFILL, "prefill", None, 4)
    (second,) = of(machine.prefilled(), m.SendOpen)
    assert (second.replica, second.side, second.kv, second.budget) == (DECODE, "decode", KV, 4)
    assert first.scope == second.scope == SCOPE
    assert machine.flow.events == [], "the token of the prefill replica is dropped"
    machine.out(DECODE, second.engine_id, 11)
    machine.out(DECODE, second.engine_id, 12, finish="stop")
    assert [(event.stage, event.tokens, event.finish) for event in machine.flow.events] == [
        ("ar", (11,), None),
        ("ar", (12,), "stop"),
    ]
    assert not machine.machine.placement


def test_a_lost_decode_replica_s_request_goes_through_prefill_again_with_its_tokens() -> None:
    machine = Machine(Plan())
    machine.prefilled()
    machine.out(DECODE, "r/ar.decode/d1", 11)
    machine.send(m.ReplicaAnnounced(DECODE))
    (again,) = of(machine.send(m.ReplicaLost(DECODE, "it is gone")), m.SendOpen)
    assert (again.replica, again.side, again.engine_id) == (PREFILL, "prefill", "r/ar.decode/p2")
    assert (again.action.prompt, again.action.done) == ([*PROMPT, 11], 1)


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"prompt": [5]}, None),
        ({"export": ((0, OPEN_END),)}, None),
        ({}, SamplingParams(prompt_logprobs=1)),
        ({}, SamplingParams(skip_reading_prefix_cache=True)),
    ],
)
def test_a_prompt_that_cannot_be_split_is_computed_by_decode(given: dict[str, Any], params: Any) -> None:
    (sent,) = of(Machine(Plan(**given), params=params).effects, m.SendOpen)
    assert (sent.replica, sent.side, sent.kv) == (DECODE, "whole", None)


def test_a_closed_prompt_is_aborted_and_its_late_kv_cache_released() -> None:
    machine = Machine(Plan())
    machine.flow.answers = [Close("ar")]
    note = StageError("stop")
    effects = machine.out(PREFILL, "r/ar.decode/p0", payload=note)
    assert of(effects, m.AbortEngineRequests) == [m.AbortEngineRequests(PREFILL, ("r/ar.decode/p0",))]
    (release,) = of(machine.prefilled(), m.SendKVRelease)
    assert (release.replica, release.kv) == (DECODE, KV)


@pytest.mark.parametrize("answer", [Close("ar"), Fail("no")])
def test_a_flow_that_ends_a_prompt_at_its_last_output_of_prefill_releases_the_kv_cache(answer: Action) -> None:
    machine = Machine(Plan())
    machine.flow.answers = [answer]
    effects = machine.prefilled(payload=StageError("no"))
    assert of(effects, m.SendOpen) == [] and [each.kv for each in of(effects, m.SendKVRelease)] == [KV]
    assert not machine.machine.placement


def test_input_in_chunks_is_refused() -> None:
    (failed,) = of(Machine(Plan(last=False)).effects, m.FailRequest)
    assert isinstance(failed.error, RequestFailed) and "stage 'ar', which takes no chunks" in str(failed.error)
    machine = Machine(Plan())
    machine.prefilled()
    machine.flow.answers = [Extend(stage="ar")]
    (failed,) = of(machine.out(DECODE, "r/ar.decode/d1", 11), m.FailRequest)
    assert isinstance(failed.error, RequestFailed) and "stage 'ar', which takes no chunks" in str(failed.error)


def test_both_engine_requests_have_the_flow_s_message_and_one_has_the_parameters() -> None:
    export = ((0, 2),)
    action = Open(stage="ar", prompt=[*PROMPT, 8], payload=Note("n"), done=1, stop=(3,), export=export)
    params = SamplingParams(max_tokens=20, temperature=0.5, seed=4)
    requests = EngineRequests({"ar": {"max_tokens": 3}})
    prefill, decode, whole = (
        requests.make(m.SendOpen(PREFILL, "r", f"r/{side}", action=action, params=params, budget=9, side=side, kv=kv))
        for side, kv in (("prefill", None), ("decode", KV), ("whole", None))
    )
    assert prefill.prompt_token_ids == decode.prompt_token_ids == [*PROMPT, 8]
    message = whole.sampling_params.extra_args[INPUT]
    assert message["payload"] == {"type": "note", "text": "n"} and message["done"] == 1
    first, second = prefill.sampling_params, decode.sampling_params
    assert first.extra_args.keys() == {INPUT, EXPORT, KEY} and first.skip_reading_prefix_cache
    assert first.extra_args[INPUT] == message and first.extra_args[EXPORT] == [[0, 2]]
    assert (first.max_tokens, first.temperature, first.stop_token_ids, first.seed) == (1, 0.0, [], None)
    assert second.extra_args == {INPUT: message, KEY: KV} and not second.skip_reading_prefix_cache
    assert (second.max_tokens, second.stop_token_ids, second.temperature, second.seed) == (8, [3], 0.5, 4)
    assert whole.sampling_params.extra_args == {INPUT: message, EXPORT: [[0, 2]]}
    default = requests.make(m.SendOpen(DECODE, "r", "r", action=Open(stage="ar", prompt=PROMPT)))
    assert default.sampling_params.max_tokens == 3
