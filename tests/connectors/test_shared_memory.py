"""Shared memory: no file for a chunk, nothing left after SIGKILL of both ends, and read-only for consumers."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from vllm_omni_ext.connectors.base import ConnectorConfig, ProducerLost
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, child, consume, empty, eventually, key, produce
from vllm_omni_ext.connectors.messages import Welcome
from vllm_omni_ext.connectors.shared_memory import SharedConsumer, SharedMemory, SharedProducer, _map

CONFIG = ConnectorConfig(name="shared_memory")


def files() -> set[str]:
    """Return everything where shared memory, locks and sockets could be, except Python's own `psm_`."""
    folders = ("/dev/shm", tempfile.gettempdir(), os.getcwd())
    found = (entry for folder in folders for entry in Path(folder).glob("*"))
    return {str(entry) for entry in found if not entry.name.startswith("psm_")}


def open_in(pid: int) -> tuple[set[str], set[str]]:
    """Return files in those folders that a process has open or mapped, and its names in the abstract namespace."""
    maps = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    in_folders = {name for name in maps | links if name.startswith(("/dev/shm/", tempfile.gettempdir()))}
    return in_folders, {name for name, link in sockets().items() if link in links}


def sockets() -> dict[str, str]:
    """Return our names in the abstract namespace, and the link of a process that has the socket open."""
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@omni-" in line)
    return {name: f"socket:[{inode}]" for *_, inode, name in lines}


@pytest.fixture(autouse=True)
def private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs and the server that forks the tests' processes have files in the temporary folder."""
    with child(consume, CONFIG):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def ends() -> Iterator[tuple[SharedProducer, SharedConsumer]]:
    made = SharedMemory(CONFIG)
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        yield producer, consumer


def test_no_chunk_makes_a_file_or_a_descriptor(
    ends: tuple[SharedProducer, SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ends
    producer.put(key("first"), [b"x"])
    consumer.open("first", producer.address)
    consumer.get(key("first"))
    before, descriptors, made = files(), len(os.listdir("/proc/self/fd")), []
    with monkeypatch.context() as spied:
        for name in ("open", "memfd_create", "mkdir", "dup"):
            spied.setattr(os, name, lambda *args, name=name, **kwargs: made.append((name, args)))
        spied.setattr("mmap.mmap", lambda *args, **kwargs: made.append(("mmap", args)))
        consumer.open("a", producer.address)
        for index in range(100):
            producer.put(key("a", index), [torch.full((64,), index)])
            assert consumer.get(key("a", index)).parts[0][0] == index
    assert made == []
    assert files() == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_nothing_is_left_when_both_ends_are_killed() -> None:
    before = files()
    with child(produce, CONFIG) as writer, child(consume, CONFIG) as reader:
        source = writer.receive()
        reader.pipe.send(("a", source, 5))
        writer.pipe.send(("a", 5, 10_000))
        reader.receive()
        in_folders, made = open_in(writer.process.pid)
        assert made and in_folders == open_in(reader.process.pid)[0] == set()
        writer.kill()
        reader.kill()
    assert files() == before
    eventually(lambda: not made & set(sockets()), "the name of a killed producer is still taken")


def test_chunks_that_have_arrived_can_be_read_after_the_producers_death() -> None:
    with child(produce, CONFIG) as writer, SharedMemory(CONFIG).consumer(EDGE) as consumer:
        source = writer.receive()
        consumer.open("a", source)
        writer.pipe.send(("a", 2, 10))
        consumer.get(key("a", 1), PATIENCE_S)
        writer.kill()
        eventually(lambda: consumer.stats().links == 0, "the death was not noticed")
        assert torch.equal(consumer.get(key("a", 0)).parts[0], torch.zeros(10, 64))
        consumer.open("a", source)
        with pytest.raises(ProducerLost):
            consumer.get(key("a", 2), PATIENCE_S)


def test_memory_that_is_being_read_is_not_used_again(ends: tuple[SharedProducer, SharedConsumer]) -> None:
    producer, consumer = ends
    producer.put(key("a"), [torch.ones(100)])
    consumer.open("a", producer.address)
    reading, go_on, fetch = threading.Event(), threading.Event(), consumer._fetch

    def slowly(*args):
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return fetch(*args)

    consumer._fetch = slowly
    got = []
    thread = threading.Thread(target=lambda: got.append(consumer.get(key("a")).parts[0]))
    thread.start()
    assert reading.wait(PATIENCE_S)
    producer.forget("a")
    producer.put(key("b"), [torch.zeros(100)])
    time.sleep(0.2)
    go_on.set()
    thread.join()
    assert torch.equal(got[0], torch.ones(100))
    producer.forget("b")
    eventually(lambda: producer.stats().held_bytes == 0, "the reader's end was not noticed")


def test_a_stopped_reader_holds_memory_and_a_killed_one_does_not() -> None:
    with SharedMemory(CONFIG).producer(EDGE) as producer, child(consume, CONFIG) as reader:
        producer.put(key("a"), [torch.ones(100)], last=True)
        reader.pipe.send(("a", producer.address, 1))
        reader.receive()
        process = psutil.Process(reader.process.pid)
        process.suspend()
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it goes on")
        producer.forget("a")
        time.sleep(0.3)
        assert producer.stats().held_bytes > 0, "a reader that is only stopped may go on"
        reader.kill()
        eventually(lambda: empty(producer), "a dead reader holds memory")


def test_a_consumer_cannot_write(ends: tuple[SharedProducer, SharedConsumer]) -> None:
    welcome = ends[0]._welcome()
    assert isinstance(welcome, Welcome)
    assert _map(welcome.memory, welcome.size).readonly
    with socket.socket(socket.AF_UNIX) as counter:
        counter.connect(f"\0{welcome.memory}")
        _, (descriptor,), _, _ = socket.recv_fds(counter, 1, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, welcome.size)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_another_user_does_not_receive_the_memory(
    ends: tuple[SharedProducer, SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ends
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    consumer.open("a", producer.address)
    with pytest.raises(ProducerLost, match="same user"):
        consumer.get(key("a"), PATIENCE_S)
    eventually(lambda: producer.stats().dropped == 1, "it was not counted")
