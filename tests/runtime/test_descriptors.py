"""Open files sent through a pipe, between its messages."""

from __future__ import annotations

import multiprocessing
import os
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
