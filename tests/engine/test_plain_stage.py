"""Scheduler and worker of a stage that is no language model, without an engine process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_omni_ext.engine import plain_stage
from vllm_omni_ext.engine.plain_stage import Answer, PlainModel, PlainRequest, PlainScheduler, PlainWorker, StreamLost
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.wire.envelope import StageError, StageProgress, unpack
from vllm_omni_ext.wire.priorities import of_part
from vllm_omni_ext.wire.stage_input import FILLER, INPUT, PART, PartHeader, StageInput

ROOM = 2
LONGEST = 64


class Paint(msgspec.Struct, frozen=True):
    """The flow's message."""

    seed: int


class PaintParams(msgspec.Struct, frozen=True):
    """The stage's own parameters."""

    steps: int = 2


class Painter(PlainModel):
    """Counts to the number of steps, and answers with the seed."""

    payloads = Paint
    params = PaintParams

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, PlainRequest] = {}
        self.done: dict[str, int] = {}
        self.forgotten: list[str] = []

    def open(self, request: PlainRequest) -> None:
        if request.params.steps < 1:
            raise ValueError("steps: at least 1")
        self.running[request.req_id], self.done[request.req_id] = request, 0

    def step(self, req_ids: Sequence[str]) -> Mapping[str, Answer]:
        return {req_id: self._step(req_id, self.running[req_id]) for req_id in req_ids}

    def _step(self, req_id: str, request: PlainRequest) -> Answer:
        self.done[req_id] += 1
        if self.done[req_id] < request.params.steps:
            return Answer(StageProgress(self.done[req_id], request.params.steps))
        return Answer(torch.full((2, 2, 3), request.payload.seed, dtype=torch.uint8), last=True)

    def close(self, req_id: str) -> None:
        self.running.pop(req_id, None)
        self.done.pop(req_id, None)

    def forget(self, stream: str) -> None:
        self.forgotten.append(stream)


class Engine:
    """The engine's loop: the scheduler, the worker, and the outputs that each client receives."""

    def __init__(
        self,
        model: Painter | None = None,
        scheduler: Any = PlainScheduler,
        log_stats: bool = False,
        policy: str = "fcfs",
    ) -> None:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=ROOM, policy=policy),
            model_config=SimpleNamespace(max_model_len=LONGEST),
            kv_transfer_config=None,
        )
        self.scheduler = scheduler(vllm_config=config, log_stats=log_stats)
        self.model = model or Painter()
        self.worker = PlainWorker.__new__(PlainWorker)
        self.worker.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.got: dict[str, list[EngineCoreOutput]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def step(self) -> int:
        """Do one step if there is one; return the number of its requests."""
        if not self.scheduler.has_requests():
            return 0
        output = self.scheduler.schedule()
        self.receive(output, self.worker.execute_model(output))
        return output.total_num_scheduled_tokens

    def receive(self, step: Any, answers: Any) -> None:
        for client, made in self.scheduler.update_from_output(step, answers).items():
            for each in made.outputs:
                assert each.request_id.startswith(f"{client}/")
                self.got.setdefault(each.request_id, []).append(each)

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()
        assert not (self.model.running or self.model.done or self.scheduler.get_num_unfinished_requests())


def request(name: str, seed: Any = 7, steps: int = 2, client: int = 0) -> Request:
    part = PartHeader(stream=name, part=0, last=True, empty=True, payload={"seed": seed}, params={"steps": steps})
    return engine_request(f"{client}/{name}", {PART: part.as_extra()}, client)


def engine_request(req_id: str, extra: dict[str, Any], client: int = 0) -> Request:
    return Request(
        request_id=req_id,
        prompt_token_ids=FILLER,
        sampling_params=SamplingParams(extra_args=extra),
        pooling_params=None,
        client_index=client,
        arrival_time=1.0,
    )


def messages(outputs: list[EngineCoreOutput]) -> list[Any]:
    return [unpack(each.pooling_output) for each in outputs]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2)), max_size=7))
