"""The registration port, over real sockets: joining, names, refusals, and noise, which changes nothing."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from tests.support import noise
from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.coordinator.keys import Keys, as_client
from vllm_omni_ext.coordinator.membership import Expected
from vllm_omni_ext.coordinator.refusals import WITHHELD
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.supervise import headless
from vllm_omni_ext.runtime.supervise.join_server import JoinServer
from vllm_omni_ext.topology.plan import Headless
from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, Malformed, Message, encode
from vllm_omni_ext.wire.joining import FROM_HEAD, TO_HEAD, Endpoints, Gone, Join, Joined, Ping, Pong, Refusal, Started

PATIENCE_S = 5.0
LATE_S = 0.3
HOST = "127.0.0.1"
JOIN = Join(ticket="t", stage="talker", model="m", config_hash="t", version="1", host="10.0.0.2")
EXPECTED = Expected(model="m", version="1", stages={"talker": "t", "thinker": "h"})


class ReplicaSupervisor:
    """A thread that does work; `later` has the work that is due after a pause, which the test does."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], None]]] = []
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._todo.put(work)

    def after(self, pause_s: float, work: Callable[[], None]) -> None:
        self.later.append((pause_s, work))

    def done(self, work: Callable[[], None] = lambda: None) -> None:
        """Have something done, and wait until it is."""
        over = threading.Event()
        self.do(work)
        self.do(over.set)
        assert over.wait(PATIENCE_S)

    def _work(self) -> None:
        while (work := self._todo.get()) is not None:
            work()

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()


class ReplicaListener:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.error: OSError | None = None

    def listen(self, replica: ReplicaId, host: str | None = None) -> list[tuple[str, str]]:
        self.told.append(("listen", replica, host))
        if self.error is not None:
            raise self.error
        return [("tcp://in", "tcp://out")]

    def ready(self, replica: ReplicaId, about: ReplicaInfo) -> None:
        self.told.append(("ready", replica, about))

    def ended(self, replica: ReplicaId, reason: str, *, again: bool) -> None:
        self.told.append(("ended", replica, reason, again))


