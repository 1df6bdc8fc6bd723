"""Chunks: any schedule, any writing pattern."""

from __future__ import annotations

from typing import Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkSchedule, ChunkWriter

schedules = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda sizes: ChunkSchedule(tuple(sizes)))
writes = st.lists(st.integers(0, 9), min_size=1, max_size=8)

T = TypeVar("T")


class ChunkReader(Generic[T]):
    """Puts chunks together again and refuses gaps, repeats and chunks after the end."""

    def __init__(self) -> None:
        self._next = 0
        self.closed = False

    def read(self, chunk: Chunk[T]) -> tuple[T, ...]:
        """Return the chunk's items; ValueError if it is not the next one."""
        if self.closed or chunk.index != self._next:
            raise ValueError(f"chunk {chunk.index} came where {'the end' if self.closed else self._next} was due")
        self._next += 1
        self.closed = chunk.last
        return chunk.items


def write_all(schedule: ChunkSchedule, counts: list[int]) -> list[Chunk[int]]:
    """Write `counts` items at a time, the last time as the end."""
    return [chunk for chunk in answers(schedule, counts) if chunk is not None]


def answers(schedule: ChunkSchedule, counts: list[int]) -> list[Chunk[int] | None]:
    """What each write returns."""
    writer, written, out = ChunkWriter[int](schedule), 0, []
    for turn, count in enumerate(counts, start=1):
        out.append(writer.write(range(written, written + count), last=turn == len(counts)))
        written += count
    return out


@given(schedules, writes)
def test_a_reader_gets_back_what_was_written(schedule: ChunkSchedule, counts: list[int]) -> None:
    reader = ChunkReader[int]()
    got = [item for chunk in write_all(schedule, counts) for item in reader.read(chunk)]
    assert got == list(range(sum(counts)))
    assert reader.closed


@given(schedules, writes)
def test_chunks_are_as_large_as_scheduled_and_have_one_end(schedule: ChunkSchedule, counts: list[int]) -> None:
    chunks = write_all(schedule, counts)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.items) >= schedule.size(chunk.index) != ALL for chunk in chunks[:-1])


@given(schedules, writes)
def test_a_complete_chunk_does_not_wait_for_the_next_item(schedule: ChunkSchedule, counts: list[int]) -> None:
    """After each write, less than one chunk is kept back; a write that completes one hands everything over."""
    kept = index = 0
    for chunk, count in zip(answers(schedule, counts), counts, strict=True):
        kept += count
        if chunk is not None:
            assert len(chunk.items) == kept
            kept, index = 0, index + 1
        size = schedule.size(index)
        assert size == ALL or kept < size


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 30))
def test_items_that_come_one_by_one_leave_in_the_scheduled_sizes(sizes: list[int], count: int) -> None:
    schedule = ChunkSchedule(tuple(sizes))
    *chunks, _ = write_all(schedule, [1] * count + [0])
    assert [len(chunk.items) for chunk in chunks] == [schedule.size(chunk.index) for chunk in chunks]


def test_the_last_size_repeats_and_all_is_one_chunk() -> None:
    sizes = [len(chunk.items) for chunk in write_all(ChunkSchedule((1, 3)), [1] * 11)]
    assert sizes == [1, 3, 3, 3, 1]
    assert write_all(ChunkSchedule(), [2, 0, 3]) == [Chunk(0, (0, 1, 2, 3, 4), True)]
    assert [len(chunk.items) for chunk in write_all(ChunkSchedule((2, ALL)), [2, 7, 9])] == [2, 16]


def test_what_comes_together_leaves_together() -> None:
    assert [len(chunk.items) for chunk in write_all(ChunkSchedule((1,)), [3, 1, 2])] == [3, 1, 2]


def test_an_end_that_fills_its_chunk_needs_no_other() -> None:
    assert write_all(ChunkSchedule((2,)), [2]) == [Chunk(0, (0, 1), True)]


def test_an_end_without_items_is_a_chunk() -> None:
    assert write_all(ChunkSchedule((2,)), [2, 0]) == [Chunk(0, (0, 1), False), Chunk(1, (), True)]
    assert write_all(ChunkSchedule((2,)), [0]) == [Chunk(0, (), True)]


# -- a consumer that plays ---------------------------------------------------------------------------


def test_before_the_consumer_begins_only_the_sizes_count() -> None:
    schedule = ChunkSchedule((4, 25), rate=12.5)
    assert [schedule.due(index, 4, None) for index in (0, 1)] == [4, 25]


@pytest.mark.parametrize(
    ("sent", "elapsed", "due"),
    [(1, 0.0, 1), (4, 0.0, 3), (4, 0.16, 1), (40, 0.0, 25), (40, 1.6, 19), (40, 100.0, 1)],
)
def test_a_chunk_is_no_larger_than_what_is_left_to_play(sent: int, elapsed: float, due: int) -> None:
    assert ChunkSchedule((25,), rate=12.5).due(3, sent, elapsed) == due


def test_everything_at_once_does_not_adapt() -> None:
    assert ChunkSchedule((ALL,), rate=12.5).due(0, 100, 50.0) == ALL


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


def test_a_chunk_may_have_to_be_larger_than_its_schedule_says() -> None:
    writer = ChunkWriter[int](ChunkSchedule((1,)))
    assert writer.write([1], least=2) is None
    assert writer.write([2], least=2) == Chunk(0, (1, 2), last=False)
    assert writer.write([3]) == Chunk(1, (3,), last=False)
    assert writer.write([4], last=True, least=2) == Chunk(2, (4,), last=True)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="rate"):
        ChunkSchedule((1,), rate=-1.0)


@pytest.mark.parametrize(("said", "sizes"), [("all", (ALL,)), ([4, 25], (4, 25)), ((1,), (1,))])
def test_schedules_of_a_configuration(said: list[int] | str, sizes: tuple[int, ...]) -> None:
    assert ChunkSchedule.of(said, 2.0) == ChunkSchedule(sizes, 2.0)


@given(schedules, writes, st.booleans())
def test_nothing_can_be_written_after_the_end(schedule: ChunkSchedule, counts: list[int], last: bool) -> None:
    writer = ChunkWriter[int](schedule)
    for count in counts:
        writer.write(range(count))
    writer.write((), last=True)
    with pytest.raises(ValueError, match="after the last chunk"):
        writer.write((), last=last)


@pytest.mark.parametrize("sizes", [(), (-1,), (4, -2)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="chunk sizes"):
        ChunkSchedule(sizes)


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_reader_refuses_gaps_and_repeats(index: int) -> None:
    reader = ChunkReader[int]()
    reader.read(Chunk(0, (1,), False))
    with pytest.raises(ValueError, match=f"chunk {index} came where 1 was due"):
        reader.read(Chunk(index, (2,), False))
    assert reader.read(Chunk(1, (2,), True)) == (2,)  # the refused chunk changed nothing


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_reader_refuses_chunks_after_the_end(index: int) -> None:
    reader = ChunkReader[int]()
    reader.read(Chunk(0, (1,), True))
    with pytest.raises(ValueError, match="the end was due"):
        reader.read(Chunk(index, (), True))
