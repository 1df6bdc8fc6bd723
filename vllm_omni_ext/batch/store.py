"""The files and batches of `/v1/files` and `/v1/batches`, as plain files of a folder that all API servers share.

    files/ID.jsonl      a file's contents; a batch appends to the files of its output while it runs
    files/ID.json       the file's `FileRecord`; a file without it is not listed
    batches/ID.json     a `Batch`; written by its creator, and then by the API server that runs the batches only
    batches/ID.cancel   the time at which the batch was cancelled
    batches/ID.sends    the lines that API servers have begun (`Sends`); removed when the batch has ended
    lock                locked by the API server that runs the batches
    wake                a named pipe, read by that API server; the others write to it after a change of the batches

Lines are appended to the files of an output and to ID.sends. All other files are replaced as a whole (`files.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import msgspec

from vllm_omni_ext.batch.files import remove_abandoned, replaced
from vllm_omni_ext.batch.lines import Done, Line, Result, read_done, read_lines
from vllm_omni_ext.batch.sends import Sends

log = logging.getLogger(__name__)

INPUT, OUTPUT = "batch", "batch_output"
"""Values of a file's `purpose`."""

MOST_LINES = 50_000
"""Most lines of a batch, as in OpenAI's API."""

MOST_FILES = 10_000
MOST_UNFINISHED = 100
"""Most batches that have not ended."""

MOST_BATCHES = 10_000
"""Number of batches above which the records of the oldest ended ones are deleted. Their input and output files stay."""

MIB = 1 << 20

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})

