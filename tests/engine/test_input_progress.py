"""How far a request may run whose input arrives in chunks."""

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


def opening(hidden: int = 0, last: bool = False, **fields: Any) -> StageInput:
    """`hidden`: how many hidden states there are by now."""
    ref = HiddenStatesRef(source="s", name="n", count=hidden) if hidden else None
    return StageInput(hidden_states=ref, last=last, **fields)


def chunk(prompt_positions: int = 0, **fields: Any) -> StageInput:
    return opening(prompt_positions=prompt_positions, **fields)


def test_a_request_without_an_input_runs_at_once_and_for_ever() -> None:
    assert InputProgress.of(StageInput.of(None)[0], SIZE).limit() is None


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, SIZE),
        ({"last": True}, None),
        ({"step_inputs": 3}, SIZE + 3),
        ({"step_inputs": 1, "hidden_spans": ()}, SIZE + 1),
        ({"step_inputs": 1, "last": True, "hidden_spans": ((0, 5),)}, 0),
        ({"hidden_spans": ((3, 5),)}, 3),
        ({"prompt_positions": SIZE, "hidden_spans": ((3, 5),)}, 3),
        ({"prompt_positions": SIZE - 1}, SIZE - 1),
        ({"prompt_positions": SIZE - 1, "last": True}, SIZE - 1),
        ({"prompt_positions": 2, "hidden_spans": ((3, 5),)}, 2),
        ({"prompt_positions": SIZE, "step_inputs": 1}, SIZE + 1),
    ],
    ids=str,
)
def test_how_far_what_is_known_reaches(fields: dict[str, Any], limit: int | None) -> None:
    assert InputProgress.of(opening(**fields), SIZE).limit() == limit


@given(st.integers(0, SIZE), st.integers(0, 10), spans, chunks)
def test_progress_is_counted_whatever_the_chunks_are(
    known: int, start: int, due: tuple[tuple[int, int], ...], parts: list[tuple[int, int, int]]
) -> None:
    """A position can be computed if its input is there, its hidden state too if it has one, and all before it can."""
    progress = InputProgress.of(opening(prompt_positions=known, step_inputs=start, hidden_spans=due), SIZE)
    at = [p for a, b in due for p in range(a, b)]
    steps, hidden = start, 0
    for entries, more, ids in [(0, 0, 0), *parts]:
        ids = min(ids, SIZE - known)
        progress.add(chunk(ids, step_inputs=entries, hidden=hidden + more))
        steps, hidden, known = steps + entries, hidden + more, known + ids
        there = [p < known and p not in at[hidden:] for p in range(SIZE)]
        assert progress.limit() == (SIZE + steps if all(there) else there.index(False))


def test_a_chunk_may_bring_the_rest_of_the_prompt() -> None:
    progress = InputProgress.of(opening(prompt_positions=3), SIZE)
    progress.add(StageInput(last=False))
    assert progress.limit() == SIZE


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=1, max_size=6))
def test_once_complete_it_stays_complete(start: int, ends: list[bool]) -> None:
    progress = InputProgress.of(opening(step_inputs=start), SIZE)
    for last in ends:
        progress.add(chunk(last=last))
    assert (progress.limit() is None) == any(ends)


def test_hidden_states_are_no_step_inputs_and_the_end_does_not_replace_them() -> None:
    progress = InputProgress.of(opening(hidden_spans=((1, 2), (4, 5)), last=True), SIZE)
    assert progress.limit() == 1
    progress.add(chunk(hidden=1))
    assert progress.limit() == 4
    progress.add(chunk(hidden=2))
    assert progress.limit() is None
    assert progress.step_inputs == 0


@given(st.integers(1, 6), st.integers(0, 6))
def test_tokens_sampled_elsewhere_have_used_step_inputs_too(done: int, steps: int) -> None:
    there = InputProgress.of(opening(step_inputs=steps, done=done), SIZE + done)
    assert there.limit() == InputProgress.of(opening(step_inputs=steps), SIZE).limit() == SIZE + steps


def test_hidden_states_do_not_become_fewer() -> None:
    """Another replica that makes them anew has to get as far first."""
    progress = InputProgress.of(opening(prompt_positions=4, hidden_spans=((0, 3),), hidden=2), 4)
    progress.add(chunk(hidden=1))
    assert progress.limit() == 2
