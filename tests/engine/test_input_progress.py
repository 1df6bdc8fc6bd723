"""The positions that a request can compute whose input arrives in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.engine.input_progress import InputProgress
from vllm_omni_ext.wire.stage_input import HiddenStatesRef, StageInput

SIZE = 12
chunks = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 5)), max_size=8)
spans = st.lists(st.integers(0, SIZE), unique=True, max_size=6).map(
    lambda cuts: tuple(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


def opening(last: bool = False, **fields: Any) -> StageInput:
    return StageInput(last=last, **fields)


def chunk(prompt_positions: int = 0, **fields: Any) -> StageInput:
    return opening(prompt_positions=prompt_positions, **fields)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (StageInput.of(None)[0], None),  # a request of stock vLLM
        (opening(), SIZE),
        (opening(last=True), None),
        (opening(step_inputs=3), SIZE + 3),
        (opening(step_inputs=1, last=True, hidden_spans=((0, 5),)), 0),
        (opening(prompt_positions=SIZE, hidden_spans=((3, 5),)), 3),
        (opening(prompt_positions=SIZE - 1, last=True), SIZE - 1),
        (opening(prompt_positions=2, hidden_spans=((3, 5),)), 2),
    ],
    ids=str,
)
def test_the_limit_of_a_request_that_was_just_opened(given: StageInput, limit: int | None) -> None:
    assert InputProgress.of(given, SIZE).limit() == limit


@given(st.integers(0, SIZE), st.integers(0, 10), spans, chunks)
def test_progress_is_counted_for_any_chunks(
    known: int, start: int, due: tuple[tuple[int, int], ...], parts: list[tuple[int, int, int]]
) -> None:
    """A position can be computed if its input is there, its hidden state too if it has one, and all before it can."""
    progress = InputProgress.of(opening(prompt_positions=known, step_inputs=start, hidden_spans=due), SIZE)
    at = [p for a, b in due for p in range(a, b)]
    steps, hidden = start, 0
    for entries, more, ids in [(0, 0, 0), *parts]:
        ids = min(ids, SIZE - known)
        progress.add(chunk(ids, step_inputs=entries))
        progress.arrived(hidden + more)
        steps, hidden, known = steps + entries, hidden + more, known + ids
        there = [p < known and p not in at[hidden:] for p in range(SIZE)]
        assert progress.limit() == (SIZE + steps if all(there) else there.index(False))


@given(st.integers(0, SIZE), st.integers(0, 8), st.integers(0, SIZE), spans)
def test_positions_in_the_prefix_cache_need_no_hidden_states(
    known: int, hidden: int, cached: int, due: tuple[tuple[int, int], ...]
) -> None:
    progress = InputProgress.of(opening(prompt_positions=known, hidden_spans=due), SIZE)
    progress.arrived(hidden)
    missing = [p for a, b in due for p in range(a, b)][hidden:]
    there = [p < known and (p < cached or p not in missing) for p in range(SIZE)]
    limit = SIZE if all(there) else there.index(False)
    assert progress.continues(cached) == (limit > cached)
    progress.cached = cached
    assert progress.limit() == limit


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=6))
def test_once_complete_it_stays_complete(start: int, ends: list[bool]) -> None:
    progress = InputProgress.of(opening(step_inputs=start), SIZE)
    for last in ends:
        progress.add(chunk(last=last))
    assert (progress.limit() is None) == any(ends)


@given(st.integers(1, 6), st.integers(0, 6))
def test_tokens_sampled_by_another_replica_have_used_step_inputs_too(done: int, steps: int) -> None:
    there = InputProgress.of(opening(step_inputs=steps, done=done), SIZE + done)
    assert there.limit() == InputProgress.of(opening(step_inputs=steps), SIZE).limit() == SIZE + steps


def test_hidden_states_do_not_become_fewer() -> None:
    """After a failover, the new source may be behind the old one."""
    progress = InputProgress.of(opening(prompt_positions=4, hidden_spans=((0, 3),)), 4)
    progress.arrived(2)
    progress.arrived(1)
    assert progress.limit() == 2


def test_announced_hidden_states_count_when_they_have_been_read() -> None:
    announced = HiddenStatesRef(source="s", name="n", count=3)
    progress = InputProgress.of(opening(hidden_spans=((0, 3),), hidden_states=announced), SIZE)
    progress.add(chunk(hidden_states=announced))
    assert progress.limit() == 0
    progress.arrived(3)
    assert progress.limit() == SIZE


announcements = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=8)


@given(announcements, st.booleans())
def test_step_inputs_count_with_the_hidden_states_announced_before_them(
    parts: list[tuple[int, int, bool]], ended: bool
) -> None:
    """A reply's positions may have hidden states too: none is computed before those of its chunk have been read."""
    progress = InputProgress.of(opening(), SIZE)
    announced, arrived = 0, 0
    chunks: list[tuple[int, int]] = []
    for states, steps, arrives in parts:
        announced += states
        ref = HiddenStatesRef(source="s", name="n", count=announced) if states else None
        progress.add(chunk(step_inputs=steps, hidden_states=ref))
        chunks.append((announced, steps))
        if arrives:
            arrived = announced
            progress.arrived(arrived)
        assert progress.limit() == SIZE + sum(steps for needed, steps in chunks if needed <= arrived)
    progress.add(chunk(last=ended))
    assert (progress.limit() is None) == (ended and announced == arrived)
    progress.arrived(announced)
    assert (progress.limit() is None) == ended


def test_a_chunk_without_a_number_of_positions_has_the_rest_of_the_prompt() -> None:
    progress = InputProgress.of(opening(prompt_positions=3), SIZE)
    progress.add(StageInput(last=False))
    assert progress.limit() == SIZE
