"""Messages between the head and its API servers, and the state that operators change."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from vllm_omni_ext.wire.control import ReplicaConnected, ReplicaEnded, decode, encode
from vllm_omni_ext.wire.operator_state import (
    NOTHING_CHANGED,
    Adapter,
    AdapterLoaded,
    AdapterUnloaded,
    Change,
    OperatorState,
    ReplicasSlept,
)

DIED = ReplicaEnded(replica="talker/1", reason="killed by signal 9", again=True)
ONE, OTHER = Adapter("tune", 1, "/tune"), Adapter("tune", 2, "/other", base="tiny", three_d=True)


@pytest.mark.parametrize("message", [DIED, ReplicaConnected("talker/1", b"\x00\xff")])
def test_a_message_is_read_back(message: ReplicaEnded | ReplicaConnected) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        *map(
            msgspec.msgpack.encode,
            (
                {"type": "ReplicaEnded", "replica": "talker/1", "reason": "x"},
                {"type": "ReplicaEnded", "replica": 1, "reason": "x", "again": True},
                {"type": "Other", "replica": "talker/1", "reason": "x", "again": True},
                ["talker/1", "x"],
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
    slept = ReplicasSlept(("talker/0", "talker/1"), asleep=True)
    assert after(slept) == after(slept, slept) and after(slept).asleep == {"talker/0", "talker/1"}
    assert after(slept, ReplicasSlept(("talker/0", "thinker/0"), asleep=False)).asleep == {"talker/1"}
    assert after(AdapterLoaded(ONE)).adapters == {"tune": ONE}
    assert after(AdapterLoaded(ONE), AdapterLoaded(OTHER)).adapters == {"tune": OTHER}
    gone = after(AdapterLoaded(ONE), AdapterUnloaded("tune"))
    assert gone.adapters == {} and gone.unloaded == {"tune"}
    assert after(AdapterUnloaded("tune"), AdapterLoaded(ONE)) == after(AdapterLoaded(ONE))
    state = after(slept, AdapterLoaded(OTHER), AdapterUnloaded("a"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=OperatorState) == state
