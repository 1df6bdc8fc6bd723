"""Exported hidden states: any ranges, any split of the prefill, any preemption; exports of aborted requests."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_omni_ext.engine.exporter import Exporter
from vllm_omni_ext.engine.input_provider import Span
from vllm_omni_ext.engine.scheduler import OrphanedExports
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, StageProgress, pack
from vllm_omni_ext.wire.stage_input import OPEN_END

LENGTH = 24
WIDTH = 2
Ranges = list[tuple[int, int]]


def hidden_of(request: int, start: int, count: int) -> Tensor:
    """Rows [request, position]."""
    return torch.tensor([[float(request), float(p)] for p in range(start, start + count)]).view(count, WIDTH)


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Disjoint ranges (touching ones included) in any order."""
    marks = sorted(draw(st.lists(st.integers(0, LENGTH), max_size=8, unique=True)))
    found = list(zip(marks[::2], marks[1::2], strict=False))
    touching = draw(st.booleans())
    if touching and found and found[0][1] - found[0][0] > 1:
        (a, b), *others = found
        found = [(a, a + 1), (a + 1, b), *others]
    return draw(st.permutations(found))


@st.composite
def prefill(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spans (start, count) of a chunked prefill; a preemption starts over, at 0 or where the cache ends."""
    spans, reached = [], 0
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.sampled_from([0, reached // 2]))
        cut = draw(st.lists(st.integers(start + 1, LENGTH - 1), min_size=1, max_size=4, unique=True))
        spans += _steps([start, *sorted(cut)])
        reached = max(cut)
    cut = draw(st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True))
    spans += _steps([0, *sorted(cut), LENGTH])
    return spans + [(LENGTH + i, 1) for i in range(draw(st.integers(0, 3)))]  # decode steps


def _steps(marks: list[int]) -> list[tuple[int, int]]:
    return [(a, b - a) for a, b in itertools.pairwise(marks) if b > a]


def owed(wanted: Ranges) -> list[int]:
    return [p for a, b in sorted(wanted) for p in range(a, b)]


@given(ranges(), prefill())
@example([(1, 9)], [(0, 4), (0, LENGTH)])  # preempted between two exported rows
def test_every_row_is_cut_once_and_in_order(wanted: Ranges, spans: list[tuple[int, int]]) -> None:
    exporter, positions = Exporter(), owed(wanted)
    exporter.add("a", wanted)
    seen: list[int] = []
    reached = 0
    for start, count in spans:
        span = Span("a", start, count)
        expected = [p for p in positions if max(start, reached) <= p < start + count]
        reached = max(reached, start + count) if expected else reached
        assert exporter.due([span]) == bool(expected)
        cuts = exporter.cut([span], hidden_of(1, start, count))
        assert list(cuts) == (["a"] if expected else [])
        for cut in cuts.values():
            assert [int(p) for p in cut.hidden_states[:, 1]] == expected
            assert cut.first == len(seen)
            seen += expected
            assert cut.last == (seen == positions)
        exporter.add("a", wanted)  # as after a preemption
    assert seen == positions  # nothing is missing after the whole prefill


@given(st.lists(st.tuples(ranges(), st.integers(0, LENGTH - 1), st.integers(1, LENGTH)), min_size=1, max_size=5))
def test_requests_of_a_batch_are_not_mixed(batch: list[tuple[Ranges, int, int]]) -> None:
    exporter, spans, hidden = Exporter(), [], []
    for number, (wanted, start, count) in enumerate(batch):
        exporter.add(str(number), wanted)
        spans.append(Span(str(number), start, count))
        hidden.append(hidden_of(number, start, count))
    packed = exporter.cut(spans, torch.cat(hidden))
    for number, (wanted, start, count) in enumerate(batch):
        expected = [[number, p] for p in owed(wanted) if start <= p < start + count]
        exported = packed[str(number)].hidden_states.tolist() if str(number) in packed else []
        assert exported == expected
    assert not exporter.due(spans), "each row is cut once"


def test_only_steps_with_rows_to_export_are_counted() -> None:
    exporter, spans = Exporter(), [Span("a", 0, 4), Span("unknown", 0, 4)]
    exporter.add("a", [])
    assert not exporter.due(spans)
    exporter.add("b", [(2, 4)])
    assert not exporter.due(spans) and exporter.steps == 0
    exporter.drop("b")
    exporter.drop("b")
    assert not exporter.due([Span("b", 0, 4)])
    assert exporter.cut([Span("b", 0, 4)], torch.zeros(4, WIDTH)) == {} and exporter.steps == 1


def test_a_reused_request_id_exports_again() -> None:
    exporter = Exporter()
    exporter.add("a", [(0, 2)])
    exporter.add("a", [(3, 4)])
    cut = exporter.cut([Span("a", 0, 4)], hidden_of(1, 0, 4))["a"]
    assert (cut.first, cut.hidden_states[:, 1].tolist(), cut.last) == (0, [3], True)
    exporter.drop("a")
    exporter.add("a", [(3, 4)])
    assert exporter.due([Span("a", 0, 4)])


def test_an_open_range_has_generated_positions_and_is_whole_at_any_time() -> None:
    exporter = Exporter()
    exporter.add("r", [(0, OPEN_END)])
    seen = []
    for span in (Span("r", 0, 5), Span("r", 0, 7), Span("r", 7, 1), Span("r", 8, 1)):  # the second after a preemption
        cut = exporter.cut([span], hidden_of(0, span.start, span.count))["r"]
        assert cut.last and cut.first == len(seen)
        seen += cut.hidden_states[:, 1].tolist()
    assert seen == list(range(9))


def test_positions_that_another_replica_exports_are_not_exported_here() -> None:
    exporter = Exporter()
    exporter.add("r", [(1, 3), (4, OPEN_END)], exported=5)
    assert not exporter.due([Span("r", 0, 5)])
    cut = exporter.cut([Span("r", 4, 3)], hidden_of(0, 4, 3))["r"]
    assert (cut.first, cut.hidden_states[:, 1].tolist(), cut.last) == (3, [5, 6], True)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a request that runs and one that has ended; vLLM's part does nothing."""
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, step, results: {})
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills: SimpleNamespace())
    monkeypatch.setattr(Scheduler, "has_requests", lambda self: False)
    made: Any = OrphanedExports.__new__(OrphanedExports)
    made._orphaned = []
    made.requests = {
        "runs": SimpleNamespace(is_finished=lambda: False, num_stale_output_tokens=0, drop_stale_output=True),
        "ended": SimpleNamespace(is_finished=lambda: True),
    }
    return made


