"""A producer's state in any order of events: no payload is freed twice, too early, or never."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_omni_ext.connectors import messages as wire
from vllm_omni_ext.connectors.base import ChunkKey, ConnectorConfig, ConnectorError
from vllm_omni_ext.connectors.producer_state import Action, Deliver, Free, Held, ProducerState, Say

KEEP_S = 10.0
requests = st.sampled_from(["a", "b", "c"])
links = st.sampled_from([b"1", b"2"])


class Machine(RuleBasedStateMachine):
    """`leases` as with shared memory: consumers read where the producer has written."""

    def __init__(self) -> None:
        super().__init__()
        self.producer_state = ProducerState("e", ConnectorConfig(name="x", retention_s=KEEP_S), leases=True)
        self.now = 0.0
        self.held: dict[int, str] = {}
        self.reading: set[tuple[bytes, str]] = set()  # a consumer that was sent a chunk and has not released it
        self.told: set[tuple[bytes, str]] = set()  # it was sent the end of the request

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Free():
                    name = self.held.pop(id(action.chunk))
                    assert not any(request == name for _, request in self.reading), "freed under a reader"
                case Deliver():
                    assert id(action.chunk) in self.held, "a chunk is sent that was freed"
                    self.reading.add((action.link, action.chunk.head.request))
                case Say(link=link, message=wire.Failed() | wire.Gone() as message):
                    self.told.add((link, message.request))

    @rule(name=requests, index=st.integers(0, 3), last=st.booleans())
    def put(self, name: str, index: int, last: bool) -> None:
        try:
            self.producer_state.check(ChunkKey(name, "e", index), last)
        except (ConnectorError, ValueError):
            return
        self.chunk = Held(wire.ChunkHeader(request=name, index=index, last=last, meta=b"", parts=(), nbytes=10), None)
        self.kept = [*getattr(self, "kept", []), self.chunk]  # so that no id is used twice
        self.held[id(self.chunk)] = name
        self.act(self.producer_state.put(self.chunk, self.now))

    @rule(link=links, name=requests, window=st.sampled_from([0, 15]))
    def open(self, link: bytes, name: str, window: int) -> None:
        if (link, name) not in self.told:
            self.act(self.producer_state.on_message(link, wire.Open(request=name, window=window), self.now))

    @rule(link=links, name=requests, index=st.integers(0, 3))
    def want(self, link: bytes, name: str, index: int) -> None:
        self.act(self.producer_state.on_message(link, wire.Want(request=name, index=index), self.now))

    @rule(link=links, name=requests)
    def taken(self, link: bytes, name: str) -> None:
        self.act(self.producer_state.on_message(link, wire.Taken(request=name, nbytes=10), self.now))

    @rule(link=links, name=requests)
    def consumer_forgets(self, link: bytes, name: str) -> None:
        self.reading.discard((link, name))
        self.told.discard((link, name))
        self.act(self.producer_state.on_message(link, wire.Forget(request=name), self.now))

    @rule(link=links)
    def consumer_lost(self, link: bytes) -> None:
        self.reading = {one for one in self.reading if one[0] != link}
        self.told = {one for one in self.told if one[0] != link}
        self.act(self.producer_state.lost(link, self.now))

    @rule()
    def consumers_release(self) -> None:
        for link, name in sorted(self.told):
            self.told.discard((link, name))
            self.reading.discard((link, name))
            self.act(self.producer_state.on_message(link, wire.Release(request=name), self.now))

    @rule(name=requests)
    def producer_forgets(self, name: str) -> None:
        self.act(self.producer_state.forget(name, self.now))

    @rule(name=requests)
    def fails(self, name: str) -> None:
        self.act(self.producer_state.fail(name, "no", self.now))

    @rule(passes=st.sampled_from([1.0, KEEP_S]))
    def time(self, passes: float) -> None:
        self.now += passes
        self.act(self.producer_state.expire(self.now))

    @invariant()
    def counts(self) -> None:
        assert self.producer_state.chunks == len(self.held)

    def teardown(self) -> None:
        for link in (b"1", b"2"):
            self.consumer_lost(link)
        self.now += KEEP_S
        self.act(self.producer_state.expire(self.now))
        assert self.held == {} and len(self.producer_state) == 0, "something is kept that nobody has open"


TestProducerState = Machine.TestCase
