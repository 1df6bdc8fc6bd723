"""The registration port, over real sockets: joining, names, refusals, and noise, which changes nothing."""

from __future__ import annotations

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
from unittest import mock

import msgspec
import psutil
import pytest
import zmq

from tests.support import noise
from vllm_omni_ext.config.schema import Cluster, OmniConfig, Timeouts
from vllm_omni_ext.coordinator.keys import Keys, as_client
from vllm_omni_ext.coordinator.members import Member
from vllm_omni_ext.coordinator.membership import Names, Timing
from vllm_omni_ext.encoding import MAX_MESSAGE_BYTES, Malformed, Message, encode
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.client.replica_connections import ReplicaInfo
from vllm_omni_ext.runtime.supervise import headless
from vllm_omni_ext.runtime.supervise.joining import (
    FROM_HEAD,
    LOG_EVERY_S,
    TO_HEAD,
    WITHHELD,
    Endpoints,
    Expected,
    Gone,
    Join,
    Joined,
    JoinServer,
    Present,
    Refusal,
    Refusals,
)
from vllm_omni_ext.runtime.supervise.process_watcher import ChildSupervisor
from vllm_omni_ext.topology.placement import Turns
from vllm_omni_ext.topology.plan import Headless

pytestmark = pytest.mark.slow

PATIENCE_S = 15.0
KEY = "the head's"
LATE_S = 0.3
HOST = "127.0.0.1"
JOIN = Join(ticket="t", stage="talker", model="m", config_hash="t", version="1", host="10.0.0.2")
MARK = Present(ticket="a mark between messages")
NOT_JOINED = "this replica has not joined, or was given up"
EXPECTED = Expected(models={"talker": "m", "thinker": "m"}, version="1", stages={"talker": "t", "thinker": "h"})


class ReplicaSupervisor(ChildSupervisor):
    """A supervisor without children; `later` has the work that is due after a pause, which the test does."""

    def __init__(self) -> None:
        super().__init__(Turns({}))
        self.later: list[tuple[float, Callable[[], None]]] = []

    def after(self, pause_s: float, work: Callable[[], None]) -> None:
        self.later.append((pause_s, work))

    def done(self, work: Callable[[], None] = lambda: None) -> None:
        """Have something done, and wait until it is."""
        over = threading.Event()
        self.do(work)
        self.do(over.set)
        assert over.wait(PATIENCE_S)


class Servers:
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

    def forgotten(self, replica: ReplicaId) -> None:
        self.told.append(("forgotten", replica))


class Coordination:
    """Gives names, and keeps those of the replicas that have ended."""

    events, views = "tcp://events", "tcp://views"
    timing = Timing(timeout_s=5.0, drain_s=30.0)

    def __init__(self) -> None:
        self.names = Names(KEY, [ReplicaId("talker", 0)])
        self.left: list[ReplicaId] = []

    def leave(self, replica: ReplicaId) -> None:
        self.left.append(replica)
        if (member := self.names.get(replica)) is not None:
            self.names.free(member)


class Bench:
    """A join server; `talker/0` is planned here."""

    def __init__(self, secret_file: str | None = None) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        config = OmniConfig(
            timeouts=Timeouts(startup_timeout_s=60.0),
            cluster=Cluster(master_address=HOST, master_port=self.port, cluster_secret_file=secret_file),
        )
        plan: Any = SimpleNamespace(config=config, replicas=lambda: [SimpleNamespace(id=ReplicaId("talker", 0))])
        self.replica_supervisor: Any = ReplicaSupervisor()
        self.servers: Any = Servers()
        self.coordination: Any = Coordination()
        self.lines: list[str] = []
        self.join_server = JoinServer(
            plan, EXPECTED, self.coordination, self.replica_supervisor, self.servers, tell=self.lines.append
        )
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
        """Send a message that is not answered, and wait until it was taken: a replica that has not joined is refused
        after it.
        """
        dealer = dealer or self.dealer
        dealer.send(encode(message))
        self.passed(dealer)

    def passed(self, dealer: Any) -> None:
        """Wait until all messages of a connection have been handled."""
        dealer.send(encode(MARK))
        while FROM_HEAD.decode(dealer.recv()) != Refusal(ticket=MARK.ticket, reason=NOT_JOINED):
            pass

    def forgotten(self, index: int, epoch: int, *, silent: bool = False) -> None:
        """The coordinator has removed a talker."""
        member = Member("talker", index, epoch)
        self.replica_supervisor.done(lambda: self.join_server.forgotten(member, silent=silent))

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.join_server.close()
        self.replica_supervisor.close()
        self.replica_supervisor.join()


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
    assert (answer.member, answer.proof) == (member := Member("talker", 1, 1), member.proof(KEY)), "talker/0 is planned"
    assert (answer.events, answer.views, answer.interval_s, answer.drain_s) == ("tcp://events", "tcp://views", 1.0, 30)
    first.close()
    assert bench.ask(JOIN) == answer, "also after a lost connection"
    bench.tell(Present(ticket="t"))
    bench.tell(Present(ticket="t", pid=7, restarts=2))
    bench.tell(Present(ticket="t", pid=7, restarts=2))
    name = ReplicaId("talker", 1)
    assert bench.servers.told == [
        ("listen", name, HOST),
        ("ready", name, ReplicaInfo(host="10.0.0.2", pid=7, restarts=2)),
    ]


