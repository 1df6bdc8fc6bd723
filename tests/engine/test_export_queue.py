"""Exported hidden states are copied and stored outside of the step; the streams of the device are stood in for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from tests.engine.test_edges import Receiving, close, make_sender
from tests.support.examples import examples
from vllm_omni_ext.connectors.arena import ALIGNMENT
from vllm_omni_ext.engine import worker
from vllm_omni_ext.engine.edges import EdgeSender
from vllm_omni_ext.engine.export_queue import ExportQueue, Restored, StepExports
from vllm_omni_ext.engine.exporter import ExportedSlice, Exporter
from vllm_omni_ext.engine.host_copies import HostCopies
from vllm_omni_ext.engine.worker import HiddenStatesExportWorker
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady, unpack
from vllm_omni_ext.wire.stage_input import HiddenStatesRef

PATIENCE_S = 20.0
WIDTH = 16
ROW = WIDTH * 4
"""Bytes of a hidden state: a cache line."""


@dataclass(eq=False)
class Event:
    """An event of a device: reached when `done` is set."""

    done: threading.Event = field(default_factory=threading.Event)
    work: Callable[[], Any] = lambda: None


class Device:
    """Stands in for the streams of a device. Its work is done when a test calls `finish`."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.marks: list[Event] = []
        self.copies: list[tuple[Event, Event]] = []
        """Event after which each copy is queued, and the event of its end."""
        self.waiting = threading.Event()

    def page_locked(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def mark(self) -> Event:
        self.marks.append(Event())
        return self.marks[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        done = Event(work=lambda: target.copy_(source))
        self.copies.append((after, done))
        if self.at_once:
            self.finish(done)
        return done

    def finish(self, event: Event) -> None:
        with torch.inference_mode():
            event.work()
        event.done.set()

    def wait(self, event: Event) -> None:
        self.waiting.set()
        assert event.done.wait(PATIENCE_S), "the copy was never made"


def states(first: int, stop: int) -> torch.Tensor:
    return torch.arange(first, stop, dtype=torch.float32).view(-1, 1).repeat(1, WIDTH)


@pytest.fixture(params=["shared_memory", "tcp"])
def ends(request: Any) -> Iterator[tuple[EdgeSender, Receiving]]:
    sender, receiver = make_sender(request.param), Receiving(request.param)
    yield sender, receiver
    receiver.receiver.close()
    close(sender)


def refs(messages: dict[str, torch.Tensor]) -> dict[str, HiddenStatesRef]:
    found = {}
    for req_id, tensor in messages.items():
        message = unpack(tensor)
        assert isinstance(message, HiddenStatesChunkReady) and not message.failed
        found[req_id] = HiddenStatesRef(source=message.source, name=message.name, count=message.first + message.count)
    return found


def stored(queue: ExportQueue) -> dict[str, HiddenStatesRef]:
    taken = queue.take()
    assert taken is not None
    return refs(taken())


def test_a_step_does_not_wait_for_the_copy_and_its_result_does(ends: tuple[EdgeSender, Receiving]) -> None:
    sender, receiver = ends
    device = Device()
    queue = ExportQueue(sender, HostCopies(device, 16 * ROW))
    queue.submit(StepExports(computed={"r": ExportedSlice(0, states(0, 3), True)}))
    taken = queue.take()
    assert taken is not None and queue.take() is None
    ((after, done),) = device.copies
    assert after is device.marks[0], "the copy begins after the work of the step"
    assert device.waiting.wait(PATIENCE_S), "the thread waits for the copy"
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(taken)
        queue.submit(StepExports(computed={"next": ExportedSlice(0, states(5, 6), True)}))
        assert len(device.copies) == 2, "the next step queues its copy meanwhile"
        assert not result.done()
        device.finish(done)
        (ref,) = refs(result.result(PATIENCE_S)).values()
    receiver.announce("r", ref)
    assert receiver.values() == [0.0, 1.0, 2.0]
    device.finish(device.copies[1][1])
    assert stored(queue).keys() == {"next"}
    queue.close()


def test_a_copy_without_room_is_made_by_the_thread(ends: tuple[EdgeSender, Receiving]) -> None:
    """The step does not wait for room, and memory beyond the limit is not page-locked."""
    sender, receiver = ends
    device = Device()
    copies = HostCopies(device, 2 * ROW)
    queue = ExportQueue(sender, copies)
    rows = {"a": states(0, 2), "b": states(2, 4), "large": states(4, 9)}
    queue.submit(StepExports(computed={name: ExportedSlice(0, each, True) for name, each in rows.items()}))
    taken = queue.take()
    assert taken is not None
    assert len(device.copies) == 1 and copies.used_bytes == 2 * ROW
    device.at_once = True
    device.finish(device.copies[0][1])
    found = refs(taken())
    assert [after for after, _ in device.copies] == device.marks, "each copy begins after the work of the step"
    assert copies.used_bytes == 0
    for name, each in rows.items():
        receiver.announce(name, found[name])
        assert receiver.values() == each[:, 0].tolist()
    queue.close()


def test_page_locked_memory_is_used_again_only_when_its_hidden_states_are_stored(
    ends: tuple[EdgeSender, Receiving],
) -> None:
    """Also by a connector that sends from the memory of the tensor."""
    sender, receiver = ends
    queue = ExportQueue(sender, HostCopies(Device(at_once=True), 2 * ROW))
    found = {}
    for number in range(8):
        queue.submit(StepExports(computed={str(number): ExportedSlice(0, states(number, number + 2), True)}))
        found |= stored(queue)
    for number in range(8):
        receiver.announce(str(number), found[str(number)])
        assert receiver.values() == [float(number), float(number + 1)]
    queue.close()


def test_hidden_states_in_host_memory_are_not_copied(ends: tuple[EdgeSender, Receiving]) -> None:
    sender, _ = ends
    given: list[int] = []
    put = sender._open().put
    sender._open().put = lambda name, index, rows: (given.append(rows.data_ptr()), put(name, index, rows))[1]  # type: ignore[method-assign]
    queue, rows = ExportQueue(sender, HostCopies(None)), states(0, 2)
    queue.submit(StepExports(computed={"r": ExportedSlice(0, rows, True)}))
    assert stored(queue).keys() == {"r"} and given == [rows.data_ptr()]
    queue.close()


def test_kept_hidden_states_come_before_those_that_were_computed(ends: tuple[EdgeSender, Receiving]) -> None:
    sender, receiver = ends
    device = Device(at_once=True)
    queue = ExportQueue(sender, HostCopies(device, 8 * ROW))
    first = ExportedSlice(0, states(0, 4), True)
    queue.submit(StepExports(computed={"one": first}, keep={"one": [(slice(0, 2), 0), (slice(2, 3), 1)]}))
    assert stored(queue).keys() == {"one"} and queue.kept() == 2
    queue.submit(
        StepExports(
            ended=["one"],
            restored={"two": Restored(0, [0, 1], False), "three": Restored(1, [0], True)},
            computed={"two": ExportedSlice(3, states(7, 8), True)},
            free=[0, 1],
        )
    )
    found = stored(queue)
    for name, values in (("two", [0.0, 1.0, 2.0, 7.0]), ("three", [1.0])):
        receiver.announce(name, HiddenStatesRef(source=found[name].source, name=found[name].name, count=len(values)))
        assert receiver.values() == values
    assert queue.kept() == 0 and queue.held() == 3, "all of the first request is stored, which another may take"
    queue.forget([each.name for each in found.values()])
    assert queue.held() == 1
    queue.submit(StepExports(orphaned=["0/one"]))
    assert stored(queue) == {} and queue.held() == 0
    queue.close()


def test_a_step_without_work_starts_no_thread(ends: tuple[EdgeSender, Receiving]) -> None:
    before = threading.active_count()
    queue = ExportQueue(ends[0], HostCopies(None))
    queue.submit(StepExports())
    assert queue.take() is None and threading.active_count() == before


sizes = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=examples(200), deadline=None)
@given(sizes, st.integers(1, 8))
def test_copies_never_overlap_and_stay_in_the_limit(plan: list[tuple[int, bool]], rows: int) -> None:
    """In any order of copies and ends; all tensors are the right ones."""
    device = Device(at_once=True)
    copies = HostCopies(device, rows * ROW)
    open_copies: list[tuple[Any, torch.Tensor]] = []

    def end(which: int) -> None:
        copy, source = open_copies.pop(which)
        assert torch.equal(copy.tensor(), source) and copy.shape == source.shape
        copy.free()

    for number, (count, ends_one) in enumerate(plan):
        source = states(10 * number, 10 * number + count)
        open_copies.append((copies.begin(source), source))
        assert copies.used_bytes <= rows * ROW // ALIGNMENT * ALIGNMENT
        if ends_one:
            end(number % len(open_copies))
    while open_copies:
        end(0)
    assert copies.used_bytes == 0


class Later(AsyncModelRunnerOutput):
    """The asynchronous output of a step."""

    def get_output(self) -> Any:
        return SimpleNamespace(req_ids=["other", "r"], pooler_output=None)

    def get_kv_connector_output(self) -> str:
        return "KV output"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_worker_waits_only_where_its_output_is_read(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads an asynchronous output when it has begun the next step."""
    device = Device()
    sender = make_sender("shared_memory")
    export = HiddenStatesExportWorker.__new__(HiddenStatesExportWorker)
    export._exporter, export._queue = Exporter(), ExportQueue(sender, HostCopies(device, 16 * ROW))
    export._exporter.add("r", [(1, 3)])
    hidden = states(0, 4)
    export._layer = SimpleNamespace(exposed=threading.Lock, take=lambda: hidden)  # type: ignore[assignment]
    export.model_runner = SimpleNamespace(
        requests={}, execute_model_state=None, input_batch=SimpleNamespace(req_ids=["r"], generators={})
    )
    out = Later()
    monkeypatch.setattr(worker, "_answers", lambda: True)
    monkeypatch.setattr(worker._Worker, "execute_model", lambda self, step: None)
    monkeypatch.setattr(
        worker._Worker, "sample_tokens", lambda self, grammar: out if asynchronous else out.get_output()
    )
    monkeypatch.setattr(worker.current_platform, "is_cpu", lambda: False)
    step: Any = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {"r": 4}
    step.scheduled_new_reqs = [SimpleNamespace(req_id="r", sampling_params=None, num_computed_tokens=0)]
    export.execute_model(step)
    ((_, done),) = device.copies
    if asynchronous:
        sampled = export.sample_tokens(None)
        device.finish(done)
        assert sampled.get_kv_connector_output() == "KV output"
        sampled = sampled.get_output()
    else:
        device.finish(done)
        sampled = export.sample_tokens(None)
    nothing, message = sampled.pooler_output
    assert nothing is None and unpack(message).count == 2
    export._queue.close()
    close(sender)
