"""A process of Mooncake's engine whose registered memory is a file that the writer maps too."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"


def transfer_engine() -> Any:
    """A new engine that listens."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, shared with every process that maps it."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def _serve(path: Path, pipe: Connection) -> None:
    memory, engine = mapped(path), transfer_engine()
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    pipe.send((engine.get_rpc_port(), memory.ctypes.data))
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def target(path: Path, size: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield a target process: its session, the address of its memory there, and that memory here, uint8 [size]."""
    with path.open("wb") as file:
        file.truncate(size)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(path, there))
    process.start()
    there.close()
    try:
        port, address = here.recv()
        yield f"{HOST}:{port}", address, mapped(path)
    finally:
        here.close()
        process.join()
