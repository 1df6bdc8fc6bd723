"""The reporter of a replica, with a coordinator in a thread of the test."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from msgspec.structs import replace

from tests.coordinator.conftest import CONFIG, EXPECTED, PATIENCE_S
from vllm_omni_ext.coordinator import members as msg
from vllm_omni_ext.coordinator.members import TO_COORDINATOR, Member
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.coordinator.server import Coordinator, CoordinatorConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.coordination import Message, encode

pytestmark = pytest.mark.engine

ME = msg.Register(instance="me", stage="talker", model="m", config_hash=EXPECTED.stages["talker"], version="1")


@pytest.fixture
def address() -> Iterator[str]:
    """Of a coordinator that runs in a thread."""
    with Coordinator(CONFIG) as coordinator:
        ours, theirs = multiprocessing.Pipe()
        thread = threading.Thread(target=coordinator.serve, args=(theirs,))
        thread.start()
        yield coordinator.addresses[0]
        ours.close()
        thread.join(PATIENCE_S)
        theirs.close()
        assert not thread.is_alive()


@pytest.fixture
def reporter() -> Iterator[Callable[..., Reporter]]:
    made: list[Reporter] = []

    def make(address: str, replica: msg.Register = ME, load=Load, **options) -> Reporter:
        made.append(Reporter(address, replica, load, **options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


class Silent:
    """A coordinator whose answers the test sends."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._peer = b""

    def read(self, wait_s: float = PATIENCE_S):
        assert self._socket.poll(wait_s * 1000), "nothing was sent"
        self._peer, data = self._socket.recv_multipart()
        return TO_COORDINATOR.decode(data)

    def until(self, kind: type):
        deadline = time.monotonic() + PATIENCE_S
        while not isinstance(message := self.read(), kind):
            assert time.monotonic() < deadline, f"no {kind.__name__}, only {message}"
        return message

    def say(self, message: Message | bytes) -> None:
        self._socket.send_multipart([self._peer, message if isinstance(message, bytes) else encode(message)])

    def quiet(self, seconds: float) -> bool:
        return not self._socket.poll(seconds * 1000)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def silent() -> Iterator[Silent]:
    other = Silent()
    yield other
    other.close()


BEARER = Member("talker", 3, 9)
ADMITTED = msg.Admitted(member=BEARER, interval_s=0.05)


def test_the_coordinator_assigns_the_requested_name(address: str, reporter) -> None:
    told = threading.Event()
    one = reporter(address, index=5, admitted=lambda member: told.set())
    assert told.wait(PATIENCE_S)
    assert one.member.id == ReplicaId("talker", 5) and one.refusal == ""


def test_starting_and_stopping_do_not_wait_for_a_coordinator() -> None:
    since = time.monotonic()
    one = Reporter("tcp://127.0.0.1:9", ME, Load)
    one.start()
    for call in (one.drain, one.stop, one.stop, one.drain):
        call()
    Reporter("tcp://127.0.0.1:9", ME, Load).stop()
    assert time.monotonic() - since < 1.0
    with pytest.raises(OmniError, match="'nowhere' is no address of a coordinator: Invalid argument"):
        Reporter("nowhere", ME, Load)


def test_registration_is_sent_until_it_is_answered(silent: Silent, reporter) -> None:
    reporter(silent.address, index=3)
    first, second = silent.read(), silent.read()
    assert first == second == replace(ME, index=3)
    silent.say(b"noise")
    silent.say(ADMITTED)
    assert silent.until(msg.Heartbeat).member == BEARER


def test_an_unknown_replica_registers_again_with_its_name(silent: Silent, reporter) -> None:
    reporter(silent.address)
    silent.read()
    silent.say(ADMITTED)
    silent.until(msg.Heartbeat)
    silent.say(msg.RegisterAgain(member=Member("talker", 3, 1)))  # of another replica
    silent.say(msg.RegisterAgain(member=BEARER))
    again = silent.until(msg.Register)
    assert (again.index, again.epoch) == (3, 9)


def test_a_refusal_is_kept_and_logged_once(silent: Silent, reporter, caplog) -> None:
    one = reporter(silent.address)
    for refusal, reason in (
        (msg.Refused(reason="wrong model"), "wrong model"),
        (msg.Refused(reason="?", protocol=2), "protocol 2 there and 1 here"),
    ):
        silent.read()
        caplog.clear()
        silent.say(refusal)
        silent.say(refusal)
        silent.say(b"noise")  # logged after them
        deadline = time.monotonic() + PATIENCE_S
        while "ignored a message" not in caplog.text and time.monotonic() < deadline:
            silent.quiet(0.05)
        assert one.refusal == reason
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert errors == [f"the coordinator refuses this replica: {reason}"]
        silent.say(ADMITTED)
        silent.until(msg.Heartbeat)
        assert one.refusal == ""


def test_heartbeats_continue_while_the_load_cannot_be_read_and_stop_without_a_load(
    silent: Silent, reporter, caplog
) -> None:
    answers = iter([Load(-1, 5, float("nan")), RuntimeError(), RuntimeError(), None])

    def load() -> Load | None:
        if isinstance(answer := next(answers, None), RuntimeError):
            raise answer
        return answer

    reporter(silent.address, load=load)
    silent.read()
    silent.say(ADMITTED)
    assert [silent.until(msg.Heartbeat).load for _ in range(3)] == [Load(0, 5, 0.0)] * 3, "within the bounds"
    assert silent.quiet(0.3)
    assert "the load of talker/3#9 cannot be read" in caplog.text


def test_drain_and_end_are_sent_and_the_answer_releases_the_replica(silent: Silent, reporter) -> None:
    one = reporter(silent.address)
    silent.read()
    silent.say(ADMITTED)
    one.drain()
    assert silent.until(msg.Leave) == msg.Leave(member=BEARER, drain=True, proof="me")
    silent.until(msg.Heartbeat)
    assert not one.released.is_set()
    silent.say(msg.Released(member=Member("talker", 3, 1)))  # of another replica
    silent.say(msg.Released(member=BEARER))
    assert one.released.wait(PATIENCE_S)
    other = reporter(silent.address)
    silent.until(msg.Register)
    silent.say(ADMITTED)
    silent.until(msg.Heartbeat)
    other.stop()
    assert silent.until(msg.Leave) == msg.Leave(member=BEARER, drain=False, proof="me")


@pytest.mark.parametrize(
    ("events", "warns"),
    [
        ("tcp://0.0.0.0:*", True),
        ("tcp://127.0.0.1:*", False),
        pytest.param("tcp://[::]:*", True, marks=pytest.mark.needs("IPv6")),
        pytest.param("tcp://[::1]:*", False, marks=pytest.mark.needs("IPv6")),
    ],
)
def test_an_open_port_without_a_secret_is_logged(events: str, warns: bool, caplog) -> None:
    with Coordinator(CoordinatorConfig(expected=EXPECTED, timing=CONFIG.timing, events=events)):
        assert ("has no secret" in caplog.text) is warns
