"""Ranges of the allocator never overlap, and all free memory is one span again in the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_omni_ext.connectors.arena import ALIGNMENT, Arena, room

LINES = 20


class Machine(RuleBasedStateMachine):
    """Any order of `take` and `free`, compared with a list of the owners of all cache lines."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(LINES * ALIGNMENT + 13)
        self.lines: list[int | None] = [None] * LINES

    @rule(size=st.integers(0, 8 * ALIGNMENT))
    def take(self, size: int) -> None:
        need = room(size) // ALIGNMENT
        fits = [at for at in range(LINES - need + 1) if self.lines[at : at + need] == [None] * need]
        place = self.arena.take(size)
        if not fits:
            assert place is None
            return
        assert place == fits[0] * ALIGNMENT, "not the lowest place"
        self.lines[fits[0] : fits[0] + need] = [place] * need

    @precondition(lambda self: any(line is not None for line in self.lines))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted({line for line in self.lines if line is not None})))
        self.arena.free(place)
        self.lines = [None if line == place else line for line in self.lines]
        with pytest.raises(KeyError):
            self.arena.free(place)

    @invariant()
    def counts(self) -> None:
        assert self.arena.used_bytes == ALIGNMENT * sum(line is not None for line in self.lines)
        assert len(self.arena) == len({line for line in self.lines if line is not None})

    def teardown(self) -> None:
        for place in {line for line in self.lines if line is not None}:
            self.arena.free(place)
        assert self.arena.take(LINES * ALIGNMENT) == 0, "free spans were not joined"


TestArena = Machine.TestCase


@given(st.integers(0, ALIGNMENT - 1))
def test_less_than_a_cache_line_has_no_room(capacity: int) -> None:
    assert Arena(capacity).take(1) is None
