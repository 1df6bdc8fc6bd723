"""Shared memory: no file for a chunk, nothing left after SIGKILL of both ends, and read-only for consumers."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_ext.connectors import shared_memory
from vllm_omni_ext.connectors.base import ConnectorConfig, Forgotten, ProducerLost
from vllm_omni_ext.connectors.conformance import EDGE, PATIENCE_S, Child, consume, eventually, produce
from vllm_omni_ext.connectors.shared_memory import SharedConsumer, SharedMemory, SharedProducer, memory_socket
from vllm_omni_ext.connectors.zmq_transport import parse

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
    with Child(consume, CONFIG):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def ends() -> Iterator[tuple[SharedProducer, SharedConsumer]]:
    made = SharedMemory(CONFIG)
    with made.producer(EDGE) as producer, made.consumer(EDGE) as consumer:
        yield producer, consumer


@pytest.mark.slow
def test_no_chunk_makes_a_file_or_a_descriptor(
    ends: tuple[SharedProducer, SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ends
    producer.put("first", 0, torch.ones(1))
    consumer.get(producer.address, "first", 0, PATIENCE_S)
    before, descriptors, made = files(), len(os.listdir("/proc/self/fd")), []
    with monkeypatch.context() as spied:
        for name in ("open", "memfd_create", "mkdir", "dup"):
            spied.setattr(os, name, lambda *args, name=name, **kwargs: made.append((name, args)))
        spied.setattr("mmap.mmap", lambda *args, **kwargs: made.append(("mmap", args)))
        for index in range(100):
            producer.put("a", index, torch.full((64,), index))
            assert consumer.get(producer.address, "a", index, PATIENCE_S)[0] == index
    assert made == []
    assert files() == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.slow
def test_nothing_is_left_when_both_ends_are_killed() -> None:
    before = files()
    with Child(produce, CONFIG) as writer, Child(consume, CONFIG) as reader:
        source = writer.receive()
        writer.pipe.send(("a", 5, 10_000))
        writer.receive()
        reader.pipe.send(("a", source, 5))
        reader.receive()
        in_folders, made = open_in(writer.process.pid)
        assert made and in_folders == open_in(reader.process.pid)[0] == set()
        writer.kill()
        reader.kill()
    assert files() == before
    eventually(lambda: not made & set(sockets()), "the name of a killed producer is still taken")


@pytest.mark.slow
def test_a_chunk_whose_memory_is_used_again_while_it_is_read_is_forgotten(
    ends: tuple[SharedProducer, SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ends
    producer.put("a", 0, torch.ones(100))
    copy = shared_memory.copy_bytes

    def late(target: Any, source: Any) -> None:
        monkeypatch.setattr(shared_memory, "copy_bytes", copy)
        producer.forget("a")
        producer.put("b", 0, torch.zeros(100))
        copy(target, source)

    monkeypatch.setattr(shared_memory, "copy_bytes", late)
    with pytest.raises(Forgotten):
        consumer.get(producer.address, "a", 0, PATIENCE_S)
    assert torch.equal(consumer.get(producer.address, "b", 0, PATIENCE_S), torch.zeros(100))


def test_a_consumer_cannot_write(ends: tuple[SharedProducer, SharedConsumer]) -> None:
    producer, consumer = ends
    producer.put("a", 0, torch.ones(100))
    consumer.get(producer.address, "a", 0, PATIENCE_S)
    assert consumer._links[producer.address].memory.readonly
    with socket.socket(socket.AF_UNIX) as counter:
        counter.connect(memory_socket(parse(producer.address)[0]))
        _, (descriptor,), _, _ = socket.recv_fds(counter, 1, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, CONFIG.capacity_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_another_user_does_not_receive_the_memory(
    ends: tuple[SharedProducer, SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = ends
    producer.put("a", 0, torch.ones(100))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ProducerLost, match="same user"):
        consumer.get(producer.address, "a", 0, PATIENCE_S)
    eventually(lambda: producer.stats().dropped == 1, "it was not counted")
