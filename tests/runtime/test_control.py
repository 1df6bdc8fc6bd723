"""Between the head and its API servers: messages, open files and counters, and the state that operators change."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import pytest
from vllm.entrypoints.launchers import launcher
from vllm.v1.engine.admission_control import SharedAdmissionStats

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.runtime.control import (
    NOT_ACCEPTING,
    NOTHING_CHANGED,
    Adapter,
    AdapterLoaded,
    AdapterUnloaded,
    Change,
    OperatorChanges,
    OperatorState,
    ReplicaConnected,
    ReplicaEnded,
    ReplicasSlept,
    SharedCounters,
    decode,
    encode,
    receive_descriptors,
    send_descriptors,
)

TALKER, OTHER_TALKER, THINKER = ReplicaId("talker", 0), ReplicaId("talker", 1), ReplicaId("thinker", 0)
DIED = ReplicaEnded(replica=OTHER_TALKER, reason="killed by signal 9", again=True)
REPLICA = {"stage": "talker", "index": 1}
ONE, OTHER = Adapter("tune", 1, "/tune"), Adapter("tune", 2, "/other", base="tiny", three_d=True)


@pytest.mark.parametrize("message", [DIED, ReplicaConnected(OTHER_TALKER, b"\x00\xff")])
def test_a_message_is_read_back(message: ReplicaEnded | ReplicaConnected) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        *map(
            msgspec.msgpack.encode,
            (
                {"type": "ReplicaEnded", "replica": REPLICA, "reason": "x"},
                {"type": "ReplicaEnded", "replica": "talker/1", "reason": "x", "again": True},
                {"type": "Other", "replica": REPLICA, "reason": "x", "again": True},
                [REPLICA, "x"],
            ),
        ),
        b"",
        encode(DIED)[:-1],
        encode(DIED) + b"\0",
        pickle.dumps(DIED.reason),
    ],
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):  # a ValidationError is one
        decode(data)


def after(*changes: Change) -> OperatorState:
    state = NOTHING_CHANGED
    for change in changes:
        state = state.after(change)
    return state


def test_operator_state_follows_from_the_changes() -> None:
    slept = ReplicasSlept((TALKER, OTHER_TALKER), asleep=True)
    assert after(slept) == after(slept, slept) and after(slept).asleep == {TALKER, OTHER_TALKER}
    assert after(slept, ReplicasSlept((TALKER, THINKER), asleep=False)).asleep == {OTHER_TALKER}
    assert after(AdapterLoaded(ONE)).adapters == {"tune": ONE}
    assert after(AdapterLoaded(ONE), AdapterLoaded(OTHER)).adapters == {"tune": OTHER}
    gone = after(AdapterLoaded(ONE), AdapterUnloaded("tune"))
    assert gone.adapters == {} and gone.unloaded == {"tune"}
    assert after(AdapterUnloaded("tune"), AdapterLoaded(ONE)) == after(AdapterLoaded(ONE))
    state = after(slept, AdapterLoaded(OTHER), AdapterUnloaded("a"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=OperatorState) == state


SLEPT = ReplicasSlept((TALKER,), asleep=True)


def test_a_change_is_complete_when_all_api_servers_have_applied_it() -> None:
    changes = OperatorChanges()
    changes.make("id", SLEPT, (0, 1, 2))
    assert changes.state.asleep == {TALKER}
    assert changes.applied(2, "id") == changes.applied(0, "id") == changes.applied(0, "id") == []
    assert changes.applied(1, "id") == ["id"]
    assert changes.applied(1, "id") == []


def test_overlapping_changes_are_completed_one_by_one() -> None:
    changes = OperatorChanges()
    changes.make("first", SLEPT, (0, 1))
    changes.make("second", SLEPT, (0, 1))
    assert [changes.applied(1, change_id) for change_id in ("first", "second")] == [[], []]
    assert changes.applied(0, "second") == ["second"]
    assert changes.applied(0, "first") == ["first"]


def test_a_change_does_not_wait_for_a_dead_api_server() -> None:
    changes = OperatorChanges()
    changes.make("id", SLEPT, (0, 1))
    assert changes.applied(1, "id") == []
    assert changes.server_lost(0) == ["id"]
    changes.mark_awake(TALKER)
    assert changes.state.asleep == frozenset(), "its next process is awake"


LATE_S = 0.1


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def files(count: int) -> list[int]:
    """The reading ends of pipes that contain their number."""
    made = []
    for number in range(count):
        reading, writing = os.pipe()
        os.write(writing, bytes([number]))
        os.close(writing)
        made.append(reading)
    return made


def contents(descriptors: list[int]) -> list[int]:
    read = []
    for descriptor in descriptors:
        read += os.read(descriptor, 9)
        os.close(descriptor)
    return read


def test_non_blocking_reader_waits_for_late_descriptors(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs.fileno(), False)
    (given,) = files(1)
    sending = threading.Timer(LATE_S, send_descriptors, (ours, [given]))
    sending.start()
    assert contents(receive_descriptors(theirs, 1)) == [0]
    sending.join()
    os.close(given)


@pytest.mark.parametrize("blocking", [True, False])
def test_descriptors_arrive_in_order_between_whole_messages(
    pipe: tuple[Connection, Connection], blocking: bool
) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs.fileno(), blocking)
    for number in range(3):
        given = files(2)
        ours.send_bytes(b"before %d" % number)
        send_descriptors(ours, given)
        ours.send_bytes(b"after %d" % number)
        for descriptor in given:
            os.close(descriptor)
    for number in range(3):
        assert theirs.recv_bytes() == b"before %d" % number
        assert contents(receive_descriptors(theirs, 2)) == [0, 1]
        assert theirs.recv_bytes() == b"after %d" % number
    theirs.send_bytes(b"back")
    assert ours.recv_bytes() == b"back"


def test_descriptors_of_a_closed_sender_raise_an_error(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    ours.close()
    with pytest.raises((EOFError, OSError)):
        receive_descriptors(theirs, 1)


def test_requests_are_counted_over_all_live_api_servers() -> None:
    board = SharedCounters(3)
    assert list(board.loads) == [NOT_ACCEPTING] * 3 == [launcher._NOT_ACCEPTING] * 3
    servers = [
        SharedAdmissionStats({"mp_admission_counters": board.admitted}, client_count=3, client_index=index)
        for index in range(3)
    ]
    for index, server in enumerate(servers):
        board.loads[index] = index + 2
        server.set_num_requests(index + 2)
    assert list(board.loads) == [2, 3, 4] and servers[0].get_num_requests() == 9
    board.clear(1)
    assert list(board.loads) == [2, NOT_ACCEPTING, 4] and servers[0].get_num_requests() == 6
