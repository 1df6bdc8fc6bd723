"""Any order of joining, reporting, falling silent, leaving and coordinators starting again."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tests.support.examples import examples
from vllm_omni_ext.coordinator import members as msg
from vllm_omni_ext.coordinator.follower import ViewDiff
from vllm_omni_ext.coordinator.members import ATTACHED, Entry, Member, State, View
from vllm_omni_ext.coordinator.membership import Expected, Membership
from vllm_omni_ext.coordinator.timing import PUBLISH_GAP_S, Timing
from vllm_omni_ext.pool.load import Load

STAGES = ("talker", "thinker")
EXPECTED = Expected(model="m", version="1", stages=dict.fromkeys(STAGES, "x"))
TIMING = Timing(timeout_s=2.0, drain_s=6.0)


@dataclass
class Process:
    """A replica's process, as its reporter behaves."""

    descriptor: msg.Register
    wish: int | None
    member: Member | None = None
    leaving: bool = False


def unnumbered(view: View) -> list[Entry]:
    """The replicas of a view without the numbers of reports: an equal report is not published at once."""
    return [replace(e, load=e.load and dataclasses.replace(e.load, report=0)) for e in view.replicas]


class Attachments:
    """Checks that attaching and detaching alternate, and that no replica is forgotten while attached."""

    def __init__(self) -> None:
        self.now: set[Member] = set()

    def take(self, actions: list) -> None:
        for action in actions:
            match action:
                case msg.Attach(member):
                    assert member not in self.now, f"{member} attached twice"
                    self.now.add(member)
                case msg.Detach(member, reason):
                    assert reason
                    self.now.remove(member)
                case msg.Forget(member):
                    assert member not in self.now, f"{member} forgotten while attached"


