"""The request machine alone: events in, effects out; its state is checked after every event."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_omni_ext.errors import OmniError, RequestFailed
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.base import OutputChunk, ProgressChunk
from vllm_omni_ext.modalities.chunks import ImageChunk, TextChunk
from vllm_omni_ext.orchestrator import messages as m
from vllm_omni_ext.orchestrator.machine import RequestMachine
from vllm_omni_ext.orchestrator.placement import Settings
from vllm_omni_ext.plugins.flow import (
    Action,
    Emit,
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


class Machine:
    """A machine that is checked after every event; the newest effects are kept."""

    def __init__(self, ar: int = 1, dit: int = 1, **settings: Any) -> None:
        counts = {"ar": ar, "dit": dit}
        self.pools = {s: StagePool(s, [ReplicaId(s, i) for i in range(n)]) for s, n in counts.items()}
        self.machine = RequestMachine(Settings(frontend="ar", **settings), self.pools)
        self.time = 0.0

    def send(self, event: m.Event) -> list[m.Effect]:
        effects = self.machine.handle(event)
        self.machine.check()
        return effects

    def open(self, flow: Any, *, client: bool = True, name: str = "r") -> list[m.Effect]:
        request = m.ClientRequest(request="the client's") if client else None
        options = RequestOptions(modalities=tuple(sorted(flow.outputs)))
        opened = m.Opened(
            request_id=name, external_id=f"external {name}", flow=flow, options=options, sink="sink", client=request
        )
        return self.send(opened)

    def out(self, replica: ReplicaId, engine_id: str, *tokens: int, at: float = 0.0, **more: Any) -> list[m.Effect]:
        return self.send(m.Output(replica=replica, engine_id=engine_id, tokens=tokens, at=at, **more))


def of(effects: list[m.Effect], kind: Any) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def items(effects: list[m.Effect]) -> list[OutputChunk | str]:
    return [effect.item for effect in of(effects, m.ToCaller)]


def observed(effects: list[m.Effect]) -> list[tuple[Any, ...]]:
    return [(each.method, *each.arguments) for each in of(effects, m.Observe)]


def errors(effects: list[m.Effect]) -> list[OmniError]:
    return [each.error for each in of(effects, m.FailRequest)]


# -- pipelines of other shapes than text first -------------------------------------------------------


def test_a_request_that_never_uses_the_frontend() -> None:
    machine = Machine(ar=0)
    effects = machine.open(Pictures(), client=False)
    (sent,) = of(effects, m.SendPart)
    assert (sent.replica, sent.stream, sent.action.part) == (DIT, "r/0", 0)
    (opened,) = [each for each in of(effects, m.Observe) if each.method == "opened"]
    assert opened.keywords["parts"] == ["image"]
    assert items(machine.out(DIT, "r/0/0", payload=1)) == [
        ProgressChunk(request_id="external r", stage="dit", done=1, total=3)
    ]
    effects = machine.out(DIT, "r/0/0", payload="pixels", finish="stop")
    picture, end = items(effects)
    assert isinstance(picture, ImageChunk) and picture.request_id == "external r" and end == m.END
    assert ("finished", "r", "image") in observed(effects)
    assert machine.machine.held() == 0


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
        (Fail("no"), "no"),
    ],
    ids=str,
)
def test_a_forbidden_action_of_a_flow_fails_its_request(action: Action, says: str) -> None:
    class Wrong(Pictures):
        def handle(self, event: Produced) -> list[Action]:
            return [action]

    machine = Machine()
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
    machine.send(m.ReplicaUp(DIT))
    machine.send(m.ReplicaAnnounced(DIT))
    effects = machine.send(m.ReplicaLost(DIT, "killed"))
    assert [each.timer.name for each in of(effects, m.ArmTimer)] == ["a"], "a wait that begins again has the whole time"
    assert of(machine.send(m.ReplicaAnnounced(ReplicaId("dit", 1))), m.ArmTimer) == []
    assert of(machine.send(m.NeverUp(DIT, "no")), m.FailRequest) == []


def test_the_number_of_waiting_requests_is_observed_when_it_changes() -> None:
    machine = begin_waiting()
    seen: list[tuple[Any, ...]] = []
    for name in "ab":
        seen += observed(machine.open(Pictures(), client=False, name=name))
    seen += observed(machine.send(m.Aborted("a")))
    seen += observed(machine.send(m.TimerFired(m.Timer("replica", "dit", "b"), 5.0)))
    assert [each for each in seen if each[0] == "waiting"] == [("waiting", "dit", count) for count in (1, 2, 1, 0)]


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
        m.TimerFired(m.Timer("input", "dit", "unknown")),
        m.TimerFired(m.Timer("replica", "dit", "unknown")),
    ):
        assert [each for each in machine.send(event) if not isinstance(each, m.Observe)] == []
