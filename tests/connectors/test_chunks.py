"""Chunks: any schedule, any writing pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_ext.connectors.chunks import ALL, Chunk, ChunkReader, ChunkSchedule, ChunkWriter

schedules = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda sizes: ChunkSchedule(tuple(sizes)))
writes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def write_all(schedule: ChunkSchedule, counts: list[int]) -> list[tuple[int, Chunk[int]]]:
    """Write `counts` items at a time, the last time as the end: (items written so far, chunk)."""
    writer, written, chunks = ChunkWriter[int](schedule), 0, []
    for turn, count in enumerate(counts, start=1):
        items = range(written, written + count)
        written += count
        chunks += [(written, chunk) for chunk in writer.write(items, last=turn == len(counts))]
    return chunks


@given(schedules, writes)
def test_a_reader_gets_back_what_was_written(schedule: ChunkSchedule, counts: list[int]) -> None:
    reader = ChunkReader[int]()
    got = [item for _, chunk in write_all(schedule, counts) for item in reader.read(chunk)]
    assert got == list(range(sum(counts)))
    assert reader.closed


@given(schedules, writes)
def test_chunks_have_the_scheduled_sizes_and_one_end(schedule: ChunkSchedule, counts: list[int]) -> None:
    chunks = [chunk for _, chunk in write_all(schedule, counts)]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(len(chunk.items) == schedule.size(chunk.index) for chunk in chunks[:-1])
    end = chunks[-1]
    assert schedule.size(end.index) == ALL or len(end.items) <= schedule.size(end.index)


@given(schedules, writes)
def test_a_complete_chunk_does_not_wait_for_the_next_item(schedule: ChunkSchedule, counts: list[int]) -> None:
    """After each write, less than one chunk is kept back."""
    chunks = write_all(schedule, counts)
    for turn in range(1, len(counts)):
        written = sum(counts[:turn])
        # The same stream, cut off here, has given out these chunks.
        out = _out_after(schedule, counts[:turn])
        kept = written - sum(len(chunk.items) for chunk in out)
        size = schedule.size(len(out))
        assert size == ALL or kept < size
        assert out == [chunk for _, chunk in chunks][: len(out)]


def _out_after(schedule: ChunkSchedule, counts: list[int]) -> list[Chunk[int]]:
    writer, written, out = ChunkWriter[int](schedule), 0, []
    for count in counts:
        out += list(writer.write(range(written, written + count)))
        written += count
    return out


def test_the_last_size_repeats_and_all_is_one_chunk() -> None:
    sizes = [len(chunk.items) for _, chunk in write_all(ChunkSchedule((1, 3)), [11])]
    assert sizes == [1, 3, 3, 3, 1]
    assert [chunk for _, chunk in write_all(ChunkSchedule(), [2, 0, 3])] == [Chunk(0, (0, 1, 2, 3, 4), True)]
    assert [len(chunk.items) for _, chunk in write_all(ChunkSchedule((2, ALL)), [9, 9])] == [2, 16]


def test_an_end_that_fills_its_chunk_needs_no_other() -> None:
    assert [chunk for _, chunk in write_all(ChunkSchedule((2,)), [2])] == [Chunk(0, (0, 1), True)]
    assert [len(chunk.items) for _, chunk in write_all(ChunkSchedule((1, 3)), [2, 5])] == [1, 3, 3]


def test_an_end_without_items_is_a_chunk() -> None:
    assert [chunk for _, chunk in write_all(ChunkSchedule((2,)), [2, 0])] == [
        Chunk(0, (0, 1), False),
        Chunk(1, (), True),
    ]
    assert [chunk for _, chunk in write_all(ChunkSchedule((2,)), [0])] == [Chunk(0, (), True)]


@given(schedules, writes, st.booleans())
def test_nothing_can_be_written_after_the_end(schedule: ChunkSchedule, counts: list[int], last: bool) -> None:
    writer = ChunkWriter[int](schedule)
    for count in counts:
        writer.write(range(count))
    writer.write((), last=True)
    with pytest.raises(ValueError, match="after the last chunk"):
        writer.write((), last=last)


def test_items_are_taken_even_if_nobody_reads_the_chunks() -> None:
    writer = ChunkWriter[int](ChunkSchedule((1,)))
    writer.write([1, 2])
    assert [chunk.index for chunk in writer.write([3])] == [2]


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
