"""The state machine of replicas, one rule at a time; `test_membership_properties` explores their combinations."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from vllm_omni_ext.coordinator import members as msg
from vllm_omni_ext.coordinator import membership as module
from vllm_omni_ext.coordinator.members import Member, State, View
from vllm_omni_ext.coordinator.membership import Expected, Membership
from vllm_omni_ext.coordinator.timing import KEPT_TIMEOUTS, PUBLISH_GAP_S, Timing
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load

EXPECTED = Expected(model="m", version="1", stages={"talker": "t", "thinker": "h"})
TIMING = Timing(timeout_s=10.0, drain_s=30.0)
WARRANT = "the head's"
BUSY, IDLE = Load(1, 2, 0.5), Load()


def descriptor(instance: str, stage: str = "talker") -> msg.Register:
    return msg.Register(instance=instance, stage=stage, model="m", config_hash=EXPECTED.stages[stage], version="1")


class Desk:
    """A membership with a clock that stands still, and helpers that tick as a server would."""

    def __init__(self, generation: int = 100, *, settled: bool = True) -> None:
        self.now = 0.0
        self.instances: dict[Member, str] = {}
        self.them = Membership(EXPECTED, TIMING, generation=generation, at=0.0, warrant=WARRANT)
        self.views: list = []
        self.wait(TIMING.timeout_s if settled else 0.0)
        self.start = self.now

    def tick(self) -> list:
        actions = self.them.handle(msg.Tick(), self.now)
        self.views.extend(action for action in actions if isinstance(action, View))
        return [action for action in actions if not isinstance(action, View)]

    def wait(self, seconds: float) -> list:
        end, found = self.now + seconds, []
        while (due := self.them.deadline()) <= end:
            self.now = max(self.now, due)
            found.extend(self.tick())
        self.now = end
        return found + self.tick()

    def register(self, instance: str, stage: str = "talker", **wish) -> list:
        actions = self.them.handle(replace(descriptor(instance, stage), **wish), self.now)
        self.instances.update((action.member, instance) for action in actions if isinstance(action, msg.Admitted))
        return actions

    def join(self, instance: str, **wish) -> Member:
        (*_, admitted) = self.register(instance, **wish)
        self.beat(admitted.member)
        return admitted.member

    def beat(self, member: Member, load: Load = IDLE) -> list:
        return self.them.handle(msg.Heartbeat(member, load, self.instances.get(member, "")), self.now)

    def leave(self, member: Member, **how) -> list:
        return self.them.handle(msg.Leave(member, **{"proof": self.instances.get(member, ""), **how}), self.now)

    def states(self) -> dict[str, State]:
        return {str(entry.member.id): entry.state for entry in self.them.view(self.now).replicas}


def test_a_replica_is_up_with_its_first_heartbeat_then_suspect_down_and_forgotten() -> None:
    desk, member = Desk(), Member("talker", 0, 100)
    first = desk.register("a")
    assert first == [msg.Admitted(member, TIMING.interval_s)] == desk.register("a")
    assert desk.states() == {"talker/0": State.JOINING}
    assert desk.beat(member) == [msg.Attach(member)] and desk.beat(member) == []
    assert desk.wait(TIMING.suspect_s - 0.01) == [] and desk.states() == {"talker/0": State.UP}
    assert desk.wait(0.01) == [] and desk.states() == {"talker/0": State.SUSPECT}
    assert desk.beat(member) == [] and desk.states() == {"talker/0": State.UP}
    assert desk.wait(10) == [msg.Detach(member, "it has sent nothing for 10.0 s")]
    assert desk.states() == {"talker/0": State.DOWN}
    assert desk.wait(KEPT_TIMEOUTS * 10) == [msg.Forget(member)]
    assert desk.states() == {}
    (admitted,) = desk.register("b")
    assert desk.wait(10) == [msg.Forget(admitted.member)], "it has sent no heartbeat"


def test_names_are_the_requested_or_lowest_free_ones_and_epochs_are_new() -> None:
    desk = Desk()
    a, b, c = (desk.join(name) for name in "abc")
    assert [m.id.index for m in (a, b, c)] == [0, 1, 2]
    assert desk.leave(b, drain=False) == [msg.Released(b), msg.Detach(b, "it has left"), msg.Forget(b)]
    d = desk.join("d", index=2)
    assert d.id == b.id and d.epoch > max(a.epoch, b.epoch, c.epoch)
    assert desk.beat(b) == [msg.RegisterAgain(b)]  # a late message of the one before
    assert desk.leave(b, drain=False) == [msg.Released(b)]
    assert desk.join("e", index=7, epoch=2**62) == Member("talker", 7, d.epoch + 1), "that epoch was never issued"
    assert desk.join("f", index=10**9).id.index == 3
    assert set(desk.states().values()) == {State.UP}


def test_the_name_of_a_down_replica_is_assigned_again_and_it_gets_another_one() -> None:
    desk = Desk()
    old = desk.join("a")
    desk.wait(11)
    forgotten, admitted = desk.register("b")
    assert forgotten == msg.Forget(old) and admitted.member.id == old.id and admitted.member.epoch > old.epoch
    assert desk.beat(old) == [msg.RegisterAgain(old)]
    (again,) = desk.register("a", index=old.id.index, epoch=old.epoch)
    assert again.member.id == ReplicaId("talker", 1) and again.member.epoch > admitted.member.epoch


def test_a_new_coordinator_assigns_each_replica_its_former_name_and_epoch() -> None:
    before = Desk()
    members = [before.join(name) for name in "abc"]
    after = Desk(generation=200, settled=False)
    assert [after.beat(member) for member in members] == [[msg.RegisterAgain(member)] for member in members]
    for name, member in reversed(list(zip("abc", members, strict=True))):
        assert after.join(name, index=member.id.index, epoch=member.epoch) == member
    assert after.register("any name") == after.register("a name that is taken", index=1) == [msg.NotYet()]
    assert after.join("of the plan", index=7).id.index == 7
    assert not after.them.view(after.now).settled
    after.wait(TIMING.timeout_s)
    assert after.them.view(after.now).settled
    assert after.join("any name").id.index == 0, "that replica is silent"


def test_draining_ends_with_the_last_request_but_not_at_once() -> None:
    desk = Desk()
    member = desk.join("a")
    assert desk.leave(member) == [] and desk.states() == {"talker/0": State.DRAINING}
    assert desk.beat(member, IDLE) == []  # a request may be on its way to it
    desk.wait(TIMING.interval_s)
    assert desk.beat(member, BUSY) == []
    assert desk.leave(member) == []
    assert desk.beat(member, IDLE) == [msg.Released(member), msg.Detach(member, "it has left"), msg.Forget(member)]
    assert desk.leave(member) == [msg.RegisterAgain(member)]


def test_draining_ends_at_its_deadline_or_with_silence() -> None:
    desk = Desk()
    member, silent = desk.join("a"), desk.join("b")
    desk.leave(member)
    desk.leave(silent)
    found = []
    for _ in range(29):
        found += desk.wait(1)
        desk.beat(member, BUSY)
    assert found == [msg.Detach(silent, "it fell silent"), msg.Forget(silent)]
    assert desk.wait(1) == [msg.Detach(member, "its requests took too long"), msg.Forget(member)]
    down = desk.join("c")
    desk.wait(11)
    assert desk.leave(down) == [msg.Released(down), msg.Forget(down)], "its requests are lost already"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "x"}, "model is 'x' there and 'm' here"),
        ({"version": "2"}, "package version is '2' there and '1' here"),
        ({"config_hash": "x"}, "configuration hash of stage 'talker' is 'x' there and 't' here"),
        ({"stage": "walker"}, "there is no stage 'walker'; there are talker, thinker"),
        ({"model": "x", "version": "2"}, "model is 'x' there and 'm' here; package version is '2' there and '1' here"),
    ],
    ids=str,
)
def test_a_replica_that_does_not_fit_is_refused_with_the_reason(change: dict[str, str], reason: str) -> None:
    desk = Desk()
    assert desk.them.handle(replace(descriptor("a"), **change), desk.now) == [msg.Refused(reason)]
    assert desk.states() == {}


def test_too_many_replicas_a_second_stage_and_an_unknown_stage_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLICAS", 2)
    desk = Desk()
    desk.join("a"), desk.join("b")
    assert desk.register("c") == [msg.Refused("stage 'talker' has 2 replicas, which is the most there can be")]
    assert desk.register("a", "thinker") == [msg.Refused("instance 'a' is talker/0 already")]
    unknown, refusal = Member("walker", 0, 1), [msg.Refused("there is no stage 'walker'; there are talker, thinker")]
    assert desk.beat(unknown) == desk.leave(unknown) == refusal


def test_changes_are_published_together_and_views_come_at_least_every_interval() -> None:
    desk = Desk()
    desk.wait(1)
    desk.views.clear()
    members = [desk.join(str(i)) for i in range(50)]
    for member in members:
        desk.beat(member, BUSY)
    desk.wait(PUBLISH_GAP_S)
    assert [len(view.replicas) for view in desk.views] == [50]
    assert {entry.load for entry in desk.views[0].replicas} == {dataclasses.replace(BUSY, report=2)}
    desk.views.clear()
    desk.wait(2 * TIMING.interval_s)
    assert len(desk.views) == 2


def test_an_equal_report_is_numbered_and_waits_for_the_next_view() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(PUBLISH_GAP_S)
    desk.views.clear()
    desk.beat(member)
    desk.wait(2 * PUBLISH_GAP_S)
    assert desk.views == []
    desk.wait(TIMING.interval_s)
    assert [view.replicas[0].load for view in desk.views] == [Load(report=2)]
    desk.views.clear()
    desk.them.handle(msg.Subscribed(), desk.now)
    desk.tick()
    assert len(desk.views) == 1, "a new subscriber receives the view at once"
    desk.wait(5)
    assert desk.them.view(desk.now).replicas[0].load is None, "it is outdated"


def test_a_delay_of_the_coordinator_is_not_counted_as_silence() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(1)
    desk.now += 1000.0
    assert desk.tick() == [] and desk.states() == {"talker/0": State.UP}
    assert msg.Detach(member, "it has sent nothing for 10.0 s") in desk.wait(10)


@pytest.mark.parametrize("timeout", [1.0, 3.0, 30.0, 300.0])
def test_several_heartbeats_fit_into_every_timeout(timeout: float) -> None:
    timing = Timing(timeout_s=timeout, drain_s=0)
    assert 4 * timing.interval_s < timing.timeout_s
    assert 2 * timing.interval_s < timing.suspect_s < timing.timeout_s < timing.forget_s


@pytest.mark.parametrize("timeout", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_timeout_or_drain_time_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat timeout: must be at least 1 s"):
        Timing(timeout_s=timeout, drain_s=1)
    with pytest.raises(ConfigError, match="drain time"):
        Timing(timeout_s=1, drain_s=-1)


@pytest.mark.parametrize("proof", ["", "b", "talker/0", "ä", "a" * 500])
def test_messages_about_another_replica_are_refused(proof: str) -> None:
    desk = Desk()
    one, two = desk.join("a"), desk.join("b")
    desk.beat(one, BUSY)
    before = desk.them.view(desk.now)
    for drain in (True, False):
        assert desk.leave(one, proof=proof, drain=drain) == []
    assert desk.them.handle(msg.Heartbeat(one, IDLE, proof), desk.now) == [msg.RegisterAgain(one)]
    assert desk.them.view(desk.now) == before and "'a'" not in repr(before)
    assert desk.leave(two, proof="a") == []
    assert desk.states() == {"talker/0": State.UP, "talker/1": State.UP}
    for _ in range(30):
        desk.wait(TIMING.timeout_s / 10)
        desk.them.handle(msg.Heartbeat(one, IDLE, proof), desk.now)
    assert desk.states() == {"talker/0": State.DOWN, "talker/1": State.DOWN}, "no replica lives on such heartbeats"


@pytest.mark.parametrize("drain", [True, False])
def test_the_head_may_remove_any_replica_with_its_warrant_only(drain: bool) -> None:
    desk = Desk()
    member = desk.join("a")
    actions = desk.leave(member, proof=WARRANT, drain=drain)
    assert actions == (
        [] if drain else [msg.Released(member), msg.Detach(member, "its process has ended"), msg.Forget(member)]
    )
    assert desk.states() == ({"talker/0": State.DRAINING} if drain else {})
    without = Membership(EXPECTED, TIMING, generation=1, at=-TIMING.timeout_s)
    (admitted,) = without.handle(descriptor("a"), 0.0)
    assert without.handle(msg.Leave(admitted.member, drain=drain, proof=""), 0.0) == []
