"""The request machine alone: events in, effects out; its state is checked after every event."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed, StageUnavailable
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.chunks import ImageChunk, TextChunk
from vllm_omni_ext.observability.request_trace import Outcome, RequestTrace
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.orchestrator.state import RequestObserver
from vllm_omni_ext.plugins.flow import (
    Action,
    Close,
    Emit,
    Extend,
    Fail,
    Forward,
    ForwardFlow,
    Open,
    Produced,
    Progress,
    Submit,
)
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.pool.stage_pool import StagePool

AR, DIT = ReplicaId("ar", 0), ReplicaId("dit", 0)
PICTURE = ImageChunk(pixels=np.zeros((1, 1, 3), np.uint8))


class Pictures:
    """A picture, painted by one stage that is sent one part and answers it several times."""

    stages = frozenset({"dit"})
    outputs = frozenset({"image"})

    def begin(self) -> list[Action]:
        return [Submit(stage="dit")]

    def handle(self, event: Produced) -> list[Action]:
        if event.finish is None:
            return [Progress("dit", event.payload, 3)]
        return [Emit(PICTURE)]

    def replay(self, stage: str) -> list[Action]:
        return self.begin()


class Seen(RequestObserver):
    """Records the number of requests that wait, and the ends of requests."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, int]] = []
        self.ends: list[tuple[str, str]] = []

    def opened(self, event: m.Opened) -> RequestTrace:
        return RequestTrace(event.external_id, event.options.modalities, 0.0, 0.0, None)

    def failed(self, trace: RequestTrace | None, stage: str, error: Exception) -> None:
        self.ended(trace, "failed")

    def ended(self, trace: RequestTrace | None, outcome: Outcome) -> None:
        if trace is not None:
            self.ends.append((trace.request_id, outcome))

    def waiting(self, stage: str, requests: int) -> None:
        self.waits.append((stage, requests))


class Machine:
    """A machine that is checked after every event."""

    def __init__(self, ar: int = 1, dit: int = 1, **settings: Any) -> None:
        counts = {"ar": ar, "dit": dit}
        self.pools = {s: StagePool(s, [ReplicaId(s, i) for i in range(n)]) for s, n in counts.items()}
        self.seen = Seen()
        self.machine = RequestMachine(Settings(frontend="ar", **settings), self.pools, self.seen)

    def send(self, event: m.Event, now: float = 0.0) -> list[m.Effect]:
        effects = self.machine.handle(event, now)
        self.machine.check()
        return effects

    def open(self, flow: Any, *, client: bool = True, name: str = "r", now: float = 0.0) -> list[m.Effect]:
        request = m.ClientRequest(request="the client's") if client else None
        options = RequestOptions(modalities=tuple(sorted(flow.outputs)))
        opened = m.Opened(
            request_id=name, external_id=f"external {name}", flow=flow, options=options, sink="sink", client=request
        )
        return self.send(opened, now)

    def out(self, replica: ReplicaId, engine_id: str, *tokens: int, **more: Any) -> list[m.Effect]:
        return self.send(m.Output(replica=replica, engine_id=engine_id, tokens=tokens, **more))


def of(effects: list[m.Effect], kind: Any) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def items(effects: list[m.Effect]) -> list[OutputChunk | str]:
    return [effect.item for effect in of(effects, m.ToCaller)]


def errors(effects: list[m.Effect]) -> list[OmniError]:
    return [each.error for each in of(effects, m.FailRequest)]


# -- pipelines of other shapes than text first -------------------------------------------------------


def test_a_request_that_never_uses_the_frontend() -> None:
    machine = Machine(ar=0)
    effects = machine.open(Pictures(), client=False)
    (sent,) = of(effects, m.SendPart)
    assert (sent.replica, sent.stream, sent.action.part) == (DIT, "r/0", 0)
    assert items(machine.out(DIT, "r/0/0", payload=1)) == [
        ProgressChunk(request_id="external r", stage="dit", done=1, total=3)
    ]
    effects = machine.out(DIT, "r/0/0", payload="pixels", finish="stop")
    picture, end = items(effects)
    assert isinstance(picture, ImageChunk) and picture.request_id == "external r" and end == m.END
    assert machine.machine.held() == 0


def test_every_stage_gets_the_priority_of_the_request() -> None:
    machine = Machine(ar=0)
    options = RequestOptions(modalities=("image",))
    opened = m.Opened(request_id="r", external_id="r", flow=Pictures(), options=options, sink="sink", priority=3)
    (sent,) = of(machine.send(opened), m.SendPart)
    assert sent.priority == 3


