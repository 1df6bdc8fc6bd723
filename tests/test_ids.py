"""Names of replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.ids import ReplicaId


@given(st.text(min_size=1), st.integers(0, 10**6))
def test_what_is_printed_can_be_read(stage: str, index: int) -> None:
    assert ReplicaId.parse(str(ReplicaId(stage, index))) == ReplicaId(stage, index)


def test_the_form_is_stage_slash_index() -> None:
    assert str(ReplicaId("talker", 1)) == f"{ReplicaId('talker', 1)}" == "talker/1"
    assert ReplicaId.parse("thinker.decode/3") == ReplicaId("thinker.decode", 3)


@pytest.mark.parametrize(
    "text", ["", "talker", "talker/", "/0", "/", "talker/-1", "talker/a", "talker/1.0", "talker/1 "]
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a replica id") as refused:
        ReplicaId.parse(text)
    assert f"'{text}'" in str(refused.value)


def test_replicas_are_ordered_by_stage_then_number() -> None:
    names = [ReplicaId("talker", 10), ReplicaId("talker", 2), ReplicaId("code2wav", 7)]
    assert [str(name) for name in sorted(names)] == ["code2wav/7", "talker/2", "talker/10"]
    assert len({ReplicaId("talker", 0), ReplicaId("talker", 0)}) == 1
