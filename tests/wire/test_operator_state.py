"""What operators have changed: the same changes lead to the same state."""

from __future__ import annotations

import msgspec

from vllm_omni_ext.wire.operator_state import (
    NOTHING_CHANGED,
    Adapter,
    AdapterLoaded,
    AdapterUnloaded,
    Change,
    OperatorState,
    ReplicasSlept,
)

ONE, OTHER = Adapter("tune", 1, "/tune"), Adapter("tune", 2, "/other", base="tiny", three_d=True)


def after(*changes: Change) -> OperatorState:
    state = NOTHING_CHANGED
    for change in changes:
        state = state.after(change)
    return state


def test_sleep() -> None:
    slept = ReplicasSlept(("talker/0", "talker/1"), asleep=True)
    assert after(slept).asleep == {"talker/0", "talker/1"}
    assert after(slept, slept) == after(slept)
    assert after(slept, ReplicasSlept(("talker/0", "thinker/0"), asleep=False)).asleep == {"talker/1"}


def test_adapters() -> None:
    assert after(AdapterLoaded(ONE)).adapters == {"tune": ONE}
    assert after(AdapterLoaded(ONE), AdapterLoaded(OTHER)).adapters == {"tune": OTHER}
    gone = after(AdapterLoaded(ONE), AdapterUnloaded("tune"))
    assert gone.adapters == {} and gone.unloaded == {"tune"}
    assert after(AdapterUnloaded("tune"), AdapterLoaded(ONE)) == after(AdapterLoaded(ONE))


def test_a_state_travels() -> None:
    state = after(ReplicasSlept(("talker/0",), asleep=True), AdapterLoaded(OTHER), AdapterUnloaded("a"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=OperatorState) == state
    assert OperatorState() == NOTHING_CHANGED