@pytest.mark.parametrize(
    ("finish", "outcome"), [("stop", "finished"), ("length", "finished"), ("abort", "aborted"), ("error", "failed")]
)
def test_the_outcome_of_a_text_is_the_engines_finish_reason(finish: Any, outcome: str) -> None:
    machine = Machine(dit=0)
    machine.open(ForwardFlow("ar"))
    machine.out(AR, "r", 5)
    assert machine.seen.ends == []
    machine.out(AR, "r", finish=finish)
    machine.send(m.Aborted("r"))
    assert machine.seen.ends == [("external r", outcome)]


def test_a_request_ends_once_with_its_last_output() -> None:
    class Both(Pictures):
        stages = frozenset({"ar", "dit"})

        def begin(self) -> list[Action]:
            return [Forward("ar"), Submit(stage="dit")]

        def handle(self, event: Produced) -> list[Action]:
            return super().handle(event) if event.stage == "dit" else []

    machine = Machine()
    for name, last in (("a", "text"), ("b", "image")):
        machine.open(Both(), name=name)
        for output in sorted(("text", "image"), key=lambda each: each == last):
            assert len(machine.seen.ends) == (name == "b")
            if output == "text":
                machine.out(AR, name, 5, finish="stop")
            else:
                machine.out(DIT, f"{name}/0/0", payload="pixels", finish="stop")
    machine.open(Both(), name="c")
    machine.send(m.SendFailed("c", "dit", OSError("broken pipe")))
    machine.send(m.Aborted("c"))
    machine.open(Both(), name="d")
    machine.send(m.Aborted("d"))
    ends = [("external a", "finished"), ("external b", "finished"), ("external c", "failed"), ("external d", "aborted")]
    assert machine.seen.ends == ends and machine.machine.held() == 0


def test_the_frontend_answers_alone() -> None:
    machine = Machine(dit=0)
    machine.open(ForwardFlow("ar"))
    assert of(machine.out(AR, "r", 5), m.Send) == []
    assert items(machine.out(AR, "r", 6, finish="stop")) == [m.END]
    assert machine.machine.held() == 0


@pytest.mark.parametrize("text_first", [True, False])
def test_text_of_another_stage_ends_with_its_last_chunk(text_first: bool) -> None:
    class Writes(Pictures):
        outputs = frozenset({"text", "image"})

        def handle(self, event: Produced) -> list[Action]:
            chunks = [Emit(TextChunk(text="a")), Emit(PICTURE)]
            return [chunks[(event.payload + (not text_first)) % 2]]

    machine = Machine()
    machine.open(Writes(), client=False)
    assert m.END not in items(machine.out(DIT, "r/0/0", payload=0))
    assert items(machine.out(DIT, "r/0/0", payload=1))[-1] == m.END
    assert machine.machine.held() == 0


# -- forbidden actions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Open(stage="ar", prompt=[1]), "the flow names stage 'ar'"),
        (Open(stage="nowhere", prompt=[1]), "the flow names stage 'nowhere'"),
        (Forward("dit"), "that was not made for it"),
        (Open(stage="dit", prompt=[1], last=False), "sends input in chunks to stage 'dit', which takes no chunks"),
        (Extend(stage="dit"), "sends input in chunks to stage 'dit', which takes no chunks"),
        (Open(stage="dit", prompt=[1], group=2), "sets group=2 for stage 'dit', which takes no chunks"),
        (Fail("no"), "no"),
    ],
    ids=str,
)
def test_a_forbidden_action_of_a_flow_fails_its_request(action: Action, says: str) -> None:
    class Wrong(Pictures):
        def handle(self, event: Produced) -> list[Action]:
            return [action]

    machine = Machine(chunked=frozenset())
    machine.open(Wrong(), client=False)
    effects = machine.out(DIT, "r/0/0", payload=1)
    (error,) = errors(effects)
    assert isinstance(error, RequestFailed) and says in str(error)
    assert len(of(effects, m.AbortEngineRequests)) == len(of(effects, m.SendStreamEnd)) == 1
    assert machine.machine.held() == 0


def test_an_error_has_the_history_of_its_request() -> None:
    machine = Machine()
    machine.open(Pictures(), client=False)
    machine.out(DIT, "r/0/0", payload=1)
    (error,) = errors(machine.send(m.SendFailed("r", "dit", OSError("broken pipe"))))
    assert str(error) == "broken pipe" and "external r" in error.__notes__[0] and "dit" in error.__notes__[0]
    assert machine.machine.held() == 0


