"""The frames of a reply, in whatever order they are added, sent to code2wav and shown to the client."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.model_plugins.qwen3_omni.voice import MOST_NEW, FrameLog

GROUPS = 3
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "ids", "between"]), st.integers(0, 40), st.floats(0, 1)), max_size=60
)


@pytest.mark.parametrize("tensor", [True, False])
@given(calls=CALLS)
def test_frames_are_what_was_added(calls: list[tuple[str, int, float]], tensor: bool) -> None:
    log, added = FrameLog(), list[list[int]]()
    views = []
    for call, count, where in calls:
        if call == "add":
            new = [[len(added) + row, row, -1] for row in range(count)]
            rows = np.array(new, np.int64).reshape(-1, GROUPS)
            log.add(torch.from_numpy(rows) if tensor else rows)
            added += new
        else:
            start = int(where * len(added))
            stop = min(len(added), start + count)
            if call == "ids":
                assert log.ids(start, stop) == list(chain.from_iterable(added[start:stop]))
            else:
                views.append((start, stop, log.between(start, stop)))
        assert log.count == len(added)
    for start, stop, view in views:  # later frames have not changed earlier views
        assert view.tolist() == added[start:stop]


def test_frames_that_no_part_needs_are_stored_from_time_to_time() -> None:
    log = FrameLog()
    for _ in range(3 * MOST_NEW + 1):
        log.add(torch.zeros(1, GROUPS, dtype=torch.int64))
        assert len(log._new) < MOST_NEW
    assert log.ids(0, log.count) == [0] * GROUPS * log.count


def test_frames_that_only_parts_need_are_stored_from_time_to_time() -> None:
    log = FrameLog()
    for number in range(3 * MOST_NEW):
        log.add(torch.full((1, GROUPS), number))
        assert log.ids(number, number + 1) == [number] * GROUPS
        assert len(log._read) <= MOST_NEW