class Bench:
    """A join server; `talker/0` is planned here."""

    def __init__(self, secret_file: str | None = None) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        config = OmniConfig(
            master_address=HOST, master_port=self.port, startup_timeout_s=60.0, cluster_secret_file=secret_file
        )
        plans = {
            "talker": SimpleNamespace(replicas=(SimpleNamespace(id=ReplicaId("talker", 0)),)),
            "thinker": SimpleNamespace(replicas=()),
        }
        plan: Any = SimpleNamespace(config=config, stage=plans.__getitem__)
        self.replica_supervisor: Any = ReplicaSupervisor()
        self.users: Any = ReplicaListener()
        self.left: list[ReplicaId] = []
        coordination: Any = SimpleNamespace(
            expected=EXPECTED, events="tcp://events", views="tcp://views", leave=self.left.append
        )
        self.lines: list[str] = []
        self.join_server = JoinServer(plan, coordination, self.replica_supervisor, self.users, tell=self.lines.append)
        self.context = zmq.Context()
        self.dealer = self.dial()

    def dial(self, keys: Keys | None = None) -> Any:
        """One more connection."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        as_client(dealer, keys)
        dealer.connect(f"tcp://{HOST}:{self.port}")
        return dealer

    def ask(self, message: Message | bytes, dealer: Any = None, wait_s: float = PATIENCE_S) -> Any:
        """Send a message and return the answer; None if there is none in time, or no connection after a refusal."""
        dealer = dealer or self.dealer
        dealer.sndtimeo = int(wait_s * 1000)
        try:
            dealer.send(message if isinstance(message, bytes) else encode(message))
        except zmq.Again:
            return None
        return FROM_HEAD.decode(dealer.recv()) if dealer.poll(wait_s * 1000) else None

    def tell(self, message: Message, dealer: Any = None) -> None:
        """Send a message that is not answered, and wait until it was taken: a ping is answered after it."""
        dealer = dealer or self.dealer
        dealer.send(encode(message))
        assert isinstance(self.ask(Ping(), dealer), Pong)
        self.replica_supervisor.done()

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.join_server.close()
        self.replica_supervisor.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def wish(ticket: str, **fields: Any) -> Join:
    return msgspec.structs.replace(JOIN, ticket=ticket, **fields)


def test_a_replica_joins(bench: Bench) -> None:
    first = bench.dial()
    answer = bench.ask(JOIN, first)
    assert isinstance(answer, Joined) and answer.ticket == "t"
    assert answer.servers == (Endpoints("tcp://in", "tcp://out"),)
    assert (answer.index, answer.events, answer.views) == (1, "tcp://events", "tcp://views"), "talker/0 is planned"
    first.close()
    assert bench.ask(JOIN) == answer, "also after a lost connection"
    bench.tell(Started(ticket="t", pid=7, restarts=2))
    bench.tell(Started(ticket="t", pid=7, restarts=2))
    name = ReplicaId("talker", 1)
    assert bench.users.told == [
        ("listen", name, HOST),
        ("ready", name, ReplicaInfo(host="10.0.0.2", pid=7, restarts=2)),
    ]


def test_joins_and_ends_of_replicas_are_reported_to_the_operator(bench: Bench) -> None:
    for ticket, pid, restarts in (("a", 7, 0), ("b", 8, 0), ("c", 9, 2)):
        bench.ask(wish(ticket))
        bench.tell(Started(ticket=ticket, pid=pid, restarts=restarts))
    assert bench.lines == [
        "replica talker/1 of 10.0.0.2 has joined (process 7)",
        "replica talker/2 of 10.0.0.2 has joined (process 8)",
        "replica talker/3 of 10.0.0.2 is up again (process 9)",
    ]
    bench.lines.clear()
    bench.replica_supervisor.done(lambda: bench.join_server.forgotten(ReplicaId("talker", 1)))
    bench.tell(Gone(ticket="b", reason="its process was killed by SIGKILL", again=True, log="/logs/talker-2.log"))
    bench.replica_supervisor.done(lambda: bench.join_server.forgotten(ReplicaId("talker", 2)))  # reported already
    bench.replica_supervisor.done(lambda: bench.join_server.forgotten(ReplicaId("talker", 3), silent=True))
    assert bench.lines == [
        "replica talker/1 of 10.0.0.2 has left",
        "error: replica talker/2 of 10.0.0.2 is gone: its process was killed by SIGKILL; it is started again there; "
        "its log there: /logs/talker-2.log",
        "error: replica talker/3 of 10.0.0.2 is gone: nothing was heard of it for too long",
    ]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"stage": "nose"}, "there is no stage 'nose'; there are talker, thinker"),
        ({"model": "other"}, "model is 'other' there and 'm' here"),
        ({"version": "0"}, "package version is '0' there and '1' here"),
        ({"config_hash": "x"}, "configuration hash of stage 'talker' is 'x' there and 't' here"),
        ({"stage": "thinker"}, "configuration hash of stage 'thinker' is 't' there and 'h' here"),
    ],
    ids=str,
)
def test_a_refused_replica_gets_the_reason_only_with_the_secret(
    bench: Bench, secret: str, wrong: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    closed = Bench(secret)
    for made, dealer, told in ((bench, None, WITHHELD), (closed, closed.dial(Keys.read(secret)), reason)):
        caplog.clear()
        answer = made.ask(wish("t", **wrong), dealer)
        assert isinstance(answer, Refusal) and answer.ticket == "t" and answer.reason == told
        assert made.users.told == []
        assert caplog.messages == [f"refused a replica of '{wrong.get('stage', 'talker')}' on 10.0.0.2: {reason}"]
    closed.close()
    answer = bench.ask(msgspec.structs.replace(JOIN, protocol=9))
    assert isinstance(answer, Refusal) and answer.ticket == "" and "protocol 9 there" in answer.reason


def test_a_replica_gets_the_requested_name_or_the_lowest_free_one(bench: Bench) -> None:
    def joined(ticket: str, index: int | None = None, stage: str = "talker", config_hash: str = "t") -> int:
        answer = bench.ask(wish(ticket, index=index, stage=stage, config_hash=config_hash))
        assert isinstance(answer, Joined)
        return answer.index

    assert [joined("a"), joined("b"), joined("c", 7), joined("d", 7), joined("e", 0)] == [1, 2, 7, 3, 4]
    assert joined("f", stage="thinker", config_hash="h") == 0 and joined("g", 2**31 - 1) == 5
    bench.left.clear()
    bench.tell(Gone(ticket="b", reason="ended", again=False))
    assert bench.left == [ReplicaId("talker", 2)]
    assert joined("h") == 2


def test_the_end_of_a_replica_is_accepted_with_its_ticket_only(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.tell(Started(ticket="t", pid=7))
    other, name = bench.dial(), ReplicaId("talker", 1)
    for ticket in ("T", "x", "u"):
        bench.tell(Gone(ticket=ticket, reason="guessed", again=False), other)
    answer = bench.ask(Started(ticket="from before", pid=7))
    assert isinstance(answer, Refusal) and answer.ticket == "from before"
    bench.left.clear()
    assert [told[0] for told in bench.users.told] == ["listen", "ready"]
    bench.tell(Gone(ticket="t", reason="killed", again=True), other)
    bench.tell(Gone(ticket="t", reason="killed", again=True))
    assert bench.users.told[2:] == [("ended", name, "killed", True)] and bench.left == [name]


def test_a_forgotten_name_is_free_and_its_replica_must_join_again(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.tell(Started(ticket="t", pid=7))
    bench.left.clear()
    bench.replica_supervisor.done(lambda: bench.join_server.forgotten(ReplicaId("talker", 1)))
    assert isinstance(bench.ask(Started(ticket="t", pid=7)), Refusal)
    assert bench.left == []
    answer = bench.ask(wish("u"))
    assert isinstance(answer, Joined) and answer.index == 1
    assert bench.left == [ReplicaId("talker", 1)], "it may have continued and have the name again"
    bench.replica_supervisor.done(lambda: bench.join_server.forgotten(ReplicaId("talker", 1)))
    bench.tell(Started(ticket="u", pid=8))
    assert bench.users.told[-1][:2] == ("ready", ReplicaId("talker", 1)), "the late news is not about this one"


def test_replica_not_ready_in_time_loses_its_name(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.ask(wish("u"))
    bench.tell(Started(ticket="t", pid=7))
    for pause, expire in bench.replica_supervisor.later:
        assert pause == 60.0
        bench.replica_supervisor.done(expire)
    (ended,) = [told for told in bench.users.told if told[0] == "ended"]
    assert ended[1] == ReplicaId("talker", 2) and "startup_timeout_s" in ended[2] and ended[3] is False
    assert isinstance(bench.ask(Started(ticket="u", pid=7)), Refusal)


def test_join_is_refused_with_the_reason_if_the_head_cannot_listen(bench: Bench) -> None:
    bench.users.error = OSError(99, "Cannot assign requested address")
    assert "Cannot assign requested address" in bench.ask(JOIN).reason
    assert [told[0] for told in bench.users.told] == ["listen", "ended"], "some may listen already"
    bench.users.error = None
    assert isinstance(bench.ask(JOIN), Joined)


def test_pings_are_answered_while_the_supervisor_is_busy_and_differ_by_head(bench: Bench) -> None:
    busy, other = threading.Event(), Bench()
    other.replica_supervisor.do(lambda: busy.wait(PATIENCE_S))
    first = other.ask(Ping())
    assert isinstance(first, Pong) and first == other.ask(Ping()) != bench.ask(Ping())
    other.dealer.send(encode(JOIN))
    assert isinstance(other.ask(Ping()), Pong)
    other.join_server.close()  # the decision, which is made afterwards, is not sent
    busy.set()
    other.replica_supervisor.close()
    other.context.destroy(linger=0)


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("correct horse battery staple\n")
    return str(file)


def test_no_replica_joins_without_the_secret(secret: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another horse, another staple")
    right, wrong = Keys.read(secret), Keys.read(str(other))
    assert right is not None and wrong is not None
    half = replace(wrong, server=right.server)  # has the head's public key only
    made = Bench(secret)
    for keys in (None, wrong, half):
        assert made.ask(JOIN, made.dial(keys), wait_s=0.2) is None
    assert made.users.told == []
    assert isinstance(made.ask(JOIN, made.dial(right)), Joined)
    made.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., headless.HeadClient]]:
    """Makes headless sides of a head at a port, without a secret."""
    plan: Any = SimpleNamespace(config=OmniConfig(startup_timeout_s=PATIENCE_S), model="m")
    monkeypatch.setattr(headless, "config_hash", lambda plan, stage: "t")
    monkeypatch.setattr(headless, "model_identity", lambda model: model)
    monkeypatch.setattr(headless, "__version__", "1")
    made: list[headless.HeadClient] = []

    def make(port: int) -> headless.HeadClient:
        joining = Headless(stage="talker", replicas=1, head=(HOST, port), replica_address=HOST)
        made.append(headless.HeadClient(plan, joining))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_headless_side_names_its_replica_as_the_head_does(
    bench: Bench, client: Callable[..., headless.HeadClient]
) -> None:
    head, slot = client(bench.port), ReplicaId("talker", 0)
    assert head.name_of(slot) == slot
    head.listen(slot)
    assert head.name_of(slot) == ReplicaId("talker", 1), "talker/0 is planned on the head"
    head.log_of = lambda replica: Path(f"/logs/{replica.stage}-{replica.index}.log")
    head.ready(slot, ReplicaInfo(host=HOST, pid=7))
    head.ended(slot, "its process was killed by SIGKILL", again=False)
    assert head.name_of(slot) == ReplicaId("talker", 1), "also when it is gone"
    assert head.disowned() == []
    bench.replica_supervisor.done()
    assert bench.lines[-1].endswith("it is not started again there; its log there: /logs/talker-1.log")


def test_headless_side_without_the_secret_fails_with_the_reason_if_it_is_refused_early(
    secret: str, client: Callable[..., headless.HeadClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq reports a failed handshake once, and does not try again."""
    monkeypatch.setattr(headless, "ASK_AGAIN_S", 2 * LATE_S)
    listen_for_events = zmq.Socket.get_monitor_socket

    def late(*args: Any) -> Any:
        time.sleep(LATE_S)
        return listen_for_events(*args)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    made = Bench(secret)
    with pytest.raises(headless.Refused, match="another secret"):
        client(made.port).listen(ReplicaId("talker", 0))
    made.close()


