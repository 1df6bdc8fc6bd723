"""The run of batches from a folder: to their end, through the end of the process that has them, and by cancellation."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.batch.test_running import WAIT_S, Server
from vllm_omni_ext.batch import store as module
from vllm_omni_ext.batch import worker as workers
from vllm_omni_ext.batch.store import MIB, Batch, Store
from vllm_omni_ext.batch.worker import Worker

CHAT = "/v1/chat/completions"


class Folder:
    """A folder, and API servers on it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder, most=MIB, most_lines=5)
        self.saved = asyncio.Event()
        self.workers: list[Worker] = []

    def server(self, *, places: int = 2) -> tuple[Server, Worker]:
        """Start an API server."""
        server, store = Server(), Store(self.store.folder, most=MIB, most_lines=5)
        save = store.save

        def saved(batch: Batch, *, synced: bool = True) -> None:
            save(batch, synced=synced)
            loop.call_soon_threadsafe(self.saved.set)

        loop = asyncio.get_running_loop()
        store.save = saved  # type: ignore[method-assign]
        self.workers.append(Worker(store, server, places=places))
        self.workers[-1].start()
        return server, self.workers[-1]

    def kill(self, worker: Worker) -> None:
        """Release what a killed process releases; nothing else of it runs."""
        assert worker._lock is not None and worker._pipe is not None
        worker._loop.remove_reader(worker._pipe)
        for file in (worker._pipe, worker._lock):
            os.close(file)
        self.workers.remove(worker)

    def batch(self, *names: str, data: bytes | None = None, seconds: int = 3600) -> Batch:
        """Create a batch with a line for each name; a name that begins with `bad` is of a line with another method."""
        lines = [
            {"custom_id": name, "method": "PUT" if name.startswith("bad") else "POST", "url": CHAT, "body": {}}
            for name in names
        ]
        data = "\n".join(map(json.dumps, lines)).encode() if data is None else data
        file = self.store.add_file("in.jsonl", len(data), io.BytesIO(data))
        return self.store.add_batch(endpoint=CHAT, input_file_id=file.id, window="1h", seconds=seconds, metadata=None)

    async def until(self, batch: Batch, holds: Callable[[Batch], Any]) -> Batch:
        """Wait until a batch that was saved satisfies `holds`."""
        async with asyncio.timeout(WAIT_S):
            while not holds(found := self.store.batch(batch.id)):
                self.saved.clear()
                await self.saved.wait()
        return found

    def output(self, batch: Batch) -> dict[str, Any]:
        """Errors by the id of the line, of both files; None for an answer. Each line is there once."""
        found: dict[str, Any] = {}
        for file_id in (batch.output, batch.failures):
            path = self.store.contents(file_id)
            for text in path.read_text().splitlines() if path.exists() else ():
                line = json.loads(text)
                assert line["custom_id"] not in found
                found[line["custom_id"]] = line["error"]
        return found


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for worker in made.workers:
        worker.stop()


async def answer_all(server: Server, count: int) -> None:
    for number in range(count):
        await server.until(number + 1)
        server.held[server.seen[number]].set_result(None)


async def test_a_batch_is_run_to_its_end(folder: Folder) -> None:
    server, worker = folder.server()
    batch = folder.batch("a", "bad", "b", "c")
    worker.wake()
    await answer_all(server, 3)
    found = await folder.until(batch, lambda batch: batch.ended)
    assert (found.status, found.total, found.completed, found.failed) == ("completed", 4, 3, 1)
    output = folder.output(batch)
    assert [output[name] for name in "abc"] == [None] * 3 and output["bad"]["param"] == "method"
    shown = folder.store.as_object(found)
    assert (shown["output_file_id"], shown["error_file_id"]) == (batch.output, batch.failures)


async def test_a_damaged_record_of_a_batch_does_not_stop_the_others(folder: Folder) -> None:
    (folder.store.folder / f"batches/batch-{'0' * 32}.json").write_bytes(b"")
    server, worker = folder.server()
    batch = folder.batch("a")
    worker.wake()
    await answer_all(server, 1)
    assert (await folder.until(batch, lambda batch: batch.ended)).status == "completed"