# -- replicas and time -------------------------------------------------------------------------------


def test_a_lost_stage_fails_only_requests_that_need_it() -> None:
    machine = Machine()
    machine.open(Pictures(), client=False, name="picture")
    machine.open(ForwardFlow("ar"), name="text")
    (error,) = errors(machine.send(m.ReplicaLost(AR, "killed")))
    assert str(error) == "replica ar/0 is gone: killed; stage 'ar' has no live replica"
    assert list(machine.machine.requests) == ["picture"]


def begin_waiting(*names: str, announced: tuple[ReplicaId, ...] = (DIT,)) -> Machine:
    machine = Machine(dit=0, wait_s=5.0)
    for replica in announced:
        machine.send(m.ReplicaAnnounced(replica))
    for name in names:
        machine.open(Pictures(), client=False, name=name)
    return machine


def test_waiting_requests_are_sent_once_and_in_order() -> None:
    machine = begin_waiting("b", "a", "c")
    effects = machine.send(m.ReplicaUp(DIT))
    assert [each.request_id for each in of(effects, m.SendPart)] == ["b", "a", "c"]
    assert of(machine.send(m.ReplicaUp(DIT)), m.Send) == []


def test_a_wait_is_not_prolonged() -> None:
    machine = begin_waiting("a")
    machine.send(m.ReplicaUp(DIT), 1.0)
    machine.send(m.ReplicaAnnounced(DIT), 2.0)
    machine.send(m.ReplicaLost(DIT, "killed"), 3.0)
    machine.send(m.ReplicaAnnounced(ReplicaId("dit", 1)), 4.0)
    assert of(machine.send(m.NeverUp(DIT, "no"), 5.0), m.FailRequest) == []
    assert errors(machine.send(m.DeadlinePassed(), 5.0)) == [], "a wait that begins again has the whole time"
    assert machine.machine.deadline == 8.0
    (error,) = errors(machine.send(m.DeadlinePassed(), 8.0))
    assert "replica_wait_timeout_s" in str(error) and machine.machine.deadline == inf


def test_each_wait_has_its_own_deadline() -> None:
    machine = begin_waiting()
    for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        machine.open(Pictures(), client=False, name=name, now=now)
    machine.send(m.Aborted("a"), 3.0)
    assert errors(machine.send(m.DeadlinePassed(), machine.machine.deadline)) == []
    for name in "bc":
        (failed,) = of(machine.send(m.DeadlinePassed(), machine.machine.deadline), m.FailRequest)
        assert failed.request_id == name
    assert machine.machine.deadline == inf and machine.machine.held() == 0


def test_the_number_of_waiting_requests_is_observed_when_it_changes() -> None:
    machine = begin_waiting()
    for name in "ab":
        machine.open(Pictures(), client=False, name=name)
    machine.send(m.Aborted("a"))
    machine.send(m.DeadlinePassed(), 5.0)
    assert machine.seen.waits == [("dit", count) for count in (1, 2, 1, 0)]


def test_a_stage_with_an_announced_replica_is_available() -> None:
    machine, other = begin_waiting(), ReplicaId("dit", 1)
    machine.send(m.ReplicaAnnounced(other))
    machine.send(m.ReplicaAnnounced(DIT, coming=False))
    machine.send(m.ReplicaAnnounced(AR, coming=False))
    assert machine.machine.unavailable({"dit"}) is None
    machine.open(Pictures(), client=False)
    assert len(errors(machine.send(m.NeverUp(other, "no")))) == 1
    assert machine.machine.unavailable({"dit"}) == "dit"


def test_events_of_unknown_requests_change_nothing() -> None:
    machine = Machine()
    for event in (
        m.Aborted("unknown"),
        m.TextStopped("unknown"),
        m.TextOnly("unknown"),
        m.SendFailed("unknown", "dit", OSError()),
        m.Output(replica=DIT, engine_id="unknown"),
        m.DeadlinePassed(),
    ):
        assert machine.send(event) == []


# -- ends of one stage, errors of clients, several streams ----------------------------------------------------


