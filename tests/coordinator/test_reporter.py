"""A replica's side, against a coordinator in a thread of the test."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.coordinator.conftest import CONFIG, EXPECTED, PATIENCE_S
from vllm_omni_ext.coordinator.members import (
    TO_COORDINATOR,
    Admitted,
    Heartbeat,
    Leave,
    Member,
    Refused,
    Register,
    RegisterAgain,
    Released,
)
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.coordinator.server import Coordinator, CoordinatorConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.coordination import Message, encode

pytestmark = pytest.mark.engine

ME = Register(instance="me", stage="talker", model="m", config_hash=EXPECTED.stages["talker"], version="1")


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

    def make(address: str, replica: Register = ME, load=Load, **options) -> Reporter:
        made.append(Reporter(address, replica, load, **options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


class Silent:
    """A coordinator that answers only when the test says so."""

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
ADMITTED = Admitted(member=BEARER, interval_s=0.05)


def test_reporter_is_given_its_name_by_the_coordinator(address: str, reporter) -> None:
    told = threading.Event()
    one = reporter(address, index=5, admitted=lambda member: told.set())
    assert told.wait(PATIENCE_S)
    assert one.member.id == ReplicaId("talker", 5) and one.refusal == ""


def test_starting_and_stopping_do_not_wait_for_a_coordinator() -> None:
    since = time.monotonic()
    one = Reporter("tcp://127.0.0.1:9", ME, Load)
    one.start()
    one.drain()
    one.stop()
    one.stop()
    one.drain()
    Reporter("tcp://127.0.0.1:9", ME, Load).stop()
    assert time.monotonic() - since < 1.0


def test_an_impossible_address_is_refused() -> None:
    with pytest.raises(OmniError, match="'nowhere' is no address of a coordinator: Invalid argument"):
        Reporter("nowhere", ME, Load)


def test_registering_is_tried_until_it_is_answered(silent: Silent, reporter) -> None:
    reporter(silent.address, index=3)
    first, second = silent.read(), silent.read()
    assert first == second == Register(instance="me", stage="talker", model="m", config_hash="t", version="1", index=3)
    silent.say(b"noise")
    silent.say(ADMITTED)
    assert silent.until(Heartbeat).member == BEARER


def test_when_it_is_unknown_it_registers_with_the_name_it_had(silent: Silent, reporter) -> None:
    reporter(silent.address)
    silent.read()
    silent.say(ADMITTED)
    silent.until(Heartbeat)
    silent.say(RegisterAgain(member=Member("talker", 3, 1)))  # of somebody else
    silent.say(RegisterAgain(member=BEARER))
    again = silent.until(Register)
    assert (again.index, again.epoch) == (3, 9)


def test_a_refusal_is_kept_and_logged_once(silent: Silent, reporter, caplog) -> None:
    one = reporter(silent.address)
    silent.read()
    silent.say(Refused(reason="wrong model"))
    silent.say(Refused(reason="wrong model"))
    silent.say(b"noise")  # logged after them
    deadline = time.monotonic() + PATIENCE_S
    while "ignored a message" not in caplog.text and time.monotonic() < deadline:
        silent.quiet(0.05)
    assert one.refusal == "wrong model"
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "the coordinator refuses this replica: wrong model"
    ]


def test_a_coordinator_of_another_version_refuses(silent: Silent, reporter) -> None:
    one = reporter(silent.address)
    silent.read()
    silent.say(Refused(reason="?", protocol=2))
    silent.say(ADMITTED)
    silent.until(Heartbeat)
    assert one.refusal == ""
    silent.say(Refused(reason="?", protocol=2))
    silent.quiet(0.3)
    assert one.refusal == "protocol 2 there and 1 here"


def test_a_process_that_forgets_to_stop_still_ends(silent: Silent) -> None:
    program = f"""
from vllm_omni_ext.coordinator.members import Register
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.pool.load import Load
me = Register(instance="i", stage="talker", model="m", config_hash="t", version="1")
Reporter("{silent.address}", me, Load).start()
"""
    subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=True)


def test_a_load_that_cannot_be_read_does_not_make_the_replica_dead(silent: Silent, reporter, caplog) -> None:
    answers = iter([Load(4, 5, 0.5)])
    reporter(silent.address, load=lambda: next(answers))
    silent.read()
    silent.say(ADMITTED)
    beats = [silent.until(Heartbeat).load for _ in range(3)]
    assert beats == [Load(4, 5, 0.5)] * 3
    assert "the load of talker/3#9 cannot be read" in caplog.text


def test_an_engine_without_a_sign_of_life_sends_none(silent: Silent, reporter) -> None:
    reporter(silent.address, load=lambda: None)
    silent.read()
    silent.say(ADMITTED)
    assert silent.quiet(0.3)


def test_strange_loads_are_cut_to_what_can_be_sent(silent: Silent, reporter) -> None:
    reporter(silent.address, load=lambda: Load(-1, 2, float("nan")))
    silent.read()
    silent.say(ADMITTED)
    assert silent.until(Heartbeat).load == Load(0, 2, 0.0)


def test_drain_is_sent_to_the_coordinator_and_released_by_its_answer(silent: Silent, reporter) -> None:
    one = reporter(silent.address)
    silent.read()
    silent.say(ADMITTED)
    one.drain()
    assert silent.until(Leave) == Leave(member=BEARER, drain=True, proof="me")
    silent.until(Heartbeat)
    assert not one.released.is_set()
    silent.say(Released(member=Member("talker", 3, 1)))  # somebody else
    silent.say(Released(member=BEARER))
    assert one.released.wait(PATIENCE_S)


def test_ending_tells_the_coordinator(silent: Silent, reporter) -> None:
    one = reporter(silent.address)
    silent.read()
    silent.say(ADMITTED)
    silent.until(Heartbeat)
    one.stop()
    assert silent.until(Leave) == Leave(member=BEARER, drain=False, proof="me")
    assert one.member == Member("talker", 3, 9)


@pytest.mark.parametrize(
    ("events", "warns"),
    [
        ("tcp://0.0.0.0:*", True),
        ("tcp://127.0.0.1:*", False),
        pytest.param("tcp://[::]:*", True, marks=pytest.mark.needs("IPv6")),
        pytest.param("tcp://[::1]:*", False, marks=pytest.mark.needs("IPv6")),
    ],
)
def test_an_open_port_without_a_secret_is_warned_of(events: str, warns: bool, caplog) -> None:
    with Coordinator(CoordinatorConfig(expected=EXPECTED, timing=CONFIG.timing, events=events)):
        assert ("has no secret" in caplog.text) is warns