def test_joins_and_ends_of_replicas_are_reported_to_the_operator(bench: Bench) -> None:
    for ticket, pid, restarts in (("a", 7, 0), ("b", 8, 0), ("c", 9, 2)):
        bench.ask(wish(ticket))
        bench.tell(Present(ticket=ticket, pid=pid, restarts=restarts))
    assert bench.lines == [
        "replica talker/1 of 10.0.0.2 has joined (process 7)",
        "replica talker/2 of 10.0.0.2 has joined (process 8)",
        "replica talker/3 of 10.0.0.2 is up again (process 9)",
    ]
    bench.lines.clear()
    bench.forgotten(1, epoch=1)
    bench.tell(Gone(ticket="b", reason="its process was killed by SIGKILL", again=True, log="/logs/talker-2.log"))
    bench.forgotten(2, epoch=2)  # reported already
    bench.forgotten(3, epoch=3, silent=True)
    bench.tell(Gone(ticket="a", reason="its process exited with status 1", again=True))
    bench.tell(Gone(ticket="a", reason="reported already", again=True))
    bench.tell(Gone(ticket="c", reason="reported already", again=True))
    assert bench.lines == [
        "replica talker/1 of 10.0.0.2 has left",
        "error: replica talker/2 of 10.0.0.2 is gone: its process was killed by SIGKILL; it is started again there; "
        "its log there: /logs/talker-2.log",
        "error: replica talker/3 of 10.0.0.2 is gone: no heartbeat came for too long",
        "error: replica talker/1 of 10.0.0.2 is gone: its process exited with status 1; it is started again there",
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
        assert made.servers.told == []
        assert caplog.messages == [f"refused a replica of '{wrong.get('stage', 'talker')}' on 10.0.0.2: {reason}"]
    closed.close()
    answer = bench.ask(msgspec.structs.replace(JOIN, protocol=9))
    assert isinstance(answer, Refusal) and answer.ticket == "" and "protocol 9 there" in answer.reason


def test_a_replica_gets_the_requested_name_or_the_lowest_free_one(bench: Bench) -> None:
    def joined(ticket: str, index: int | None = None, stage: str = "talker", config_hash: str = "t") -> int:
        answer = bench.ask(wish(ticket, index=index, stage=stage, config_hash=config_hash))
        assert isinstance(answer, Joined)
        return answer.member.index

    assert [joined("a"), joined("b"), joined("c", 7), joined("d", 7), joined("e", 0)] == [1, 2, 7, 3, 4]
    assert joined("f", stage="thinker", config_hash="h") == 0 and joined("g", 2**31 - 1) == 5
    bench.coordination.left.clear()
    bench.tell(Gone(ticket="b", reason="ended", again=False))
    assert bench.coordination.left == [ReplicaId("talker", 2)]
    assert joined("h") == 2


def test_the_end_of_a_replica_is_accepted_with_its_ticket_only(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.tell(Present(ticket="t", pid=7))
    other, name = bench.dial(), ReplicaId("talker", 1)
    for ticket in ("T", "x", "u"):
        bench.tell(Gone(ticket=ticket, reason="guessed", again=False), other)
    answer = bench.ask(Present(ticket="from before", pid=7))
    assert isinstance(answer, Refusal) and answer.ticket == "from before"
    bench.coordination.left.clear()
    assert [told[0] for told in bench.servers.told] == ["listen", "ready"]
    bench.tell(Gone(ticket="t", reason="killed", again=True), other)
    bench.tell(Gone(ticket="t", reason="killed", again=True))
    assert bench.servers.told[2:] == [("ended", name, "killed", False)] and bench.coordination.left == [name]


def test_api_servers_expect_a_replica_that_restarts_only_from_its_next_join(bench: Bench) -> None:
    """Its node may end during the pause before the restart."""
    bench.ask(JOIN)
    bench.tell(Gone(ticket="t", reason="killed", again=True))
    assert bench.servers.told[-1] == ("ended", ReplicaId("talker", 1), "killed", False)
    assert bench.lines[-1].endswith("it is started again there")
    bench.ask(wish("u", index=1))
    assert bench.servers.told[-1] == ("listen", ReplicaId("talker", 1), HOST)


def test_a_forgotten_name_is_free_and_its_replica_must_join_again(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.tell(Present(ticket="t", pid=7))
    name = ReplicaId("talker", 1)
    bench.forgotten(1, epoch=1)
    assert bench.servers.told[-1] == ("forgotten", name)
    assert bench.coordination.left == [name], "its process may still run, and its heartbeats must not count again"
    assert isinstance(bench.ask(Present(ticket="t", pid=7)), Refusal)
    answer = bench.ask(wish("u"))
    assert isinstance(answer, Joined) and answer.member == Member("talker", 1, 2)
    before = list(bench.servers.told)
    bench.forgotten(1, epoch=1)
    assert bench.servers.told == before, "the late message is not about this one"
    bench.tell(Present(ticket="u", pid=8))
    assert bench.servers.told[-1][:2] == ("ready", name)


def test_api_servers_remove_a_replica_that_has_ended_only_if_its_name_is_not_used_again(bench: Bench) -> None:
    for ticket in ("a", "b"):
        bench.ask(wish(ticket))
        bench.tell(Present(ticket=ticket, pid=7))
        bench.tell(Gone(ticket=ticket, reason="killed", again=True))
        bench.ask(wish(ticket + "again")) if ticket == "b" else bench.forgotten(1, epoch=1)
    bench.forgotten(1, epoch=2)
    bench.forgotten(0, epoch=1)  # of the plan
    assert [told for told in bench.servers.told if told[0] == "forgotten"] == [("forgotten", ReplicaId("talker", 1))]


def test_replica_not_ready_in_time_loses_its_name(bench: Bench) -> None:
    bench.ask(JOIN)
    bench.ask(wish("u"))
    bench.tell(Present(ticket="t", pid=7))
    for pause, expire in bench.replica_supervisor.later:
        assert pause == 60.0
        bench.replica_supervisor.done(expire)
    (ended,) = [told for told in bench.servers.told if told[0] == "ended"]
    assert ended[1] == ReplicaId("talker", 2) and "startup_timeout_s" in ended[2] and ended[3] is False
    assert isinstance(bench.ask(Present(ticket="u", pid=7)), Refusal)


def test_a_replica_that_still_starts_on_its_host_is_kept(bench: Bench) -> None:
    """Its host has the limit of its start, which begins later than that of the head."""
    bench.ask(JOIN)
    for _ in range(2):
        bench.tell(Present(ticket="t"))
        (pause, expire) = bench.replica_supervisor.later.pop()
        assert pause == 60.0
        bench.replica_supervisor.done(expire)
    assert [told[0] for told in bench.servers.told] == ["listen"]
    bench.tell(Present(ticket="t", pid=7))
    bench.replica_supervisor.done(bench.replica_supervisor.later.pop()[1])
    assert [told[0] for told in bench.servers.told] == ["listen", "ready"] and bench.replica_supervisor.later == []


def test_join_is_refused_with_the_reason_if_the_head_cannot_listen(bench: Bench) -> None:
    bench.servers.error = OSError(99, "Cannot assign requested address")
    assert "Cannot assign requested address" in bench.ask(JOIN).reason
    assert [told[0] for told in bench.servers.told] == ["listen", "ended"], "some may listen already"
    bench.servers.error = None
    assert isinstance(bench.ask(JOIN), Joined)


def test_an_error_in_a_decision_is_logged_and_others_are_made(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(bench.servers, "listen", side_effect=RuntimeError("a bug")):
        assert bench.ask(JOIN, wait_s=LATE_S) is None
    assert "no decision about a Join message" in caplog.text
    assert isinstance(bench.ask(JOIN), Joined)


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
    assert made.servers.told == []
    assert isinstance(made.ask(JOIN, made.dial(right)), Joined)
    made.close()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., headless.HeadClient]]:
    """Makes headless sides of a head at a port, without a secret."""
    plan: Any = SimpleNamespace(config=OmniConfig(timeouts=Timeouts(startup_timeout_s=PATIENCE_S)), model="m")
    monkeypatch.setattr(headless, "config_hash", lambda plan, stage: "t")
    monkeypatch.setattr(headless, "models_of", lambda plan: {"talker": plan.model})
    monkeypatch.setattr(headless, "__version__", "1")
    made: list[headless.HeadClient] = []

    def make(port: int) -> headless.HeadClient:
        joining = Headless(stage="talker", replicas=1, head=(HOST, port), replica_address=HOST)
        made.append(headless.HeadClient(plan, joining))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
def test_a_headless_side_names_its_replica_as_the_head_does(
    bench: Bench, client: Callable[..., headless.HeadClient]
) -> None:
    head, slot = client(bench.port), ReplicaId("talker", 0)
    assert head.name_of(slot) == slot
    head.listen(slot)
    assert head.name_of(slot) == ReplicaId("talker", 1), "talker/0 is planned on the head"
    head.log_of = lambda replica: Path(f"/logs/{replica.stage}-{replica.index}.log")
    assert head.unknown_to_head() == []
    head.ready(slot, ReplicaInfo(host=HOST, pid=7))
    head.ended(slot, "its process was killed by SIGKILL", again=False)
    assert head.name_of(slot) == ReplicaId("talker", 1), "also when it is gone"
    assert head.unknown_to_head() == []
    bench.replica_supervisor.done()
    assert bench.lines[-1].endswith("it is not started again there; its log there: /logs/talker-1.log")


def test_a_headless_side_finds_the_replicas_that_the_head_does_not_have(
    bench: Bench, client: Callable[..., headless.HeadClient]
) -> None:
    head, first, second = client(bench.port), ReplicaId("talker", 0), ReplicaId("talker", 1)
    head.listen(first)
    head.listen(second)
    head.ready(first, ReplicaInfo(host=HOST, pid=7))
    deadline = time.monotonic() + PATIENCE_S
    while bench.servers.told[-1][0] != "ready" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert head.identity(first).epoch == 1 and head.identity(second).index == 2
    for index, slot in ((1, first), (2, second)):
        bench.forgotten(index, epoch=index)
        assert head.unknown_to_head() == [slot] and slot not in head.places
    assert head.unknown_to_head() == []


def test_headless_side_without_the_secret_fails_with_the_reason_if_it_is_refused_early(
    secret: str, client: Callable[..., headless.HeadClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq reports a failed handshake once, and does not try again."""
    monkeypatch.setattr(headless, "RETRY_S", 2 * LATE_S)
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
    encode(Present(ticket="y" * 32, pid=1)),
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
    bench.tell(Present(ticket="t", pid=7))
    before, told = dict(bench.join_server._entries), list(bench.servers.told)
    malformed = 0
    for make in (garbage, mutated):
        messages = [make(rng) for _ in range(EACH)]
        malformed += sum(map(is_malformed, messages))
        for start in range(0, EACH, AT_ONCE):  # answers are not read
            attacker = bench.dial()
            for data in messages[start : start + AT_ONCE]:
                attacker.send(data)
            attacker.send_multipart([HARMLESS[1], b""])
            malformed += 1
            bench.passed(attacker)
            attacker.close()
        if make is garbage:
            memory = process.memory_info().rss
    assert bench.join_server.dropped == malformed > 0.9 * EACH
    for _ in range(50):
        with socket.create_connection((HOST, bench.port)) as raw:
            raw.sendall(rng.randbytes(200))
    assert bench.ask(JOIN) == joined
    bench.replica_supervisor.done()
    assert (bench.join_server._entries, bench.servers.told) == (before, told)
    assert process.memory_info().rss - memory < GROWTH_BYTES


def test_a_flood_while_the_supervisor_is_busy_waits_in_its_connection(bench: Bench) -> None:
    busy, flood = threading.Event(), encode(Present(ticket="y" * 128, pid=1))
    attacker = bench.dial()
    bench.replica_supervisor.do(lambda: busy.wait(4 * PATIENCE_S))
    with pytest.raises(zmq.Again):
        for _ in range(1_000_000):
            attacker.send(flood, 0 if attacker.poll(LATE_S * 1000, zmq.POLLOUT) else zmq.NOBLOCK)
    busy.set()
    assert isinstance(bench.ask(JOIN, bench.dial()), Joined)


@pytest.mark.parametrize(("with_reason", "answer"), [(True, "model is 'a' there and 'b' here"), (False, WITHHELD)])
def test_refusal_reason_goes_to_the_log_and_not_to_strangers(
    with_reason: bool, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(with_reason=with_reason)
    assert refusals.words("a replica", "model is 'a' there and 'b' here") == answer
    assert caplog.messages == ["refused a replica: model is 'a' there and 'b' here"]


def test_a_flood_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = Refusals(with_reason=False, clock=lambda: now[0])
    for number in range(1000):
        refusals.words("x" * 5000, f"{number} " + "y" * 5000)
    assert len(caplog.messages) == 1 and len(caplog.messages[0]) < 1300
    now[0] += LOG_EVERY_S
    refusals.words("a replica", "again")
    assert caplog.messages[1] == "refused a replica: again (and 999 other refusals)"
