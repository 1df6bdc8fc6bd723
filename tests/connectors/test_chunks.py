"""Chunks of any schedule, for items that come in any portions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkSchedule, ChunkWriter

schedules = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda sizes: ChunkSchedule(tuple(sizes)))
writes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def write(schedule: ChunkSchedule, counts: list[int]) -> list[Chunk[int] | None]:
    """Write `counts` items at a time, the last time as the end; return the result of each write."""
    writer, written, out = ChunkWriter[int](schedule), 0, []
    for turn, count in enumerate(counts, start=1):
        out.append(writer.write(range(written, written + count), last=turn == len(counts)))
        written += count
    return out


def sizes_of(schedule: ChunkSchedule, counts: list[int]) -> list[int]:
    return [len(chunk.items) for chunk in write(schedule, counts) if chunk is not None]


@given(schedules, writes)
def test_chunks_have_no_gaps_and_one_end(schedule: ChunkSchedule, counts: list[int]) -> None:
    chunks = [chunk for chunk in write(schedule, counts) if chunk is not None]
    assert [item for chunk in chunks for item in chunk.items] == list(range(sum(counts)))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.items) >= schedule.size(chunk.index) != ALL for chunk in chunks[:-1])


@given(schedules, writes)
def test_a_complete_chunk_does_not_wait_for_the_next_item(schedule: ChunkSchedule, counts: list[int]) -> None:
    kept = index = 0
    for chunk, count in zip(write(schedule, counts), counts, strict=True):
        kept += count
        if chunk is not None:
            assert len(chunk.items) == kept
            kept, index = 0, index + 1
        size = schedule.size(index)
        assert size == ALL or kept < size


@pytest.mark.parametrize(
    ("sizes", "counts", "chunks"),
    [
        ((1, 3), [1] * 11, [1, 3, 3, 3, 1]),  # the last size repeats
        ((ALL,), [2, 0, 3], [5]),
        ((2, ALL), [2, 7, 9], [2, 16]),
        ((1,), [3, 1, 2], [3, 1, 2]),  # items that come together leave together
        ((2,), [2], [2]),  # an end that fills its chunk needs no other
        ((2,), [2, 0], [2, 0]),
        ((2,), [0], [0]),
    ],
)
def test_sizes_of_chunks(sizes: tuple[int, ...], counts: list[int], chunks: list[int]) -> None:
    assert sizes_of(ChunkSchedule(sizes), counts) == chunks


@pytest.mark.parametrize(
    ("sent", "elapsed", "due"),
    [(4, None, 25), (1, 0.0, 1), (4, 0.0, 3), (4, 0.16, 1), (40, 0.0, 25), (40, 1.6, 19), (40, 100.0, 1)],
)
def test_a_chunk_is_no_larger_than_the_rest_to_play(sent: int, elapsed: float | None, due: int) -> None:
    assert ChunkSchedule((25,), rate=12.5).due(3, sent, elapsed) == due
    assert ChunkSchedule((ALL,), rate=12.5).due(3, sent, elapsed) == ALL


def test_chunks_for_a_consumer_that_uses_all_items_at_the_end_have_the_last_size() -> None:
    schedule = ChunkSchedule((1, 3), rate=12.5, streamed=False)
    assert sizes_of(schedule, [1] * 7) == [3, 3, 1]
    assert schedule.due(2, 6, elapsed=100.0) == 3


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=120),
)
def test_playback_never_waits_while_items_come_in_time(sizes: list[int], gaps: list[float]) -> None:
    """Items come at most one item's time apart; an item can be played to its end once the next one is there."""
    rate = 12.5
    writer = ChunkWriter[int](ChunkSchedule(tuple(sizes), rate))
    now, begun, sent = 0.0, None, 0
    for item, gap in enumerate(gaps):
        now += gap / rate
        if begun is not None:
            assert (now - begun) * rate <= sent + 1e-6  # not one item too few
        chunk = writer.write([item], elapsed=None if begun is None else now - begun)
        if chunk is not None:
            sent += len(chunk.items)
            begun = now if begun is None else begun


def test_a_chunk_has_at_least_the_required_items() -> None:
    writer = ChunkWriter[int](ChunkSchedule((1,)))
    assert writer.write([1], least=2) is None
    assert writer.write([2], least=2) == Chunk(0, (1, 2), last=False)
    assert writer.write([3]) == Chunk(1, (3,), last=False)
    assert writer.write([4], last=True, least=2) == Chunk(2, (4,), last=True)


@pytest.mark.parametrize(("value", "sizes"), [("all", (ALL,)), ([4, 25], (4, 25))])
def test_schedules_of_a_configuration(value: list[int] | str, sizes: tuple[int, ...]) -> None:
    assert ChunkSchedule.of(value, 2.0) == ChunkSchedule(sizes, 2.0)


@pytest.mark.parametrize(("sizes", "rate"), [((), 0.0), ((4, -2), 0.0), ((1,), -1.0)])
def test_impossible_schedules_are_refused(sizes: tuple[int, ...], rate: float) -> None:
    with pytest.raises(ValueError, match=r"chunk sizes|rate"):
        ChunkSchedule(sizes, rate)


@given(schedules, writes, st.booleans())
def test_nothing_can_be_written_after_the_end(schedule: ChunkSchedule, counts: list[int], last: bool) -> None:
    writer = ChunkWriter[int](schedule)
    for count in counts:
        writer.write(range(count))
    writer.write((), last=True)
    with pytest.raises(ValueError, match="after the last chunk"):
        writer.write((), last=last)