# -- noise -----------------------------------------------------------------------------------------

EACH, AT_ONCE = 500, 100
GROWTH_BYTES = 16 * 1024 * 1024
HARMLESS = (
    encode(wish("x" * 32, model="wrong" * 9, config_hash="wrong", version="0")),
    encode(Started(ticket="y" * 32, pid=1)),
    encode(Gone(ticket="z" * 32, reason="because", again=True)),
)
"""Well formed; none of them may change anything, with any of their bytes altered."""


garbage = partial(noise.garbage, longest=MAX_MESSAGE_BYTES)
mutated = partial(noise.mutated, harmless=HARMLESS)


def is_malformed(data: bytes) -> bool:
    try:
        TO_HEAD.decode(data)
    except Malformed:
        return True
    return False


def test_noise_changes_nothing(bench: Bench) -> None:
    rng, process = random.Random(1), psutil.Process()
    joined = bench.ask(JOIN)
    bench.tell(Started(ticket="t", pid=7))
    before, told = dict(bench.join_server._entries), list(bench.users.told)
    malformed = 0
    for make in (garbage, mutated):
        messages = [make(rng) for _ in range(EACH)]
        malformed += sum(map(is_malformed, messages))
        for start in range(0, EACH, AT_ONCE):  # answers are not read
            attacker = bench.dial()
            for data in messages[start : start + AT_ONCE]:
                attacker.send(data)
            attacker.send_multipart([HARMLESS[1], b""])
            attacker.send(encode(Ping()))
            malformed += 1
            while not isinstance(FROM_HEAD.decode(attacker.recv()), Pong):
                pass
            attacker.close()
        if make is garbage:
            memory = process.memory_info().rss
    assert bench.join_server.dropped == malformed > 0.9 * EACH
    for _ in range(50):
        with socket.create_connection((HOST, bench.port)) as raw:
            raw.sendall(rng.randbytes(200))
    assert bench.ask(JOIN) == joined
    bench.replica_supervisor.done()
    assert (bench.join_server._entries, bench.users.told) == (before, told)
    assert process.memory_info().rss - memory < GROWTH_BYTES


def test_a_flood_while_the_supervisor_is_busy_is_bounded(bench: Bench) -> None:
    busy = threading.Event()
    bench.replica_supervisor.do(lambda: busy.wait(PATIENCE_S))
    flood = encode(Started(ticket="y" * 32, pid=1))
    for _ in range(1500):
        bench.dealer.send(flood)
    assert isinstance(bench.ask(Ping()), Pong)
    assert bench.join_server._undecided.qsize() <= 1024
    busy.set()
    bench.replica_supervisor.done()
    assert isinstance(bench.ask(JOIN, bench.dial()), Joined)