class MembershipMachine(RuleBasedStateMachine):
    """The coordinator compared with its messages, with two subscribers; the second one misses views."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.count = 0
        self.generation = 0
        self.processes: list[Process] = []
        self.past: list[Member] = []
        self.last_heard: dict[Member, float] = {}
        self.subscribers = [(ViewDiff(), Attachments()), (ViewDiff(), Attachments())]
        self.restart()

    @rule()
    def restart(self) -> None:
        """The coordinator ends; a new one starts without replicas."""
        self.generation += 1000
        self.them = Membership(EXPECTED, TIMING, generation=self.generation, at=self.now)
        self.attached = Attachments()
        self.heard: dict[Member, float] = {}
        self.views: list[View] = []
        self.advance(0)

    def handle(self, event) -> list:
        actions = self.them.handle(event, self.now)
        self.attached.take(actions)
        for action in actions:
            if isinstance(action, View):
                self.views.append(action)
                for at, (follower, attachments) in enumerate(self.subscribers):
                    if at == 0 or len(self.views) % 3 == 0:
                        changes = follower.take(action)
                        attachments.take(changes)
                        self.no_live_replica_is_detached(changes)
        return actions

    def no_live_replica_is_detached(self, changes: list) -> None:
        """Also not by a new coordinator, except where two replicas register for one name: one of them was silent."""
        staying = {process.member for process in self.processes if not process.leaving}
        names = Counter(process.member.id for process in self.processes if process.member)
        for change in changes:
            if isinstance(change, msg.Detach) and change.member in staying and names[change.member.id] == 1:
                assert self.now - self.last_heard[change.member] > TIMING.timeout_s - 1e-6

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.them.deadline()) <= end:
            self.now = max(self.now, due)
            self.handle(msg.Tick())
        self.now = end

    def send(self, process: Process, load: Load) -> None:
        """Send the messages of a reporter, until it is registered."""
        for _ in range(4):
            if process.member is None:
                self.register(process)
                return
            if process.leaving:
                self.receive(process, self.handle(msg.Leave(process.member, proof=process.descriptor.instance)))
            actions = self.handle(msg.Heartbeat(process.member, load, process.descriptor.instance))
            if not any(isinstance(action, msg.RegisterAgain) for action in actions):
                self.heard[process.member] = self.last_heard[process.member] = self.now
                self.receive(process, actions)
                return
            if not self.register(process):
                return
        raise AssertionError("a replica is told to register again and again")

    def receive(self, process: Process, actions: list) -> None:
        if any(isinstance(action, msg.Released) for action in actions) and process in self.processes:
            self.processes.remove(process)

    def wish(self, process: Process) -> int | None:
        """A new replica requests a name only if no process has it, as in a plan."""
        stage = process.descriptor.stage
        borne = {other.member.id.index for other in self.processes if other.member and other.member.id.stage == stage}
        return None if process.wish in borne else process.wish

    def register(self, process: Process) -> bool:
        before = {entry.member.id for entry in self.view().replicas}
        index, epoch = (process.member.index, process.member.epoch) if process.member else (self.wish(process), None)
        actions = self.handle(replace(process.descriptor, index=index, epoch=epoch))
        if actions == [msg.NotYet()]:
            assert not self.view().settled
            return False
        (member,) = [action.member for action in actions if isinstance(action, msg.Admitted)]
        stage = [name for name in before if name.stage == process.descriptor.stage]
        assert member.id.index in (index, *range(len(stage) + 1)), "a free name was passed over"
        process.member = member
        self.past.append(member)
        return True

    def view(self) -> View:
        return self.them.view(self.now)

    @rule(stage=st.sampled_from(STAGES), wish=st.none() | st.integers(0, 2))
    def join(self, stage: str, wish: int | None) -> None:
        self.count += 1
        name = f"i{self.count}"
        process = Process(msg.Register(instance=name, stage=stage, model="m", config_hash="x", version="1"), wish)
        self.processes.append(process)
        self.register(process)

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
        if process.member is not None and drain:
            process.leaving = True
            self.receive(process, self.handle(msg.Leave(process.member, proof=process.descriptor.instance)))
        elif process.member is not None:
            self.handle(msg.Leave(process.member, drain=False, proof=process.descriptor.instance))
            self.processes.remove(process)

    @precondition(lambda self: self.processes)
    @rule(pick=st.randoms(use_true_random=False))
    def die(self, pick: random.Random) -> None:
        self.processes.remove(pick.choice(self.processes))

    @precondition(lambda self: self.past)
    @rule(pick=st.randoms(use_true_random=False), leave=st.booleans())
    def late_message_of_a_removed_replica(self, pick: random.Random, leave: bool) -> None:
        member = pick.choice(self.past)
        if member in {entry.member for entry in self.view().replicas}:
            return
        before = self.view()
        event = msg.Leave(member, drain=False) if leave else msg.Heartbeat(member, Load(9, 9, 0.9))
        assert self.handle(event) == [msg.Released(member) if leave else msg.RegisterAgain(member)]
        assert self.view() == before

    @rule()
    def subscribe(self) -> None:
        assert self.handle(msg.Subscribed()) == []

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
    def replicas_with_requests_are_attached(self) -> None:
        states = {entry.member: entry.state for entry in self.view().replicas}
        assert self.attached.now == {member for member, state in states.items() if state in ATTACHED}

    @invariant()
    def views_are_current_and_subscribers_agree(self) -> None:
        self.advance(1.01 * PUBLISH_GAP_S)
        if unnumbered(self.views[-1]) != unnumbered(self.view()):  # something changed in this very moment
            assert self.now < self.them.deadline() < self.now + PUBLISH_GAP_S
            return
        follower, attachments = self.subscribers[0]
        if follower.view is not None and follower.view.settled:
            assert attachments.now == self.attached.now
            assert {e.member for e in follower.view.replicas} == {e.member for e in self.view().replicas}
        elif follower.view is not None:
            assert attachments.now >= self.attached.now

    def teardown(self) -> None:
        """After a long silence of all replicas nothing is left."""
        if hasattr(self, "them"):
            self.advance(TIMING.forget_s + TIMING.drain_s + 1)
            assert self.view().replicas == () and self.attached.now == set()
            assert self.them._by_instance == {} and not any(s.by_index for s in self.them._stages.values())
            assert self.subscribers[0][1].now == set()


MembershipMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestMembershipMachine = MembershipMachine.TestCase
