"""The folder of files and batches."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, get_args

import openai.types
import pytest

from vllm_omni_ext.batch import store as module
from vllm_omni_ext.batch.files import replaced
from vllm_omni_ext.batch.lines import answer
from vllm_omni_ext.batch.store import ENDED, MIB, NEXT, Batch, Full, InUse, NotFound, Status, Store

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "batches", most=MIB)


def upload(store: Store, data: bytes = b"{}\n") -> str:
    return store.add_file("in.jsonl", len(data), io.BytesIO(data)).id


def create(store: Store, file_id: str | None = None, **fields: Any) -> Batch:
    given = {"endpoint": CHAT, "window": "24h", "seconds": 86_400, "metadata": None, **fields}
    return store.add_batch(input_file_id=file_id or upload(store), **given)


def ended(store: Store, batch: Batch) -> Batch:
    batch = batch.to("in_progress", total=1).to("finalizing").to("completed")
    store.save(batch)
    return batch


def test_a_file_is_kept_listed_and_deleted(store: Store) -> None:
    ids = [upload(store, b"a\n"), upload(store, b"bb\n")]
    again = Store(store.folder, most=MIB)
    assert [(file.id, file.bytes, file.purpose) for file in again.files()] == [
        (ids[0], 2, "batch"),
        (ids[1], 3, "batch"),
    ]
    assert again.contents(ids[1]).read_bytes() == b"bb\n"
    openai.types.FileObject.model_validate(again.file(ids[0]).as_object(), strict=True)
    again.delete_file(ids[0])
    assert [file.id for file in store.files()] == ids[1:]
    for gone in (ids[0], "batch-" + "0" * 32, "file-../../x", "../x", ""):
        with pytest.raises(NotFound):
            store.file(gone)
    assert len(list(store.folder.rglob("*.*"))) == 2, "no other file is left"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"id": "\xff"}'])
def test_a_damaged_record_is_left_out_and_logged_once(
    store: Store, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    batch = create(store)
    store.cancel(batch.id)
    for name in ("files/file", "batches/batch"):
        (store.folder / f"{name}-{'0' * 32}.json").write_bytes(data)
    (store.folder / f"batches/{batch.id}.cancel").write_bytes(data)
    for _ in range(2):
        assert [found.id for found in store.batches()] == [batch.id]
        assert [found.id for found in store.files()] == [batch.input_file_id]
        assert store.as_object(batch)["cancelling_at"] >= batch.created_at
        for read, name in ((store.file, "file"), (store.batch, "batch")):
            with pytest.raises(NotFound):
                read(f"{name}-{'0' * 32}")
    assert [record.getMessage().count("0.json: the record is damaged") for record in caplog.records] == [1, 1]


def test_contents_without_a_record_do_not_stay(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".jsonl":
            raise OSError("input/output error")
        os.unlink(path)

    file_id = upload(store)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", fail)
        with pytest.raises(OSError, match="no space"):
            upload(store)
    assert len(list(store.folder.rglob("*.*"))) == 2, "only those of the first file"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(OSError, match="input/output"):
            store.delete_file(file_id)
    store.delete_file(file_id)
    assert not list(store.folder.rglob("*.*")), "a file whose contents could not be deleted can be deleted later"


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(number: int) -> None:
        found.append((path.read_bytes(), os.fstat(number).st_size))

    found: list[tuple[bytes, int]] = []
    path = tmp_path / "record"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fsync)
    for synced in (True, False):
        with replaced(path, synced=synced) as file:
            file.write(b"newer")
    assert found == [(b"old", 5)] and path.read_bytes() == b"newer"


def test_limits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(store, bytes(MIB - 1000))
    with pytest.raises(Full, match=r"1 MiB \(limits.max_batch_files_mib\)"):
        upload(store, bytes(1000))
    monkeypatch.setattr(module, "MOST_FILES", 2)
    monkeypatch.setattr(module, "MOST_UNFINISHED", 2)
    file_id = upload(store)
    with pytest.raises(Full, match="keeps 2 files") as full:
        upload(store)
    assert full.value.many
    batches = [create(store, file_id) for _ in range(2)]
    with pytest.raises(Full, match="2 batches have not ended"):
        create(store, file_id)
    ended(store, batches[0])
    create(store, file_id)
    with store.contents(file_id).open("ab") as file:
        file.write(bytes(1000))
    with pytest.raises(Full, match="max_batch_files_mib"):
        create(store, file_id)


def test_files_that_are_uploaded_together_stay_within_the_limit(store: Store) -> None:
    class Slow(io.BytesIO):
        """An upload during which another one begins and ends."""

        def read(self, size: int | None = -1) -> bytes:
            if not refused:
                with pytest.raises(Full, match=r"have 1 MiB"):
                    refused.append(True)
                    upload(store, bytes(600_000))
            return super().read(size)

    refused: list[bool] = []
    store.add_file("in.jsonl", 600_000, Slow(bytes(600_000)))
    assert refused and [file.bytes for file in store.files()] == [600_000]
    assert len(list(store.folder.rglob("*.*"))) == 2, "no other file is left"


def test_a_new_store_removes_the_files_of_killed_processes_and_no_others(store: Store) -> None:
    """A store is opened during an upload. A copy of the upload's file, without lock, is that of a killed process."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            (own,) = store.folder.rglob("*.new")
            for name in ("files/file-1.jsonl.0.new", "files/file-1.json.0.new", "batches/batch-1.json.0.new"):
                shutil.copy(own, store.folder / name)
            with pytest.raises(Full):
                upload(store, bytes(MIB // 3))
            Store(store.folder, most=MIB)
            assert list(store.folder.rglob("*.new")) == [own]
            return super().read(size)

    store.add_file("in.jsonl", MIB // 3, Slow(bytes(MIB // 3)))
    upload(store, bytes(MIB // 3))
    assert [file.bytes for file in store.files()] == [MIB // 3] * 2
    assert not list(store.folder.rglob("*.new"))


def test_the_oldest_batches_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BATCHES", 3)
    first, running = create(store), create(store)
    ended(store, first)
    others = [ended(store, create(store)) for _ in range(3)]
    assert [batch.id for batch in store.batches()] == [running.id, others[1].id, others[2].id]


def test_a_file_that_a_batch_needs_is_not_deleted(store: Store) -> None:
    batch = create(store)
    with pytest.raises(InUse, match=batch.id):
        store.delete_file(batch.input_file_id)
    ended(store, batch)
    store.delete_file(batch.input_file_id)


def test_a_batch_has_openais_fields_in_every_state(store: Store) -> None:
    assert NEXT.keys() | ENDED == set(get_args(Status.__value__ if hasattr(Status, "__value__") else Status))
    assert set().union(*NEXT.values()) == (NEXT.keys() | ENDED) - {"validating"}
    batch = create(store, metadata={"k": "v"})
    with pytest.raises(AssertionError):
        batch.to("completed")
    for status in ("in_progress", "finalizing", "completed"):
        batch = batch.to(status)
        store.save(batch)
        found = openai.types.Batch.model_validate(store.as_object(store.batch(batch.id)), strict=True)
        assert (found.status, found.metadata, found.output_file_id) == (status, {"k": "v"}, None)
    assert not found.model_extra
    assert found.completed_at and found.in_progress_at and found.expires_at == found.created_at + 86_400
    assert found.failed_at is found.cancelled_at is None


def test_a_cancelled_batch_is_cancelling_until_it_has_ended(store: Store) -> None:
    batch = create(store)
    store.cancel(batch.id)
    assert store.as_object(batch)["status"] == "cancelling" and store.as_object(batch)["cancelling_at"]
    done = create(store)
    store.cancel(ended(store, done).id)
    assert store.as_object(store.batch(done.id))["status"] == "completed"
    with pytest.raises(NotFound):
        store.cancel("batch-" + "0" * 32)


def test_output_is_listed_once_it_is_complete(store: Store) -> None:
    batch = create(store)
    write = store.writer(batch)
    write(answer("a", "r", 200, "application/json", b"{}"))
    with store.contents(batch.output).open("ab") as file:
        file.write(b'{"custom_id": "b"')
    assert [file.purpose for file in store.files()] == ["batch"]
    answered, failed = store.done(batch)
    assert (answered.ids, answered.count, failed.count) == ({"a"}, 1, 0)
    write(answer("b", "r", 500, "text/plain", b"x"))
    for _ in range(2):
        store.list_output(batch)
        found = store.as_object(batch)
        assert [store.file(found[name]).bytes for name in ("output_file_id", "error_file_id")] == [
            store.contents(file_id).stat().st_size for file_id in (batch.output, batch.failures)
        ]
        assert len(store.files()) == 3
    assert store.contents(batch.output).read_bytes().count(b"\n") == 1
