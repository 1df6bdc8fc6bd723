"""Messages of joining, and what a replica's process is told about itself."""

from __future__ import annotations

import random

import msgspec
import pytest

from vllm_omni_ext.wire.coordination import MAX_MESSAGE_BYTES, PROTOCOL, Channel, Malformed, Message, encode
from vllm_omni_ext.wire.joining import (
    FROM_HEAD,
    MAX_ANSWER_BYTES,
    TO_HEAD,
    Endpoints,
    Gone,
    Join,
    Joined,
    Ping,
    Pong,
    Refusal,
    Started,
)
from vllm_omni_ext.wire.replica_identity import VARIABLE, ReplicaIdentity

JOIN = Join(ticket="t", stage="talker", model="m", config_hash="c", version="1", host="h", index=3)
JOINED = Joined(
    ticket="t",
    deployment="d",
    index=3,
    servers=(Endpoints("tcp://h:1", "tcp://h:2"), Endpoints("tcp://h:3", "tcp://h:4")),
    events="tcp://h:5",
    views="tcp://h:6",
    drain_s=30.0,
)
SAID = [
    (TO_HEAD, JOIN),
    (TO_HEAD, msgspec.structs.replace(JOIN, index=None)),
    (TO_HEAD, Started(ticket="t", pid=1, restarts=2)),
    (TO_HEAD, Gone(ticket="t", reason="its process ended", again=True)),
    (TO_HEAD, Ping()),
    (FROM_HEAD, JOINED),
    (FROM_HEAD, Refusal(ticket="", reason="no")),
    (FROM_HEAD, Pong(deployment="d")),
]


@pytest.mark.parametrize(("channel", "message"), SAID, ids=lambda value: type(value).__name__)
def test_round_trip(channel: Channel[Message], message: Message) -> None:
    data = encode(message)
    assert channel.decode(data) == message
    with pytest.raises(Malformed):
        (FROM_HEAD if channel is TO_HEAD else TO_HEAD).decode(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": ""},
        {"ticket": "t" * 129},
        {"model": "m" * 513},
        {"index": -1},
        {"index": 2**31},
        {"stage": 1},
    ],
    ids=str,
)
def test_values_out_of_bounds(wrong: dict[str, object]) -> None:
    fields = {**msgspec.structs.asdict(JOIN), **wrong, "type": "join"}
    with pytest.raises(Malformed):
        TO_HEAD.decode(msgspec.msgpack.encode(fields))


def test_another_protocol_is_named() -> None:
    with pytest.raises(Malformed) as error:
        TO_HEAD.decode(encode(msgspec.structs.replace(JOIN, protocol=PROTOCOL + 1)))
    assert error.value.protocol == PROTOCOL + 1


def test_length_limits() -> None:
    many = tuple(Endpoints(f"tcp://host:{i}", f"tcp://host:{i}") for i in range(500))
    answer = msgspec.structs.replace(JOINED, servers=many)
    assert FROM_HEAD.decode(encode(answer)) == answer
    with pytest.raises(Malformed):
        FROM_HEAD.decode(encode(Refusal(ticket="", reason="x" * MAX_ANSWER_BYTES)))
    with pytest.raises(Malformed):
        TO_HEAD.decode(encode(Gone(ticket="t", reason="x" * MAX_MESSAGE_BYTES, again=False)))


def test_noise_is_malformed_and_nothing_else() -> None:
    rng = random.Random(3)
    for _ in range(10_000):
        data = rng.randbytes(rng.randrange(100))
        for channel in (TO_HEAD, FROM_HEAD):
            with pytest.raises(Malformed):
                channel.decode(data)


# -- what a process is told about itself -----------------------------------------------------------

ENROLLED = ReplicaIdentity(
    stage="talker",
    index=1,
    instance="i",
    parent=42,
    events="ipc:///tmp/events",
    model="m",
    config_hash="c",
    version="1",
    host="h",
    secret_file="/run/secret",
)


@pytest.mark.parametrize("enrolled", [ENROLLED, ReplicaIdentity(stage="talker", index=0, instance="i")])
def test_a_process_reads_what_its_parent_wrote(enrolled: ReplicaIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in enrolled.variable().items():
        monkeypatch.setenv(name, value)
    assert ReplicaIdentity.read() == enrolled


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ReplicaIdentity.read() is None


def test_a_damaged_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"stage": "talker", "index": -1, "instance": "i"}')
    with pytest.raises(msgspec.ValidationError):
        ReplicaIdentity.read()
