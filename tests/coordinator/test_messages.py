"""Messages of the control plane, and the identity in the environment of a replica's process."""

from __future__ import annotations

import math
import pickle
from itertools import chain, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.examples import examples
from vllm_omni_ext.coordinator import members as msg
from vllm_omni_ext.coordinator.members import TO_COORDINATOR, VIEWS, Entry, Member, State, View
from vllm_omni_ext.encoding import PROTOCOL, Channel, Malformed, Message, encode
from vllm_omni_ext.engine.replica_identity import VARIABLE, ReplicaIdentity
from vllm_omni_ext.pool.load import Load
from vllm_omni_ext.runtime.supervise.joining import (
    FROM_HEAD,
    TO_HEAD,
    Endpoints,
    Gone,
    Join,
    Joined,
    Present,
    Refusal,
)

MEMBER = Member("talker", 1, 7)
LOAD = Load(1, 2, 0.5)
HEARTBEAT = msg.Heartbeat(member=MEMBER, load=LOAD)
JOIN = Join(ticket="t", stage="talker", model="m", config_hash="c", version="1", host="h", index=3)
SERVERS = tuple(Endpoints(f"tcp://host:{i}", f"tcp://host:{i}") for i in range(500))
JOINED = Joined(
    ticket="t",
    member=MEMBER,
    proof="p",
    servers=SERVERS,
    events="tcp://h:5",
    views="tcp://h:6",
    interval_s=1.0,
    drain_s=30.0,
)
CHANNELS: dict[Channel[Any], list[Message]] = {
    TO_COORDINATOR: [HEARTBEAT, replace(HEARTBEAT, proof=MEMBER.proof("key")), msg.Leave(MEMBER, drain=True)],
    VIEWS: [
        View(
            generation=1,
            settled=True,
            timeout_s=1.0,
            replicas=(Entry(MEMBER, State.UP, LOAD), Entry(MEMBER, State.DOWN)),
        )
    ],
    TO_HEAD: [
        JOIN,
        replace(JOIN, index=None),
        Present(ticket="t", pid=1, restarts=2),
        Gone(ticket="t", reason="its process ended", again=True),
    ],
    FROM_HEAD: [JOINED, Refusal(ticket="", reason="no")],
}
LIMITS = {TO_COORDINATOR: 2**12, VIEWS: 2**24, TO_HEAD: 2**12, FROM_HEAD: 2**18}


@pytest.mark.parametrize("plane", [(TO_COORDINATOR, VIEWS), (TO_HEAD, FROM_HEAD)])
def test_messages_are_read_back_in_their_direction_only(plane: tuple[Channel[Any], ...]) -> None:
    for channel, direction in product(plane, plane):
        for message in CHANNELS[direction]:
            if direction is channel:
                assert channel.decode(encode(message)) == message
            else:
                with pytest.raises(Malformed):
                    channel.decode(encode(message))


@pytest.mark.parametrize("channel", CHANNELS)
def test_too_long_messages_and_other_protocols_are_refused(channel: Channel[Any]) -> None:
    limit = LIMITS[channel]
    with pytest.raises(Malformed, match=f"a message of {limit + 1} bytes; the longest allowed has {limit}"):
        channel.decode(b"\xc0" * (limit + 1))
    for protocol in (0, PROTOCOL + 1):
        with pytest.raises(Malformed, match=f"protocol {protocol} there and {PROTOCOL} here") as caught:
            channel.decode(encode(replace(CHANNELS[channel][0], protocol=protocol)))
        assert caught.value.protocol == protocol


def test_a_proof_is_of_one_name_one_epoch_and_one_key() -> None:
    others = (Member("talker", 1, 8), Member("talker", 11, 7), Member("talke", 1, 7), Member("talker/1", 1, 7))
    assert len({MEMBER.proof("key"), MEMBER.proof("other"), *(other.proof("key") for other in others)}) == 6
    assert MEMBER.proof("key") == Member("talker", 1, 7).proof("key")


def changed(message: Message, **values: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(encode(message)), **values})


def member(**values: object) -> bytes:
    return changed(HEARTBEAT, member={"stage": "talker", "index": 0, "epoch": 1, **values})


def load(**values: object) -> bytes:
    return changed(HEARTBEAT, load={"waiting": 0, "running": 0, "kv_usage": 0.0, **values})


def test_fields_of_a_later_version_are_ignored() -> None:
    assert TO_COORDINATOR.decode(changed(HEARTBEAT, later=[1, 2])) == HEARTBEAT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode(HEARTBEAT)[:-1],
        encode(HEARTBEAT) + b"\0",
        pickle.dumps({"type": "heartbeat"}),
        b"\x91" * 4000,
        changed(HEARTBEAT, type="other"),
        changed(HEARTBEAT, member=None),
        *(member(stage=stage) for stage in ("", "x" * 200)),
        *(member(index=index) for index in (-1, 2**40, True)),
        member(epoch=2**63),
        load(waiting=-1),
        load(running="1"),
        *(load(kv_usage=usage) for usage in (1.5, math.nan, math.inf)),
        *(changed(JOIN, ticket=ticket) for ticket in ("", "t" * 129)),
        *(changed(JOIN, index=index) for index in (-1, 2**31)),
        changed(JOIN, model="m" * 513),
        changed(JOIN, stage=1),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_other_data_is_malformed(data: bytes) -> None:
    for channel in CHANNELS:
        with pytest.raises(Malformed):
            channel.decode(data)


@given(st.binary(max_size=200), st.sampled_from([*chain(*CHANNELS.values())]), st.integers(0, 200))
@settings(max_examples=examples(300), deadline=None)
def test_random_bytes_raise_no_other_error(noise: bytes, message: Message, at: int) -> None:
    good = encode(message)
    for data in (noise, good[:at] + noise + good[at + len(noise) :]):
        for channel in CHANNELS:
            try:
                channel.decode(data)
            except Malformed as error:
                assert error.protocol != PROTOCOL


IDENTITY = ReplicaIdentity(
    stage="talker",
    index=1,
    epoch=7,
    proof="p",
    parent=42,
    events="ipc:///tmp/events",
    interval_s=0.5,
    host="h",
    secret_file="/run/secret",
)


@pytest.mark.parametrize("identity", [IDENTITY, ReplicaIdentity(stage="talker", index=0)])
def test_a_process_reads_its_identity_from_the_environment(
    identity: ReplicaIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in identity.variable().items():
        monkeypatch.setenv(name, value)
    assert ReplicaIdentity.read() == identity
    monkeypatch.setenv(VARIABLE, '{"stage": "talker", "index": -1}')
    with pytest.raises(msgspec.ValidationError):
        ReplicaIdentity.read()
    monkeypatch.delenv(VARIABLE)
    assert ReplicaIdentity.read() is None