def message(name: str, first: int = 0, start: int = 0) -> torch.Tensor:
    return pack(HiddenStatesChunkReady(source="s", name=name, first=first, count=1, start=start))


def results(*req_ids: str, tensors: list[Any] | None) -> Any:
    return SimpleNamespace(req_ids=list(req_ids), pooler_output=tensors)


def test_exports_of_aborted_requests_are_freed_once(scheduler: Any) -> None:
    tensors = [message("a"), message("b"), message("c", 7, start=7), None]
    scheduler.update_from_output(None, results("runs", "ended", "gone", "ended", tensors=tensors))
    assert scheduler.has_requests(), "a step follows that frees them"
    assert scheduler.schedule().orphaned == ["b", "c"]
    assert scheduler.schedule().orphaned == [] and not scheduler.has_requests()


def test_an_export_that_was_scheduled_ahead_frees_nothing_that_a_stage_reads(scheduler: Any) -> None:
    """The API server has the name from the chunk before."""
    scheduler.update_from_output(None, results("ended", tensors=[message("a", 7)]))
    assert scheduler.schedule().orphaned == []


@pytest.mark.parametrize("tensors", [None, [], [None, pack(StageProgress(1, 2))], [None, torch.zeros(3)]], ids=str)
def test_steps_without_exports_free_nothing(scheduler: Any, tensors: list[Any] | None) -> None:
    scheduler.update_from_output(None, results("runs", "ended", tensors=tensors))
    assert scheduler.schedule().orphaned == []
