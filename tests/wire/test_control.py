"""Messages of the head to its API servers."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.wire.control import ReplicaConnected, ReplicaEnded, decode, encode

DIED = ReplicaEnded(replica="talker/1", reason="killed by signal 9", again=True)


def test_a_message_survives_the_wire() -> None:
    assert decode(encode(DIED)) == DIED
    read = decode(encode(DIED))
    assert isinstance(read, ReplicaEnded)
    assert ReplicaId.parse(read.replica) == ReplicaId("talker", 1)
    said = ReplicaConnected("talker/1", b"\x00\xff")
    assert decode(encode(said)) == said


def test_a_message_carries_its_name() -> None:
    assert msgspec.msgpack.decode(encode(DIED))["type"] == "ReplicaEnded"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "ReplicaEnded", "replica": "talker/1", "reason": "x"},
        {"type": "ReplicaEnded", "replica": 1, "reason": "x", "again": True},
        {"type": "Other", "replica": "talker/1", "reason": "x", "again": True},
        ["talker/1", "x"],
    ],
    ids=str,
)
def test_other_messages_are_refused(message: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("data", [b"", encode(DIED)[:-1], encode(DIED) + b"\0", pickle.dumps(DIED.reason)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)
