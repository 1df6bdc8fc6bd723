"""The state machine of replicas, one rule at a time."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from vllm_omni_ext.coordinator import membership as module
from vllm_omni_ext.coordinator.members import (
    Admitted,
    Attach,
    Detach,
    Forget,
    Heartbeat,
    Leave,
    Member,
    NotYet,
    Refused,
    Register,
    RegisterAgain,
    Released,
    State,
    Subscribed,
    Tick,
    View,
)
from vllm_omni_ext.coordinator.membership import Expected, Membership
from vllm_omni_ext.coordinator.timing import KEPT_TIMEOUTS, PUBLISH_GAP_S, Timing
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load

EXPECTED = Expected(model="m", version="1", stages={"talker": "t", "thinker": "h"})
TIMING = Timing(timeout_s=10.0, drain_s=30.0)
WARRANT = "the head's"
BUSY, IDLE = Load(1, 2, 0.5), Load()


def descriptor(instance: str, stage: str = "talker") -> Register:
    return Register(instance=instance, stage=stage, model="m", config_hash=EXPECTED.stages[stage], version="1")


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
        actions = self.them.handle(Tick(), self.now)
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
        self.instances.update((action.member, instance) for action in actions if isinstance(action, Admitted))
        return actions

    def join(self, instance: str, **wish) -> Member:
        (*_, admitted) = self.register(instance, **wish)
        self.beat(admitted.member)
        return admitted.member

    def beat(self, member: Member, load: Load = IDLE) -> list:
        return self.them.handle(Heartbeat(member, load, self.instances.get(member, "")), self.now)

    def leave(self, member: Member, **how) -> list:
        return self.them.handle(Leave(member, **{"proof": self.instances.get(member, ""), **how}), self.now)

    def states(self) -> dict[str, State]:
        return {str(entry.member.id): entry.state for entry in self.them.view(self.now).replicas}


def test_a_replica_is_attached_with_its_first_heartbeat() -> None:
    desk = Desk()
    assert desk.register("a") == [Admitted(Member("talker", 0, 100), TIMING.interval_s)]
    member = Member("talker", 0, 100)
    assert desk.states() == {"talker/0": State.JOINING}
    assert desk.beat(member) == [Attach(member)]
    assert desk.beat(member) == []
    assert desk.states() == {"talker/0": State.UP}


def test_silence_makes_suspect_then_down_then_forgotten() -> None:
    desk = Desk()
    member = desk.join("a")
    assert desk.wait(TIMING.suspect_s - 0.01) == [] and desk.states() == {"talker/0": State.UP}
    assert desk.wait(0.01) == [] and desk.states() == {"talker/0": State.SUSPECT}
    assert desk.wait(10 - TIMING.suspect_s) == [Detach(member, "it has sent nothing for 10.0 s")]
    assert desk.states() == {"talker/0": State.DOWN}
    assert desk.wait(KEPT_TIMEOUTS * 10) == [Forget(member)]
    assert desk.states() == {}


def test_a_suspect_recovers_without_being_attached_again() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(5)
    assert desk.beat(member) == [] and desk.states() == {"talker/0": State.UP}


def test_one_that_was_down_is_attached_again_exactly_once() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(11)
    assert desk.beat(member) == [Attach(member)]
    assert desk.beat(member) == []


def test_one_that_never_sends_a_heartbeat_is_forgotten() -> None:
    desk = Desk()
    (admitted,) = desk.register("a")
    assert desk.wait(10) == [Forget(admitted.member)]


def test_a_registration_that_is_repeated_changes_nothing() -> None:
    desk = Desk()
    first = desk.register("a")
    assert [desk.register("a") for _ in range(3)] == [first] * 3
    assert desk.states() == {"talker/0": State.JOINING}


def test_names_are_the_lowest_free_ones_and_epochs_are_new() -> None:
    desk = Desk()
    a, b, c = (desk.join(name) for name in "abc")
    assert [m.id.index for m in (a, b, c)] == [0, 1, 2]
    assert desk.leave(b, drain=False) == [Released(b), Detach(b, "it has left"), Forget(b)]
    d = desk.join("d")
    assert d.id == b.id and d.epoch > max(a.epoch, b.epoch, c.epoch)
    assert desk.beat(b) == [RegisterAgain(b)]  # a late message of the one before
    assert desk.leave(b, drain=False) == [Released(b)]
    assert desk.states() == dict.fromkeys(("talker/0", "talker/1", "talker/2"), State.UP)


def test_why_a_replica_is_gone_differs_by_who_says_so() -> None:
    desk = Desk()
    killed, ended = desk.join("a"), desk.join("b")
    assert Detach(killed, "its process has ended") in desk.leave(killed, drain=False, proof=WARRANT)
    assert Detach(ended, "it has left") in desk.leave(ended, drain=False)


def test_a_requested_name_is_granted_if_it_is_free() -> None:
    desk = Desk()
    assert desk.join("a", index=3).id.index == 3
    assert desk.join("b", index=3).id.index == 0
    assert desk.join("c", index=10**9).id.index == 1


def test_the_name_of_one_that_is_down_goes_to_the_next_and_it_may_come_back_under_another() -> None:
    desk = Desk()
    old = desk.join("a")
    desk.wait(11)
    forgotten, admitted = desk.register("b")
    assert forgotten == Forget(old) and admitted.member.id == old.id and admitted.member.epoch > old.epoch
    assert desk.beat(old) == [RegisterAgain(old)]
    (again,) = desk.register("a", index=old.id.index, epoch=old.epoch)
    assert again.member.id == ReplicaId("talker", 1) and again.member.epoch > admitted.member.epoch


def test_a_new_coordinator_gives_everybody_the_name_and_epoch_they_had() -> None:
    before = Desk()
    members = [before.join(name) for name in "abc"]
    after = Desk(generation=200, settled=False)
    assert [after.beat(member) for member in members] == [[RegisterAgain(member)] for member in members]
    for name, member in reversed(list(zip("abc", members, strict=True))):
        assert after.join(name, index=member.id.index, epoch=member.epoch) == member
    assert not after.them.view(after.now).settled
    assert after.them.view(TIMING.timeout_s).settled


def test_a_new_coordinator_assigns_names_once_it_has_settled() -> None:
    desk = Desk(settled=False)
    assert desk.join("of the plan", index=1).id.index == 1
    assert desk.register("any name") == desk.register("a name that is taken", index=1) == [NotYet()]
    desk.wait(TIMING.timeout_s)
    assert desk.join("any name").id.index == 0


def test_an_epoch_that_was_never_issued_is_refused() -> None:
    assert Desk(generation=100).join("a", index=0, epoch=2**62).epoch == 100


def test_draining_ends_when_it_is_empty_but_not_at_once() -> None:
    desk = Desk()
    member = desk.join("a")
    assert desk.leave(member) == [] and desk.states() == {"talker/0": State.DRAINING}
    assert desk.beat(member, IDLE) == []  # a request may be on its way to it
    desk.wait(TIMING.interval_s)
    assert desk.beat(member, BUSY) == []
    assert desk.leave(member) == []
    assert desk.beat(member, IDLE) == [Released(member), Detach(member, "it has left"), Forget(member)]
    assert desk.leave(member) == [RegisterAgain(member)]


def test_draining_has_a_deadline() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.leave(member)
    for _ in range(29):
        assert desk.wait(1) == []
        desk.beat(member, BUSY)
    assert desk.wait(1) == [Detach(member, "its requests took too long"), Forget(member)]


def test_one_that_falls_silent_while_it_drains_is_gone() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.leave(member)
    assert desk.wait(10) == [Detach(member, "it fell silent"), Forget(member)]


def test_one_that_is_down_leaves_at_once() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(11)
    assert desk.leave(member) == [Released(member), Forget(member)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "x"}, "model is 'x' there and 'm' here"),
        ({"version": "2"}, "package version is '2' there and '1' here"),
        ({"config_hash": "x"}, "configuration hash of stage 'talker' is 'x' there and 't' here"),
        ({"stage": "walker"}, "there is no stage 'walker'; there are talker, thinker"),
        ({"model": "x", "version": "2"}, "model is 'x' there and 'm' here; package version is '2' there and '1' here"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_the_reason(change: dict[str, str], says: str) -> None:
    desk = Desk()
    assert desk.them.handle(replace(descriptor("a"), **change), desk.now) == [Refused(says)]
    assert desk.states() == {}


def test_one_process_is_one_replica() -> None:
    desk = Desk()
    desk.join("a")
    assert desk.register("a", "thinker") == [Refused("instance 'a' is talker/0 already")]


def test_an_unknown_stage_is_refused() -> None:
    stranger = Member("walker", 0, 1)
    refusal = [Refused("there is no stage 'walker'; there are talker, thinker")]
    assert Desk().beat(stranger) == Desk().leave(stranger) == refusal


def test_a_stage_has_a_largest_size(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLICAS", 2)
    desk = Desk()
    desk.join("a"), desk.join("b")
    (refused,) = desk.register("c")
    assert refused == Refused("stage 'talker' has 2 replicas, which is the most there can be")


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


def test_a_new_subscriber_gets_the_view_at_once() -> None:
    desk = Desk()
    desk.wait(PUBLISH_GAP_S)
    desk.views.clear()
    desk.them.handle(Subscribed(), desk.now)
    desk.tick()
    assert len(desk.views) == 1


def test_loads_are_only_shown_while_they_are_recent() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.beat(member, BUSY)
    assert desk.them.view(desk.now).replicas[0].load == dataclasses.replace(BUSY, report=2)
    desk.wait(5)
    assert desk.them.view(desk.now).replicas[0].load is None


def test_a_report_that_says_nothing_new_is_numbered_and_waits_for_the_next_view() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(PUBLISH_GAP_S)
    desk.views.clear()
    desk.beat(member)
    desk.wait(2 * PUBLISH_GAP_S)
    assert desk.views == []
    desk.wait(TIMING.interval_s)
    assert [view.replicas[0].load for view in desk.views] == [Load(report=2)]


def test_the_coordinators_own_delay_is_nobodys_silence() -> None:
    desk = Desk()
    member = desk.join("a")
    desk.wait(1)
    desk.now += 1000.0
    assert desk.tick() == [] and desk.states() == {"talker/0": State.UP}
    assert Detach(member, "it has sent nothing for 10.0 s") in desk.wait(10)


@pytest.mark.parametrize("timeout", [1.0, 3.0, 30.0, 300.0])
def test_beats_fit_into_every_timeout(timeout: float) -> None:
    timing = Timing(timeout_s=timeout, drain_s=0)
    assert 4 * timing.interval_s < timing.timeout_s
    assert 2 * timing.interval_s < timing.suspect_s < timing.timeout_s < timing.forget_s


@pytest.mark.parametrize("timeout", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat timeout: must be at least 1 s"):
        Timing(timeout_s=timeout, drain_s=1)


def test_an_impossible_drain_time_is_refused() -> None:
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
    assert desk.them.handle(Heartbeat(one, IDLE, proof), desk.now) == [RegisterAgain(one)]
    assert desk.them.view(desk.now) == before
    assert desk.states() == {"talker/0": State.UP, "talker/1": State.UP}
    desk.instances[two] = "a"  # who is another one has its own proof only
    assert desk.leave(two) == [] and desk.states()["talker/1"] is State.UP


def test_nobody_lives_on_the_heartbeats_of_another() -> None:
    desk = Desk()
    member = desk.join("a")
    for _ in range(30):
        desk.wait(TIMING.timeout_s / 10)
        desk.them.handle(Heartbeat(member, IDLE, "b"), desk.now)
    assert desk.states() == {"talker/0": State.DOWN}


@pytest.mark.parametrize("drain", [True, False])
def test_the_head_speaks_for_every_replica(drain: bool) -> None:
    desk = Desk()
    member = desk.join("a")
    desk.leave(member, proof=WARRANT, drain=drain)
    assert desk.states() == ({"talker/0": State.DRAINING} if drain else {})


def test_without_a_warrant_no_message_for_other_replicas_is_accepted() -> None:
    them = Membership(EXPECTED, TIMING, generation=1, at=-TIMING.timeout_s)
    (admitted,) = them.handle(descriptor("a"), 0.0)
    assert them.handle(Leave(admitted.member, drain=False, proof=""), 0.0) == []


def test_views_contain_no_proof_of_identity() -> None:
    desk = Desk()
    desk.join("the proof of a")
    assert "the proof of a" not in repr(desk.them.view(desk.now))