@pytest.mark.parametrize(("data", "code"), [(b"\n\n", "empty_file"), (b"{}\n" * 6, "too_many_lines")])
async def test_a_file_without_lines_or_with_too_many_fails(folder: Folder, data: bytes, code: str) -> None:
    _, worker = folder.server()
    batch = folder.batch(data=data)
    worker.wake()
    found = await folder.until(batch, lambda batch: batch.ended)
    assert found.status == "failed" and found.errors[0]["code"] == code
    assert folder.store.as_object(found)["errors"]["data"] == found.errors


async def test_another_server_continues_a_batch_and_no_line_is_answered_twice(folder: Folder) -> None:
    batch = folder.batch("a", "b", "c", "d")
    first, worker = folder.server()
    await first.until(2)
    second, other = folder.server()
    waits = [thread for thread in threading.enumerate() if thread.name == "batch-lock"][-1]
    await asyncio.to_thread(waits.join, 0.2)
    assert waits.is_alive() and second.seen == []
    first.held["a"].set_result(None)
    await folder.until(batch, lambda batch: batch.completed == 1)
    await first.until(3)
    other.wake()  # reaches the first one: it has the lock
    assert second.seen == []
    worker.stop()
    await second.until(2)
    assert first.seen == ["a", "b", "c"] and second.seen == ["b", "c"]
    with folder.store.contents(batch.output).open() as file:
        assert len(file.readlines()) == 1
    await answer_all(second, 3)
    found = await folder.until(batch, lambda batch: batch.ended)
    assert (found.status, found.completed) == ("completed", 4)
    assert folder.output(batch) == dict.fromkeys("abcd")


async def test_a_batch_in_any_state_is_continued(folder: Folder) -> None:
    """The process ended after the last answer, or while it listed the output, or while it cancelled."""
    states = [folder.batch("a") for _ in range(2)]
    for batch, status in zip(states, ("finalizing", "cancelling"), strict=True):
        folder.store.save(batch.to("in_progress", total=1).to(status))
    folder.server()
    ends = [(await folder.until(batch, lambda batch: batch.ended)).status for batch in states]
    assert ends == ["completed", "cancelled"]


async def test_a_cancelled_batch_keeps_its_answers(folder: Folder) -> None:
    server, worker = folder.server()
    batch = folder.batch("a", "b", "c")
    worker.wake()
    await server.until(2)
    server.held["a"].set_result(None)
    await server.until(3)
    folder.store.cancel(batch.id)
    worker.wake()
    found = await folder.until(batch, lambda batch: batch.ended)
    assert (found.status, found.completed, found.failed) == ("cancelled", 1, 0)
    assert folder.output(batch) == {"a": None} and folder.store.file(batch.output)
    assert server.held["b"].cancelled() and server.held["c"].cancelled()


async def test_a_batch_that_is_cancelled_before_it_is_run_sends_nothing(folder: Folder) -> None:
    batch = folder.batch("a")
    folder.store.cancel(batch.id)
    server, _ = folder.server()
    assert (await folder.until(batch, lambda batch: batch.ended)).status == "cancelled"
    assert server.seen == []


async def test_a_batch_expires(folder: Folder) -> None:
    late = folder.batch("a", "bad", "b", seconds=-1)
    _, worker = folder.server()
    found = await folder.until(late, lambda batch: batch.ended)
    assert (found.status, found.completed, found.failed) == ("expired", 0, 3)
    output = folder.output(late)
    assert output["a"]["code"] == output["b"]["code"] == "batch_expired" and output["bad"]["param"] == "method"
    soon = folder.batch("a", seconds=1)
    worker.wake()
    assert (await folder.until(soon, lambda batch: batch.ended)).status == "expired"


