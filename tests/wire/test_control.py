"""Messages of the head to its API servers."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.wire.control import ReplicaDied, decode, encode

DIED = ReplicaDied(replica="talker/1", reason="killed by signal 9")


def test_a_message_survives_the_wire() -> None:
    assert decode(encode(DIED)) == DIED
    assert ReplicaId.parse(decode(encode(DIED)).replica) == ReplicaId("talker", 1)


def test_a_message_carries_its_name() -> None:
    assert msgspec.msgpack.decode(encode(DIED))["type"] == "ReplicaDied"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "ReplicaDied", "replica": "talker/1"},
        {"type": "ReplicaDied", "replica": 1, "reason": "x"},
        {"type": "Other", "replica": "talker/1", "reason": "x"},
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