class Voices:
    """Each answer of a stream closes the stage of another one; the answer to "done" ends the request."""

    stages = frozenset({"ar", "dit"})
    outputs = frozenset({"image"})

    def begin(self) -> list[Action]:
        return [Open(stage="ar", prompt=[1]), Submit(stage="dit", stream="a", last=False), Submit(stage="dit")]

    def handle(self, event: Produced) -> list[Action]:
        match event.payload:
            case "close ar":
                return [Close("ar"), Close("ar")]
            case "close a":
                return [Close("dit", "a")]
            case "again":
                return [Close("ar"), Open(stage="ar", prompt=[2])]
            case "done":
                return [Emit(ImageChunk(pixels=PICTURE.pixels, index=len(event.stream)))]
        return []

    def replay(self, stage: str) -> list[Action]:
        return [Submit(stage=stage)] if stage == "dit" else [Open(stage=stage, prompt=[1])]

    def replay_stream(self, stage: str, stream: str) -> list[Action]:
        return [Submit(stage=stage, stream=stream, last=False)]


def test_a_closed_stage_frees_its_request_and_drops_late_outputs() -> None:
    machine = Machine()
    machine.open(Voices(), client=False)
    assert machine.machine.held() == 5, "the request, three bindings, and input that is due"
    effects = machine.out(DIT, "r/0/0", payload="close ar")
    assert of(effects, m.AbortEngineRequests) == [m.AbortEngineRequests(AR, ("r/ar",))]
    assert machine.out(AR, "r/ar", 5) == []
    effects = machine.out(DIT, "r/0/0", payload="close a")
    assert of(effects, m.AbortEngineRequests) == [m.AbortEngineRequests(DIT, ("r/stream/a/0/0",))]
    assert [effect.stream for effect in of(effects, m.SendStreamEnd)] == ["r/stream/a/0"]
    assert machine.pools["dit"].in_flight(DIT) == 1
    machine.out(DIT, "r/0/0", payload="done", finish="stop")
    assert machine.machine.held() == 0


def test_a_stage_that_is_closed_and_opened_takes_no_output_of_the_closed_request() -> None:
    machine = Machine()
    machine.open(Voices(), client=False)
    (sent,) = of(machine.out(DIT, "r/0/0", payload="again"), m.SendOpen)
    assert sent.engine_id != "r/ar"
    assert machine.out(AR, "r/ar", 5) == []
    assert of(machine.out(AR, sent.engine_id, 5), m.Accept)


def test_each_stream_of_a_stage_is_answered_and_replayed_by_its_name() -> None:
    machine = Machine(dit=2)
    machine.open(Voices(), client=False)
    lost = machine.machine.requests["r"].bindings["dit", "a"].replica
    assert lost is not None
    effects = machine.send(m.ReplicaLost(lost, "gone"))
    assert [effect.stream for effect in of(effects, m.SendPart)] == ["r/stream/a/1"]
    (again,) = of(effects, m.SendPart)
    assert machine.out(again.replica, "r/stream/a/0/0", payload="done") == []
    image, end = items(machine.out(again.replica, "r/stream/a/1/0", payload="done"))
    assert isinstance(image, ImageChunk) and (image.index, end) == (1, m.END)
    assert machine.machine.held() == 0


def test_a_stage_is_lost_for_a_request_while_one_of_its_streams_is_open() -> None:
    machine = Machine()
    machine.open(Voices(), client=False)
    machine.out(DIT, "r/0/0", finish="stop")
    (failed,) = errors(machine.send(m.ReplicaLost(DIT, "gone")))
    assert isinstance(failed, StageUnavailable)


def test_a_forwarded_request_cannot_be_closed() -> None:
    class Closing(ForwardFlow):
        def begin(self) -> list[Action]:
            return [*super().begin(), Close("ar")]

    (failed,) = errors(Machine().open(Closing("ar")))
    assert isinstance(failed, RequestFailed) and "closes stage 'ar'" in str(failed)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (Fail("no"), RequestFailed),
        (Fail("no", status=503), StageUnavailable),
        (Fail("no", status=400, parameter="input"), RequestError),
    ],
)
def test_a_flow_chooses_the_error_of_its_client(fail: Fail, kind: type[OmniError]) -> None:
    class Failing(ForwardFlow):
        def begin(self) -> list[Action]:
            return [fail]

    (failed,) = errors(Machine().open(Failing("ar")))
    assert type(failed) is kind and str(failed) == "no"
    assert getattr(failed, "parameter", "") == fail.parameter


@pytest.mark.parametrize(("status", "parameter"), [(404, ""), (500, "input")])
def test_a_failure_with_another_status_or_a_field_that_is_not_sent_is_refused(status: Any, parameter: str) -> None:
    with pytest.raises(ValueError, match="status"):
        Fail("no", status=status, parameter=parameter)