NEXT: dict[str, frozenset[str]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling", "expired"}),
    "finalizing": frozenset({"completed", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
}
"""Allowed next statuses of a batch, by status. A status in `ENDED` does not change."""

DAMAGED = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors of reading a record that is not the JSON of its type, e.g. an empty file after a power failure."""

_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")


class NotFound(LookupError):
    """No file or batch has this id."""


class Full(Exception):
    """A limit of the folder is reached.

    Args:
        many: the limit is one of the number of files or batches; False: of their bytes.
    """

    def __init__(self, message: str, *, many: bool = False) -> None:
        super().__init__(message)
        self.many = many


class InUse(Exception):
    """The file cannot be deleted, as it is the input of a batch that has not ended."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file, without its contents. `created_at` is Unix time in seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def as_object(self) -> dict[str, Any]:
        """Return the file's object in the format of OpenAI's API."""
        return {"object": "file", "status": "processed", **msgspec.to_builtins(self)}


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a batch.

    Attributes:
        created_at, expires_at: Unix time in seconds.
        at: Unix time in seconds at which the batch got a status, by status.
        output, failures: ids of the files with the answers, and with the errors. `/v1/files` lists them when the batch
            has ended, unless they are empty.
        total, completed, failed: numbers of lines; 0 until the input is read.
        errors: why the batch has failed, as OpenAI's `errors.data`.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    at: dict[str, int] = {}
    output: str
    failures: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []

    def to(self, status: Status, **changes: Any) -> Batch:
        """Return a copy of the record with another status and `changes`; AssertionError if `NEXT` does not allow it."""
        assert status in NEXT.get(self.status, ()), f"{status} does not follow {self.status}"
        return msgspec.structs.replace(self, status=status, at={**self.at, status: int(time.time())}, **changes)

    @property
    def ended(self) -> bool:
        """Whether the batch has ended."""
        return self.status in ENDED


class Store:
    """Reads and writes the folder of files and batches. All methods block, for the time of a few file operations.

    Args:
        folder: created if it does not exist; only its user can read it.
        most: limit of the bytes of all files.
        most_lines: limit of the lines of a batch.
    """

    def __init__(self, folder: Path, *, most: int, most_lines: int = MOST_LINES) -> None:
        self.folder = folder
        self.most_lines = most_lines
        self._most = most
        self._logged: set[str] = set()
        self._files, self._batches = folder / "files", folder / "batches"
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder, self._files, self._batches):
            path.mkdir(mode=0o700, exist_ok=True)
            remove_abandoned(path)

    # -- files --------------------------------------------------------------------------------------------------

    def add_file(self, name: str, size: int, source: IO[bytes]) -> FileRecord:
        """Copy an uploaded file into the folder, and return its record.

        Args:
            name: the client's name of the file.
            size: number of bytes of the file.

        Raises:
            Full: the folder has too many bytes or files.
        """
        if sum(1 for _ in self._files.glob("*.json")) >= MOST_FILES:
            raise Full(f"this server keeps {MOST_FILES} files; delete some", many=True)
        file_id = _new_id("file")
        with replaced(self.contents(file_id)) as file:
            file.truncate(size)  # counted by simultaneous calls in all API servers
            self.check_room(size)
            shutil.copyfileobj(source, file, MIB)
        try:
            return self._list(file_id, name, INPUT)
        except BaseException:
            self.contents(file_id).unlink(missing_ok=True)  # no client can delete a file that is not listed
            raise

    def _list(self, file_id: str, name: str, purpose: str) -> FileRecord:
        record = FileRecord(
            id=file_id,
            bytes=self.contents(file_id).stat().st_size,
            created_at=int(time.time()),
            filename=name,
            purpose=purpose,
        )
        _write(self._files / f"{file_id}.json", record)
        return record

    def check_room(self, new: int = 0) -> None:
        """Raise Full if the bytes of the folder's files exceed the limit.

        Args:
            new: bytes of the file that is being added, for the error text.
        """
        used = 0
        for entry in os.scandir(self._files):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                used += entry.stat().st_size
        if used > self._most:
            limit, others = f"{self._most // MIB} MiB (limits.max_batch_files_mib)", (used - new) / MIB
            raise Full(f"the files of batches may have {limit} together, and have {others:.0f} MiB; delete some")

    def contents(self, file_id: str) -> Path:
        """Return the path of a file's contents; the file need not exist."""
        return self._files / f"{file_id}.jsonl"

    def file(self, file_id: str) -> FileRecord:
        """Return a file's record; NotFound if no file has this id, or its record is damaged."""
        return self._read(self._files, file_id, FileRecord)

    def open(self, file_id: str) -> tuple[FileRecord, IO[bytes]]:
        """Return a file's record, and its contents, which the caller closes; NotFound if no file has this id."""
        record = self.file(file_id)
        try:
            return record, self.contents(file_id).open("rb")
        except FileNotFoundError:  # deleted meanwhile
            raise NotFound(file_id) from None

    def files(self) -> list[FileRecord]:
        """Return the records of all files, the oldest first, without damaged ones."""
        return self._all(self._files, FileRecord)

    def delete_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFound: no file has this id.
            InUse: the file is the input of a batch that has not ended.
        """
        self.file(file_id)
        for batch in self.batches():
            if not batch.ended and batch.input_file_id == file_id:
                raise InUse(f"{file_id}: {batch.id} has not ended; cancel it")
        self.contents(file_id).unlink(missing_ok=True)  # first: without its record, it could not be deleted again
        (self._files / f"{file_id}.json").unlink(missing_ok=True)

    # -- batches ------------------------------------------------------------------------------------------------

    def add_batch(self, *, endpoint: str, input_file_id: str, window: str, seconds: int, metadata: Any) -> Batch:
        """Create a batch, and return its record.

        Args:
            window: the request's `completion_window`, e.g. "24h".
            seconds: duration of `window`, after which the batch expires.

        Raises:
            NotFound: no file has the id `input_file_id`.
            Full: too many batches have not ended, or the files have too many bytes.
        """
        self.file(input_file_id)
        self.check_room()
        batches = self.batches()
        if sum(not batch.ended for batch in batches) >= MOST_UNFINISHED:
            raise Full(f"{MOST_UNFINISHED} batches have not ended; wait, or cancel one", many=True)
        for old in [batch for batch in batches if batch.ended][: max(0, len(batches) - MOST_BATCHES + 1)]:
            for suffix in ("json", "cancel"):
                (self._batches / f"{old.id}.{suffix}").unlink(missing_ok=True)
        now = int(time.time())
        batch = Batch(
            id=_new_id("batch"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds,
            metadata=metadata,
            output=_new_id("file"),
            failures=_new_id("file"),
        )
        self.save(batch)
        return batch

    def batch(self, batch_id: str) -> Batch:
        """Return a batch's record; NotFound if no batch has this id, or its record is damaged."""
        return self._read(self._batches, batch_id, Batch)

    def batches(self) -> list[Batch]:
        """Return the records of all batches, the oldest first, without damaged ones."""
        return self._all(self._batches, Batch)

    def save(self, batch: Batch, *, synced: bool = True) -> None:
        """Write a batch's record to its file; `synced`: see `files.replaced`."""
        _write(self._batches / f"{batch.id}.json", batch, synced=synced)
        if batch.ended:
            self._sends(batch).unlink(missing_ok=True)

    def _all(self, folder: Path, kind: type[Any]) -> list[Any]:
        found = []
        for name in sorted(path.stem for path in folder.glob("*.json")):
            with contextlib.suppress(NotFound):  # deleted meanwhile, or damaged
                found.append(self._read(folder, name, kind))
        return found

    def _read(self, folder: Path, name: str, kind: type[Any]) -> Any:
        """Return a record; NotFound if there is none. A damaged record is logged once, and counts as none."""
        path = folder / f"{name}.json"
        try:
            if _ID.fullmatch(name):
                return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            pass
        except DAMAGED as err:
            if name not in self._logged:
                log.error("%s: the record is damaged, and is left out: %s", path, err)
            self._logged.add(name)
        raise NotFound(name)

    def _sends(self, batch: Batch) -> Path:
        return self._batches / f"{batch.id}.sends"

    def cancel(self, batch_id: str) -> None:
        """Mark a batch as cancelled, unless it has ended. The API server that runs the batches then ends it."""
        if not self.batch(batch_id).ended:
            _write(self._batches / f"{batch_id}.cancel", int(time.time()))

    def cancelled(self, batch_id: str) -> int | None:
        """Return the Unix time at which a batch was cancelled; None if it was not."""
        path = self._batches / f"{batch_id}.cancel"
        try:
            return msgspec.json.decode(path.read_bytes(), type=int)
        except FileNotFoundError:
            return None
        except DAMAGED:  # damaged, but its existence is enough
            return int(path.stat().st_mtime)

    def as_object(self, batch: Batch) -> dict[str, Any]:
        """Return the batch's object in the format of OpenAI's API."""
        fields = msgspec.to_builtins(batch)
        for name in ("at", "output", "failures", "total", "completed", "failed", "errors"):
            del fields[name]
        times = {f"{status}_at": batch.at.get(status) for status in (*NEXT, *sorted(ENDED)) if status != "validating"}
        when = self.cancelled(batch.id)
        if when is not None:
            times["cancelling_at"] = when
            if batch.status in ("validating", "in_progress"):
                fields["status"] = "cancelling"
        return {
            "object": "batch",
            **fields,
            **times,
            "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
            "output_file_id": self._listed(batch.output),
            "error_file_id": self._listed(batch.failures),
            "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        }

    def _listed(self, file_id: str) -> str | None:
        return file_id if (self._files / f"{file_id}.json").exists() else None

    # -- for the API server that runs batches -------------------------------------------------------------------

    def lines(self, batch: Batch) -> Iterator[Line]:
        """Yield the lines of a batch's input."""
        with self.contents(batch.input_file_id).open("rb") as file:
            yield from read_lines(file, endpoint=batch.endpoint)

    def done(self, batch: Batch) -> tuple[Done, Done]:
        """Return which lines of a batch's input have a result: (those with an answer, those with an error).

        An incomplete last line is removed from the file of the answers, and from the file of the errors.

        Raises:
            ConfigError: a complete line of a file is not one of a batch's output.
        """
        found = []
        for path in map(self.contents, (batch.output, batch.failures)):
            done = read_done(path)
            if path.exists():
                os.truncate(path, done.size)
            found.append(done)
        return found[0], found[1]

    def sends(self, batch: Batch, done: tuple[Done, Done]) -> Sends:
        """Return the record of the lines that were sent.

        Args:
            done: the lines that have a result, from the method `done`.
        """
        return Sends(self._sends(batch), done[0].ids | done[1].ids)

    def writer(self, batch: Batch) -> Callable[[Result], None]:
        """Return a function that appends a result to the batch's file of answers or of errors."""
        paths = {True: self.contents(batch.output), False: self.contents(batch.failures)}

        def write(result: Result) -> None:
            with paths[result.answered].open("ab") as file:
                file.write(result.encoded())

        return write

    def list_output(self, batch: Batch) -> None:
        """Write the `FileRecord`s of a batch's output files, so that `/v1/files` lists the files that exist.

        A second call changes nothing.
        """
        self.done(batch)
        for file_id, kind in ((batch.output, "output"), (batch.failures, "error")):
            if self.contents(file_id).exists() and self._listed(file_id) is None:
                self._list(file_id, f"{batch.id}_{kind}.jsonl", OUTPUT)


def _new_id(kind: str) -> str:
    """Return a new id. Ids of one kind are in the order of their creation."""
    return f"{kind}-{time.time_ns():016x}{secrets.token_hex(8)}"


def is_id(text: str, kind: str) -> bool:
    """Return whether a text is the id of a "file" or of a "batch", which need not exist."""
    return text.startswith(f"{kind}-") and _ID.fullmatch(text) is not None


def _write(path: Path, record: Any, *, synced: bool = True) -> None:
    with replaced(path, synced=synced) as file:
        file.write(msgspec.json.encode(record))