def test_every_request_is_answered_step_by_step(requests: list[tuple[int, int, int]]) -> None:
    """At any times and from any clients; never more run at once than allowed."""
    engine = Engine()
    for number, (steps, later, client) in enumerate(requests):
        engine.add(request(f"r{number}", seed=number, steps=steps, client=client))
        for _ in range(later):
            assert engine.step() <= ROOM
    engine.run()
    for number, (steps, _, client) in enumerate(requests):
        outputs = engine.got[f"{client}/r{number}"]
        assert messages(outputs[:-1]) == [StageProgress(done, steps) for done in range(1, steps)]
        assert outputs[-1].pooling_output is not None and outputs[-1].pooling_output.unique().tolist() == [number]
        assert [each.finish_reason for each in outputs] == [None] * (steps - 1) + [FinishReason.STOP]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (request("bad", steps=0), "steps: at least 1"),
        (request("bad", seed="x"), "Expected `int`, got `str`"),
        (engine_request("0/bad", {PART: {"stream": "bad"}}), "missing required field"),
    ],
    ids=["model", "payload", "header"],
)
def test_a_request_that_cannot_be_served_ends_alone_with_the_reason(bad: Request, why: str) -> None:
    engine = Engine()
    engine.add(bad)
    engine.add(request("good"))
    engine.run()
    (error,) = engine.got["0/bad"]
    (message,) = messages([error])
    assert error.finish_reason == FinishReason.ERROR and isinstance(message, StageError) and why in message.reason
    assert not message.lost
    assert len(engine.got["0/good"]) == 2


def test_a_part_whose_stream_the_model_has_dropped_ends_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(model: Painter, request: PlainRequest) -> None:
        raise StreamLost("part 3 came for a stream that is not open")

    monkeypatch.setattr(Painter, "open", dropped)
    engine = Engine()
    engine.add(request("late"))
    engine.run()
    assert messages(engine.got["0/late"]) == [StageError("part 3 came for a stream that is not open", lost=True)]


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_a_request_can_be_aborted_after_or_during_any_step(after: int, during: bool) -> None:
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.add(request(name, steps=3))
    for _ in range(after):
        engine.step()
    output = engine.scheduler.schedule()
    answers = engine.worker.execute_model(output) if during else None
    ended = engine.scheduler.finish_requests(["0/a", "0/c", "0/unknown"], RequestStatus.FINISHED_ABORTED)
    assert [each.request_id for each in ended] == (["0/a", "0/c"] if after < 3 else ["0/c"])
    engine.receive(output, answers or engine.worker.execute_model(output))
    engine.run()
    assert len(engine.got.get("0/a", [])) == min(after, 3) and "0/c" not in engine.got
    assert len(engine.got["0/b"]) == 3


def test_a_request_that_was_opened_is_served_too() -> None:
    engine = Engine()
    given_ = StageInput(payload={"seed": 3}, params={"steps": 1})
    engine.add(engine_request("0/r", {INPUT: msgspec.to_builtins(given_)}))
    engine.step()
    opened = engine.model.running["0/r"]
    assert (opened.payload, opened.params, opened.part) == (Paint(3), PaintParams(1), None)
    assert list(opened.prompt) == FILLER, "only a part header marks a prompt as empty"
    engine.run()
    assert [each.finish_reason for each in engine.got["0/r"]] == [FinishReason.STOP]


def test_the_end_of_a_stream_reaches_the_model() -> None:
    engine = Engine()
    engine.add(engine_request("0/end", {PART: PartHeader.end("s").as_extra()}))
    engine.run()
    assert engine.model.forgotten == ["s"]
    assert [(each.pooling_output, each.finish_reason) for each in engine.got["0/end"]] == [(None, FinishReason.STOP)]


def test_a_pause_holds_requests_back() -> None:
    engine = Engine()
    engine.add(request("running", steps=3))
    engine.step()
    engine.add(request("new"))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    assert len(engine.got["0/running"]) == 3 and "0/new" not in engine.got
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert len(engine.got["0/new"]) == 2


def test_steps_have_statistics_and_events_if_enabled() -> None:
    engine = Engine(log_stats=True)
    engine.add(request("r"))
    output = engine.scheduler.schedule()
    made = engine.scheduler.update_from_output(output, engine.worker.execute_model(output))
    assert made[0].scheduler_stats is not None and made[0].scheduler_stats.num_running_reqs == 1
    assert [event.type.name for event in made[0].outputs[0].events or ()] == ["QUEUED", "SCHEDULED"]


def test_async_scheduling_is_refused() -> None:
    asynchronous = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True, max_num_seqs=ROOM))
    with pytest.raises(ConfigError, match=r"^async_scheduling: "):
        PlainScheduler(vllm_config=asynchronous)


