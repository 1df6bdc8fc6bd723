"""Any order of joining, reporting, falling silent, leaving and coordinators starting again."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tests.support.examples import examples
from vllm_omni_ext.coordinator.members import (
    ATTACHED,
    Attach,
    Change,
    Detach,
    Entry,
    Forget,
    Heartbeat,
    Leave,
    Member,
    State,
    ToCoordinator,
    View,
    ViewDiff,
)
from vllm_omni_ext.coordinator.membership import PUBLISH_GAP_S, Membership, Timing
from vllm_omni_ext.pool.load import Load

STAGES = ("talker", "thinker")
KEY = "the head's"
TIMING = Timing(timeout_s=2.0, drain_s=6.0)


@dataclass
class Process:
    """A replica's process, as its reporter and its headless node behave."""

    member: Member
    leaving: bool = False


def unnumbered(view: View) -> list[Entry]:
    """The replicas of a view without the numbers of reports: an equal report is not published at once."""
    return [replace(e, load=e.load and dataclasses.replace(e.load, report=0)) for e in view.replicas]


class Attachments:
    """Checks that attaching and detaching alternate, and that no replica is forgotten while attached."""

    def __init__(self) -> None:
        self.now: set[Member] = set()

    def take(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Attach(member):
                    assert member not in self.now, f"{member} attached twice"
                    self.now.add(member)
                case Detach(member, reason):
                    assert reason
                    self.now.remove(member)
                case Forget(member):
                    assert member not in self.now, f"{member} forgotten while attached"


class MembershipMachine(RuleBasedStateMachine):
    """The coordinator compared with its messages, with two subscribers; the second one misses views."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.epochs = itertools.count(1)
        self.generation = 0
        self.processes: list[Process] = []
        self.past: list[Member] = []
        self.left: set[Member] = set()
        """Replicas that have left this coordinator."""
        self.last_heard: dict[Member, float] = {}
        self.subscribers = [(ViewDiff(), Attachments()), (ViewDiff(), Attachments())]
        self.restart()

    @rule()
    def restart(self) -> None:
        """The coordinator ends; a new one starts without replicas."""
        self.generation += 1000
        self.left = set()
        self.them = Membership(KEY, TIMING, generation=self.generation, at=self.now)
        self.heard: dict[Member, float] = {}
        self.views: list[View] = []
        self.advance(0)

    def receive(self, message: ToCoordinator) -> None:
        self.them.receive(message, self.now)

    def tick(self) -> None:
        if (view := self.them.tick(self.now)) is None:
            return
        self.views.append(view)
        for at, (follower, attachments) in enumerate(self.subscribers):
            if at == 0 or len(self.views) % 3 == 0:
                changes = follower.take(view)
                attachments.take(changes)
                self.no_live_replica_is_detached(changes)

    def no_live_replica_is_detached(self, changes: list) -> None:
        """Also not by a new coordinator, except where the name has been given to another process."""
        newest = {member.id: member for member in self.past}
        staying = {process.member for process in self.processes if not process.leaving} & {*newest.values()}
        for change in changes:
            if isinstance(change, Detach) and change.member in staying:
                assert self.now - self.last_heard[change.member] > TIMING.timeout_s - 1e-6

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.them.deadline()) <= end:
            self.now = max(self.now, due)
            self.tick()
        self.now = end

    def send(self, process: Process, load: Load) -> None:
        """Send the heartbeat of a reporter; its headless node repeats that it leaves."""
        member = process.member
        if process.leaving:
            self.receive(Leave(member, proof=member.proof(KEY)))
        known = {entry.member for entry in self.view().replicas}
        self.receive(Heartbeat(member, load, member.proof(KEY)))
        if member in {entry.member for entry in self.view().replicas}:
            self.heard[member] = self.last_heard[member] = self.now
        elif process.leaving and member in known:
            self.left.add(member)

    def view(self) -> View:
        return self.them.view(self.now)

    @rule(stage=st.sampled_from(STAGES), index=st.integers(0, 2))
    def join(self, stage: str, index: int) -> None:
        """The head gives a name, perhaps that of a process that is silent; its first heartbeat may come later."""
        self.processes.append(Process(Member(stage, index, next(self.epochs))))
        self.past.append(self.processes[-1].member)

    @precondition(lambda self: self.processes)
    @rule(pick=st.randoms(use_true_random=False), queue=st.integers(0, 3))
    def beat(self, pick: random.Random, queue: int) -> None:
        self.send(pick.choice(self.processes), Load(queue, 0, 0.5))

    @rule()
    def all_beat(self) -> None:
        for process in tuple(self.processes):
            self.send(process, Load())

    @precondition(lambda self: self.processes)
    @rule(pick=st.randoms(use_true_random=False), drain=st.booleans())
    def leave(self, pick: random.Random, drain: bool) -> None:
        process = pick.choice(self.processes)
        member = process.member
        self.receive(Leave(member, drain, proof=member.proof(KEY)))
        process.leaving = True
        if not drain:
            self.processes.remove(process)
            self.left.add(member)

    @precondition(lambda self: self.processes)
    @rule(pick=st.randoms(use_true_random=False))
    def die(self, pick: random.Random) -> None:
        self.processes.remove(pick.choice(self.processes))

    @precondition(lambda self: self.past)
    @rule(pick=st.randoms(use_true_random=False), leave=st.booleans())
    def late_message_of_an_earlier_replica(self, pick: random.Random, leave: bool) -> None:
        """It has left, or a later replica has its name."""
        member = pick.choice(self.past)
        later = {e.member for e in self.view().replicas if e.member.id == member.id and e.member.epoch > member.epoch}
        if not later and member not in self.left:
            return
        before, proof = self.view(), member.proof(KEY)
        event = Leave(member, False, proof) if leave else Heartbeat(member, Load(9, 9, 0.9), proof)
        self.receive(event)
        assert self.view() == before

    @precondition(lambda self: self.past)
    @rule(pick=st.randoms(use_true_random=False), leave=st.booleans())
    def message_without_proof(self, pick: random.Random, leave: bool) -> None:
        member = pick.choice(self.past)
        before = self.view()
        event = Leave(member, False) if leave else Heartbeat(member, Load(9, 9, 0.9))
        self.receive(event)
        assert self.view() == before

    @rule(seconds=st.sampled_from([0.05, 0.4, 0.7, 1.3, 2.1, 7.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    @invariant()
    def no_replica_is_up_without_a_recent_heartbeat(self) -> None:
        for entry in self.view().replicas:
            if entry.state is State.UP:
                assert self.now - self.heard[entry.member] < TIMING.suspect_s + 1e-6
            if entry.state is State.SUSPECT:
                assert self.now - self.heard[entry.member] < TIMING.timeout_s + 1e-6

    @invariant()
    def a_name_has_one_replica(self) -> None:
        names = [entry.member.id for entry in self.view().replicas]
        assert len(names) == len(set(names)) and names == sorted(names)

    @invariant()
    def views_are_current_and_subscribers_agree(self) -> None:
        self.advance(1.01 * PUBLISH_GAP_S)
        if unnumbered(self.views[-1]) != unnumbered(self.view()):  # something changed in this very moment
            assert self.now < self.them.deadline() < self.now + PUBLISH_GAP_S
            return
        follower, attachments = self.subscribers[0]
        attached = {entry.member for entry in self.view().replicas if entry.state in ATTACHED}
        if follower.view is not None and follower.view.settled:
            assert attachments.now == attached
            assert {e.member for e in follower.view.replicas} == {e.member for e in self.view().replicas}
        elif follower.view is not None:
            epochs = {entry.member.id: entry.member.epoch for entry in follower.view.replicas}
            assert attachments.now >= {member for member in attached if epochs[member.id] <= member.epoch}

    def teardown(self) -> None:
        """After a long silence of all replicas nothing is left."""
        if hasattr(self, "them"):
            self.advance(TIMING.forget_s + TIMING.drain_s + 1)
            assert self.view().replicas == ()
            assert self.them._records == {}
            assert self.subscribers[0][1].now == set()


MembershipMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestMembershipMachine = MembershipMachine.TestCase
