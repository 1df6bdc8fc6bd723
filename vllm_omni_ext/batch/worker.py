"""Runs the batches of a folder in one of the API servers that share the folder.

When that API server ends, another one gets the folder's lock and continues the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from vllm_omni_ext.batch.lines import Done, Job, Line, Result, expired, given_up, refused
from vllm_omni_ext.batch.running import run
from vllm_omni_ext.batch.sends import MOST_ENDED, Sends
from vllm_omni_ext.batch.store import Batch, Store
from vllm_omni_ext.errors import ConfigError

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 10.0
"""Seconds between attempts to save a failed batch while the folder cannot be written."""

T = TypeVar("T")


@dataclass
class _Run:
    """A batch that is being run. `cancelled` is set when a client has cancelled it."""

    task: asyncio.Task[None] | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """Runs all batches of a folder while it has the folder's lock.

    Args:
        send: sends a line to the server, and returns its line of the output.
        places: number of lines, of all batches together, that are sent simultaneously.
    """

    def __init__(self, store: Store, send: Callable[[Job], Awaitable[Result]], *, places: int) -> None:
        self.store = store
        self.send = send
        self.places = asyncio.Semaphore(places)
        self.last_attempt = asyncio.Lock()
        """Held while a line is sent that `MOST_ENDED` - 1 API servers have not survived.

        Only one such line is sent at a time, so that no other such line gets an error if this API server ends too."""
        self.stopped = False
        self._runs: dict[str, _Run] = {}
        self._lock: int | None = None
        self._pipe: int | None = None

    def start(self) -> None:
        """Start a thread that waits for the folder's lock, after which the batches run in the event loop.

        Must be called in the event loop.
        """
        self._loop = asyncio.get_running_loop()
        lock = os.open(self.store.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)

        def wait() -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and this process ends
                self._loop.call_soon_threadsafe(self._lead, lock)

        threading.Thread(target=wait, name="batch-lock", daemon=True).start()

    def stop(self) -> None:
        """Stop all batches, and release the lock. The API server that gets the lock next continues the batches.

        It sends lines again that are being answered now.
        """
        self.stopped = True
        for each in self._runs.values():
            if each.task is not None:
                each.task.cancel()
        if self._pipe is not None:  # this process has the lock
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = None
        if self._lock is not None:
            lock, self._lock = self._lock, None
            self._released = self._loop.create_task(_release(lock, [each.task for each in self._runs.values()]))

    def wake(self) -> None:
        """Make the API server that has the lock read the folder, after a batch was created or cancelled.

        If no API server has the lock, nothing happens: the next one that gets the lock reads the folder first.
        """
        with contextlib.suppress(OSError):  # no reader, or one that has enough to read already
            pipe = os.open(self.store.folder / "wake", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)

    def _lead(self, lock: int) -> None:
        if self.stopped:
            os.close(lock)
            return
        self._lock, path = lock, self.store.folder / "wake"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing too, so that the pipe has no end when another server has written.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._loop.add_reader(self._pipe, self._woken)
        self._read_folder()

    def _woken(self) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 1 << 16)
        self._read_folder()

    def _read_folder(self) -> None:
        """Start the batches that have not ended and are not running; set `cancelled` of those that are cancelled."""
        for batch in self.store.batches():
            if batch.ended:
                continue
            if batch.id not in self._runs:
                self._runs[batch.id] = started = _Run()
                started.task = self._loop.create_task(self._run(batch, started.cancelled))
            if self.store.cancelled(batch.id) is not None:
                self._runs[batch.id].cancelled.set()

    async def _run(self, batch: Batch, cancelled: asyncio.Event) -> None:
        try:
            ended = await _Progress(self, batch).run(cancelled)
        except Exception as err:  # e.g. the disk is full: the batch fails, and others go on
            log.exception("%s has failed", batch.id)
            ended = await self._fail(batch.id, str(err) or type(err).__name__)
        finally:
            del self._runs[batch.id]
        log.info("%s: %s, %d answers, %d errors", ended.id, ended.status, ended.completed, ended.failed)

    async def _fail(self, batch_id: str, reason: str) -> Batch:
        """Save a batch as failed, after pauses of `SAVE_AGAIN_S` while the folder cannot be written."""
        problem = {"code": "server_error", "message": reason, "param": None, "line": None}
        while True:
            try:
                batch = self.store.batch(batch_id)
                failed = batch if batch.ended else batch.to("failed", errors=[problem])
                with contextlib.suppress(ConfigError):  # the output is damaged, and is not listed
                    self.store.list_output(failed)
                self.store.save(failed)
                return failed
            except OSError as err:
                log.error("%s cannot be saved: %s", batch_id, err)
                await asyncio.sleep(SAVE_AGAIN_S)


async def _release(lock: int, tasks: list[asyncio.Task[None] | None]) -> None:
    """Release the lock after all tasks, which write to the folder, have ended."""
    await asyncio.gather(*filter(None, tasks), return_exceptions=True)
    os.close(lock)


class _Progress:
    """Runs one batch, from the status in its record to its end."""

    def __init__(self, worker: Worker, batch: Batch) -> None:
        self._worker = worker
        self._store = worker.store
        self._batch = batch
        self._append = worker.store.writer(batch)

    def _save(self, batch: Batch, *, synced: bool = True) -> None:
        self._batch = batch
        self._store.save(batch, synced=synced)

    async def run(self, cancelled: asyncio.Event) -> Batch:
        """Run the batch until it has ended, and return its record.

        Args:
            cancelled: set when a client has cancelled the batch.
        """
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            await self._send_lines(cancelled)
        if self._batch.status == "in_progress":
            await _to_its_end(self._expire)
        if not self._batch.ended:
            await self._finish()
        return self._batch

    async def _validate(self) -> None:
        """Count the lines, and set the status to "in_progress", or to "failed" if there are no lines or too many."""
        store, batch = self._store, self._batch
        path, most = store.contents(batch.input_file_id), store.most_lines
        total = await asyncio.to_thread(_count, path, most + 1)
        if 0 < total <= most:
            self._save(batch.to("in_progress", total=total))
            return
        message = "the file has no lines" if not total else f"the file has more than {most} lines"
        code = "empty_file" if not total else "too_many_lines"
        self._save(batch.to("failed", errors=[{"code": code, "message": message, "param": None, "line": None}]))

    async def _send_lines(self, cancelled: asyncio.Event) -> None:
        """Send the lines that have no result yet, and set the status to "finalizing", or to "cancelling".

        If the batch expires before the last result, its status stays "in_progress".
        """
        done = await _to_its_end(partial(self._store.done, self._batch))
        answered, failed = done
        self._save(msgspec.structs.replace(self._batch, completed=answered.count, failed=failed.count))
        if cancelled.is_set():
            self._save(self._batch.to("cancelling"))
            return
        send = partial(self._send, await _to_its_end(partial(self._store.sends, self._batch, done)))
        sending = asyncio.create_task(run(self._left(done), send, self._write, self._worker.places))
        cancel = asyncio.create_task(cancelled.wait())
        try:
            left_s = max(0.0, self._batch.expires_at - time.time())
            await asyncio.wait([sending, cancel], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
                self._save(self._batch.to("finalizing"))
                return
        finally:
            sending.cancel()
            cancel.cancel()
            await asyncio.wait([sending, cancel])
        if cancelled.is_set():
            self._save(self._batch.to("cancelling"))

    async def _send(self, sends: Sends, job: Job) -> Result:
        """Send a line, and return its result.

        The line is not sent, and the result is an error, if `MOST_ENDED` API servers have ended while they answered it.
        """
        ended = sends.ended(job.custom_id)
        if ended >= MOST_ENDED:
            return given_up(job, ended)
        async with self._worker.last_attempt if ended == MOST_ENDED - 1 else contextlib.nullcontext():
            sends.begin(job.custom_id)
            try:
                result = await self._worker.send(job)
                if self._worker.stopped:  # the server that shuts down has ended the request; it is sent again
                    raise asyncio.CancelledError
                return result
            except asyncio.CancelledError:
                sends.withdraw(job.custom_id)
                raise

    def _expire(self) -> None:
        """Write an error for each line that has no result, and set the status to "expired"."""
        for line in self._left(self._store.done(self._batch)):
            self._write(expired(line) if isinstance(line, Job) else refused(line))
        self._store.list_output(self._batch)
        self._save(self._batch.to("expired"))

    def _left(self, done: tuple[Done, Done]) -> Iterator[Line]:
        for line in self._store.lines(self._batch):
            if not any(each.has(line) for each in done):
                yield line

    def _write(self, result: Result) -> None:
        batch = self._batch
        self._append(result)
        counts = {"completed": batch.completed + 1} if result.answered else {"failed": batch.failed + 1}
        # Not synced: in the event loop that would delay live requests at each line.
        self._save(msgspec.structs.replace(batch, **counts), synced=False)

    async def _finish(self) -> None:
        await _to_its_end(partial(self._store.list_output, self._batch))
        self._save(self._batch.to("completed" if self._batch.status == "finalizing" else "cancelled"))


async def _to_its_end(call: Callable[[], T]) -> T:
    """Call a function that writes to the folder, in a thread.

    If the caller's task is cancelled, it still waits until the function has returned, because the folder's lock must
    not be released before.
    """
    calling = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait([calling])
        raise


def _count(path: os.PathLike[str], most: int) -> int:
    """Return the number of lines that are not empty; counting stops at `most`."""
    count = 0
    with open(path, "rb") as file:
        for line in file:
            count += bool(line.strip())
            if count == most:
                break
    return count