def test_a_stage_without_a_kv_cache_cannot_be_split() -> None:
    limits = SimpleNamespace(async_scheduling=False, max_num_seqs=ROOM, policy="fcfs")
    config = SimpleNamespace(
        scheduler_config=limits,
        model_config=SimpleNamespace(max_model_len=LONGEST),
        kv_transfer_config=SimpleNamespace(kv_role="kv_producer"),
    )
    with pytest.raises(ConfigError, match=r"^kv_transfer_config: .*; remove prefill_decode$"):
        PlainScheduler(vllm_config=config)


class Writer(Painter):
    """Writes the numbers from its prompt's last token on, two in each step."""

    def step(self, req_ids: Sequence[str]) -> Mapping[str, Answer]:
        answers = {}
        for req_id in req_ids:
            first = self.running[req_id].prompt[-1] + self.done[req_id] + 1
            self.done[req_id] += 2
            answers[req_id] = Answer(None, tokens=(first, first + 1))
        return answers


def written(name: str, prompt: list[int], params: SamplingParams) -> Request:
    params.extra_args = {INPUT: msgspec.to_builtins(StageInput(payload={"seed": 1}))}
    return Request(
        request_id=f"0/{name}", prompt_token_ids=prompt, sampling_params=params, pooling_params=None, client_index=0
    )


@pytest.mark.parametrize(
    ("params", "prompt", "tokens", "reason", "stop"),
    [
        (SamplingParams(max_tokens=3), [1, 5], [6, 7, 8], FinishReason.LENGTH, None),
        (SamplingParams(max_tokens=9, stop_token_ids=[8]), [5], [6, 7, 8], FinishReason.STOP, 8),
        (SamplingParams(max_tokens=99), [5] * (LONGEST - 3), [6, 7, 8], FinishReason.LENGTH, None),
    ],
    ids=["length", "stop token", "longest sequence"],
)
def test_tokens_end_at_the_length_or_a_stop_token(
    params: SamplingParams, prompt: list[int], tokens: list[int], reason: FinishReason, stop: int | None
) -> None:
    engine = Engine(model=Writer())
    engine.add(written("r", prompt, params))
    engine.run()
    outputs = engine.got["0/r"]
    assert [token for each in outputs for token in each.new_token_ids] == tokens
    assert [each.pooling_output for each in outputs] == [None] * len(outputs)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop)
    stats = [each.prefill_stats for each in outputs]
    assert stats[0] is not None and stats[0].num_computed_tokens == len(prompt) and stats[1:] == [None] * len(stats[1:])


class Limited(PlainScheduler):
    """A request costs its seed."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.limits = {"colours": 5}

    def costs(self, request: Request) -> Mapping[str, float]:
        assert request.sampling_params is not None
        seed = PartHeader.of((request.sampling_params.extra_args or {})[PART]).payload["seed"]
        if seed < 0:
            raise ValueError("seed: at least 0")
        return {"colours": seed}


def test_requests_wait_in_order_until_there_is_room_for_their_costs() -> None:
    engine = Engine(scheduler=Limited)
    for name, seed in (("a", 3), ("b", 3), ("large", 6), ("c", 2), ("wrong", -1)):
        engine.add(request(name, seed=seed, steps=3))
    assert engine.step() == 1
    (large,), (wrong,) = engine.got["0/large"], engine.got["0/wrong"]
    assert messages([large]) == [StageError("the request needs 6 colours, but the limit is 5")]
    assert messages([wrong]) == [StageError("seed: at least 0")]
    assert large.finish_reason == wrong.finish_reason == FinishReason.ERROR
    engine.scheduler.finish_requests("0/a", RequestStatus.FINISHED_ABORTED)
    assert engine.step() == 2
    engine.run()
    assert engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == []


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcde"), ("priority", "bdeca")])
def test_waiting_requests_are_started_by_priority_and_then_by_age(policy: str, order: str) -> None:
    """Parts are due later and later; the last one is no part."""
    engine = Engine(policy=policy)
    engine.scheduler._most = 1
    now_ms = 1_700_000_000_000
    numbers = [*(of_part(number, now_ms + due) for due, number in enumerate((2, 0, 1, 0))), 0]
    for name, number in zip("abcde", numbers, strict=True):
        engine.add(request(name, steps=1))
        engine.scheduler._waiting[f"0/{name}"].request.priority = number
    engine.run()
    assert "".join(name[-1] for name in engine.got) == order


def test_a_request_has_the_time_that_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(plain_stage, "time", SimpleNamespace(monotonic=lambda: now))
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.add(request(name, steps=2))
    engine.step()
    now = 103.5
    engine.step()
    engine.step()
    assert [each.waited for each in engine.model.running.values()] == [3.5]
