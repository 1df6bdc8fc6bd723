"""Names of replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.ids import ReplicaId


@given(st.text(min_size=1), st.integers(0, 10**6))
def test_a_printed_name_is_parsed_to_the_same_name(stage: str, index: int) -> None:
    assert str(ReplicaId(stage, index)) == f"{stage}/{index}"
    assert ReplicaId.parse(str(ReplicaId(stage, index))) == ReplicaId(stage, index)


@pytest.mark.parametrize("text", ["", "talker", "talker/", "/0", "talker/-1", "talker/a", "talker/1.0", "talker/1 "])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a replica id"):
        ReplicaId.parse(text)


def test_names_are_ordered_by_stage_and_number() -> None:
    names = [ReplicaId("talker", 10), ReplicaId("talker", 2), ReplicaId("code2wav", 7)]
    assert [str(name) for name in sorted(names)] == ["code2wav/7", "talker/2", "talker/10"]
