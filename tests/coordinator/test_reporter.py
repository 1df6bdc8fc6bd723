"""The reporter of a replica, with a socket of the test in the coordinator's place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.coordinator.conftest import CONFIG, KEY, PATIENCE_S
from vllm_omni_ext.coordinator.members import TO_COORDINATOR, Heartbeat, Leave, Member
from vllm_omni_ext.coordinator.reporter import Reporter
from vllm_omni_ext.coordinator.server import Coordinator, CoordinatorConfig
from vllm_omni_ext.errors import OmniError
from vllm_omni_ext.pool.load import Load

pytestmark = pytest.mark.engine

ME = Member("talker", 3, 9)
PROOF = ME.proof(KEY)
NOWHERE = "tcp://127.0.0.1:9"


class Silent:
    """The socket of a coordinator."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def read(self):
        assert self._socket.poll(PATIENCE_S * 1000), "nothing was sent"
        return TO_COORDINATOR.decode(self._socket.recv())

    def quiet(self, seconds: float) -> bool:
        return not self._socket.poll(seconds * 1000)

    def restart(self) -> None:
        """Close the socket, and open another at the same address."""
        self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.PULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._socket.bind(self.address)
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def silent() -> Iterator[Silent]:
    other = Silent()
    yield other
    other.close()


@pytest.fixture
def reporter() -> Iterator[Callable[..., Reporter]]:
    made: list[Reporter] = []

    def make(address: str, load=Load) -> Reporter:
        made.append(Reporter(address, ME, PROOF, load, interval_s=0.05))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_starting_and_stopping_do_not_wait_for_a_coordinator() -> None:
    since = time.monotonic()
    one = Reporter(NOWHERE, ME, PROOF, Load, interval_s=60.0)
    one.start()
    for call in (one.stop, one.stop):
        call()
    Reporter(NOWHERE, ME, PROOF, Load, interval_s=60.0).stop()
    assert time.monotonic() - since < 10.0
    with pytest.raises(OmniError, match="'nowhere' is no address of a coordinator: Invalid argument"):
        Reporter("nowhere", ME, PROOF, Load, interval_s=60.0)


def test_heartbeats_have_the_proof_and_the_last_message_is_the_end(silent: Silent, reporter) -> None:
    one = reporter(silent.address, lambda: Load(1, 2, 0.5))
    for _ in range(3):
        assert silent.read() == Heartbeat(ME, Load(1, 2, 0.5), PROOF)
    one.stop()
    while isinstance(message := silent.read(), Heartbeat):
        pass
    assert message == Leave(ME, drain=False, proof=PROOF)
    assert silent.quiet(0.2)


def test_heartbeats_reach_a_coordinator_that_is_started_again(silent: Silent, reporter) -> None:
    reporter(silent.address)
    silent.read()
    silent.restart()
    assert silent.read() == Heartbeat(ME, Load(), PROOF)


def test_heartbeats_continue_while_the_load_cannot_be_read_and_stop_without_a_load(
    silent: Silent, reporter, caplog
) -> None:
    answers = iter([Load(-1, 5, float("nan")), RuntimeError(), RuntimeError(), None])
    connected = Load(1)

    def load() -> Load | None:
        if not begun:
            return connected
        if isinstance(answer := next(answers, None), RuntimeError):
            raise answer
        return answer

    begun = False
    reporter(silent.address, load=load)
    assert silent.read().load == connected
    begun = True
    while (first := silent.read().load) == connected:
        pass
    assert [first, *(silent.read().load for _ in range(2))] == [Load(0, 5, 0.0)] * 3, "within the bounds"
    assert silent.quiet(0.3)
    assert "the load of talker/3#9 cannot be read" in caplog.text


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
    with Coordinator(CoordinatorConfig(timing=CONFIG.timing, key=KEY, events=events)):
        assert ("has no secret" in caplog.text) is warns