async def test_a_batch_that_cannot_be_written_fails_alone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch, other = folder.batch("a"), folder.batch("b")
    writer = module.Store.writer

    def full(store: Store, of: Batch) -> Any:
        def write(result: Any) -> None:
            raise OSError(28, "No space left on device")

        return write if of.id == batch.id else writer(store, of)

    monkeypatch.setattr(module.Store, "writer", full)
    server, _ = folder.server()
    await answer_all(server, 2)
    found = await folder.until(batch, lambda batch: batch.ended)
    assert found.status == "failed" and "No space left" in found.errors[0]["message"]
    assert (await folder.until(other, lambda batch: batch.ended)).status == "completed"


async def test_a_failed_batch_is_saved_when_there_is_room_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SAVE_AGAIN_S", 0.01)
    tried, room = asyncio.Event(), threading.Event()
    write = module._write

    def full(path: Path, record: Any, **how: Any) -> None:
        if isinstance(record, Batch) and record.status != "validating" and not room.is_set():
            if record.status == "failed":
                tried.set()
            raise OSError(28, "No space left on device")
        write(path, record, **how)

    monkeypatch.setattr(module, "_write", full)
    batch = folder.batch("a")
    folder.server()
    async with asyncio.timeout(WAIT_S):
        await tried.wait()
    assert folder.store.batch(batch.id).status == "validating"
    room.set()
    found = await folder.until(batch, lambda batch: batch.ended)
    assert found.status == "failed" and "No space left" in found.errors[0]["message"]


async def test_a_batch_whose_output_is_damaged_fails(folder: Folder) -> None:
    batch = folder.batch("a")
    folder.store.contents(batch.output).write_text("damaged\n")
    folder.server()
    found = await folder.until(batch, lambda batch: batch.ended)
    assert found.status == "failed" and "is not the output of a batch" in found.errors[0]["message"]


async def test_answers_after_stop_do_not_count(folder: Folder) -> None:
    batch = folder.batch("a")
    server, worker = folder.server()
    await server.until(1)
    worker.stop()
    server.held["a"].set_result(None)  # the answer of a server that shuts down, which may be an error
    second, _ = folder.server()
    await second.until(1)
    second.held["a"].set_result(None)
    assert (await folder.until(batch, lambda batch: batch.ended)).completed == 1


async def test_a_line_that_ended_three_servers_gets_an_error_and_lines_sent_with_it_do_not(folder: Folder) -> None:
    batch = folder.batch("deadly", "with it", "after")
    for _ in range(2):
        server, worker = folder.server()
        await server.until(2)
        assert server.seen == ["deadly", "with it"]
        folder.kill(worker)
    queued = asyncio.Event()

    class Noted(asyncio.Lock):
        async def acquire(self) -> Any:
            if self.locked():
                queued.set()
            return await super().acquire()

    server, worker = folder.server()
    worker.last_attempt = Noted()
    await server.until(1)
    async with asyncio.timeout(WAIT_S):
        await queued.wait()
    assert server.seen == ["deadly"], "one of the lines that may have ended both"
    folder.kill(worker)
    server, _ = folder.server()
    await answer_all(server, 2)
    found = await folder.until(batch, lambda batch: batch.ended)
    assert (found.status, found.completed, found.failed) == ("completed", 2, 1)
    output = folder.output(batch)
    assert sorted(server.seen) == ["after", "with it"] and output["with it"] is output["after"] is None
    assert output["deadly"]["code"] == "server_error"
    assert "3 API servers ended while they answered it" in output["deadly"]["message"]
    assert not [path for path in folder.store.folder.rglob("*") if path.suffix == ".sends"]


async def test_a_server_that_shuts_down_is_not_ended_by_its_lines(folder: Folder) -> None:
    batch = folder.batch("a", "b")
    for _ in range(4):
        server, worker = folder.server()
        await server.until(2)
        worker.stop()
        server.held["b"].set_result(None)
    server, _ = folder.server()
    await server.until(2)
    await answer_all(server, 2)
    assert (await folder.until(batch, lambda batch: batch.ended)).completed == 2
