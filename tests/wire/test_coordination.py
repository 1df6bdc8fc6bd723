"""Messages of the control plane."""

from __future__ import annotations

import math
import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from vllm_omni_ext.coordinator.members import (
    TO_COORDINATOR,
    TO_REPLICA,
    VIEWS,
    Admitted,
    Entry,
    Heartbeat,
    Leave,
    Member,
    NotYet,
    Refused,
    Register,
    RegisterAgain,
    Released,
    State,
    View,
)
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.wire.coordination import PROTOCOL, Malformed, Message, encode

WHO = Member("talker", 1, 7)
LOAD = Load(1, 2, 0.5)
EVENTS = (
    Register(instance="i", stage="talker", model="m", config_hash="h", version="1", index=1, epoch=7),
    Register(instance="i", stage="talker", model="m", config_hash="h", version="1"),
    Heartbeat(member=WHO, load=LOAD),
    Leave(member=WHO, drain=True),
)
REPLIES = (
    Admitted(member=WHO, interval_s=0.2),
    Refused(reason="no"),
    NotYet(),
    RegisterAgain(member=WHO),
    Released(member=WHO),
)
VIEW = View(
    generation=1,
    settled=True,
    timeout_s=1.0,
    replicas=(Entry(WHO, State.UP, LOAD), Entry(WHO, State.DOWN)),
)
HEARTBEAT = encode(EVENTS[2])


@pytest.mark.parametrize("message", EVENTS + REPLIES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire_and_goes_one_way_only(message: Message) -> None:
    to, other = (TO_COORDINATOR, TO_REPLICA) if message in EVENTS else (TO_REPLICA, TO_COORDINATOR)
    assert to.decode(encode(message)) == message
    for wrong in (other, VIEWS):
        with pytest.raises(Malformed):
            wrong.decode(encode(message))


def test_a_view_survives_the_wire() -> None:
    assert VIEWS.decode(encode(VIEW)) == VIEW


def changed(**values: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(HEARTBEAT), **values})


def test_fields_of_a_later_version_are_ignored() -> None:
    assert TO_COORDINATOR.decode(changed(later=[1, 2])) == EVENTS[2]


@pytest.mark.parametrize("protocol", [0, 2])
def test_another_protocol_is_refused_and_named(protocol: int) -> None:
    with pytest.raises(Malformed, match=f"protocol {protocol} there and 1 here") as caught:
        TO_COORDINATOR.decode(changed(protocol=protocol))
    assert caught.value.protocol == protocol


def member(**values: object) -> bytes:
    return changed(member={"stage": "talker", "index": 0, "epoch": 1, **values})


def load(**values: object) -> bytes:
    return changed(load={"waiting": 0, "running": 0, "kv_usage": 0.0, **values})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HEARTBEAT[:-1],
        HEARTBEAT + b"\0",
        pickle.dumps({"type": "heartbeat"}),
        b"\x91" * 4000,
        changed(type="other"),
        changed(member=None),
        member(stage=""),
        member(stage="x" * 200),
        member(index=-1),
        member(index=2**40),
        member(index=True),
        member(epoch=2**63),
        load(waiting=-1),
        load(running="1"),
        load(kv_usage=1.5),
        load(kv_usage=math.nan),
        load(kv_usage=math.inf),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_anything_else_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        TO_COORDINATOR.decode(data)


def test_long_messages_are_not_even_read() -> None:
    with pytest.raises(Malformed, match="a message of 4097 bytes; the longest allowed has 4096"):
        TO_COORDINATOR.decode(b"\xc0" * 4097)


@given(st.binary(max_size=200), st.sampled_from([encode(m) for m in EVENTS]), st.integers(0, 200))
@settings(max_examples=examples(300))
def test_random_bytes_raise_nothing_else(noise: bytes, good: bytes, at: int) -> None:
    for data in (noise, good[:at] + noise + good[at + len(noise) :]):
        for channel in (TO_COORDINATOR, TO_REPLICA, VIEWS):
            try:
                channel.decode(data)
            except Malformed as error:
                assert error.protocol != PROTOCOL
