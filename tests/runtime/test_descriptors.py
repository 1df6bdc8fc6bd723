"""Open files through a pipe, beside its messages."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from vllm_omni_ext.runtime.launch.descriptors import receive_descriptors, send_descriptors

LATE_S = 0.1


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def files(count: int) -> list[int]:
    """The reading ends of pipes that hold one byte each, their number."""
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


@pytest.mark.parametrize("blocking", [True, False])
def test_file_descriptors_arrive_in_order(pipe: tuple[Connection, Connection], blocking: bool) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs.fileno(), blocking)
    given = files(2)
    ours.send_bytes(b"two")
    send_descriptors(ours, given)
    assert theirs.recv_bytes() == b"two"
    taken = receive_descriptors(theirs, 2)
    for descriptor in given:
        os.close(descriptor)
    assert contents(taken) == [0, 1]


def test_non_blocking_reader_waits_for_late_descriptors(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs.fileno(), False)
    (given,) = files(1)
    sending = threading.Timer(LATE_S, send_descriptors, (ours, [given]))
    sending.start()
    assert contents(receive_descriptors(theirs, 1)) == [0]
    sending.join()
    os.close(given)


def test_messages_between_descriptors_are_not_split(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    given = files(2)
    for number in range(3):
        ours.send_bytes(b"before %d" % number)
        send_descriptors(ours, given)
        ours.send_bytes(b"after %d" % number)
    for number in range(3):
        assert theirs.recv_bytes() == b"before %d" % number
        for descriptor in receive_descriptors(theirs, 2):
            os.close(descriptor)
        assert theirs.recv_bytes() == b"after %d" % number
    for descriptor in given:
        os.close(descriptor)


def test_the_pipe_stays_open_and_a_listener_listens_on_the_other_side(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    with socket.create_server(("127.0.0.1", 0)) as listener:
        send_descriptors(ours, [listener.fileno()])
        (taken,) = receive_descriptors(theirs, 1)
        address = listener.getsockname()
    with socket.socket(fileno=taken) as same, socket.create_connection(address, 5) as caller:
        accepted, _ = same.accept()
        with accepted:
            caller.sendall(b"x")
            assert accepted.recv(1) == b"x"
    theirs.send_bytes(b"still")
    assert ours.recv_bytes() == b"still"


def test_descriptors_of_a_closed_sender_raise_an_error(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    ours.close()
    with pytest.raises((EOFError, OSError)):
        receive_descriptors(theirs, 1)
