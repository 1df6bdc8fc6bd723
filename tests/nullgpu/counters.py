"""Read the counters that processes under the null device share: the file `NULLGPU_FILE`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

DEVICES = 8

LAYOUT = struct.Struct(f"=i4x{DEVICES}Q{DEVICES}Q6Q")
"""`Counters` in nullgpu.h."""


@dataclass(frozen=True)
class Process:
    """Counters of one process, in bytes and numbers.

    Attributes:
        bytes: memory in use now, by device; contexts are included.
        peak: the most memory that was in use, by device.
        graphs: captures that ended, failed ones included.
        nodes: launches and copies in these captures.
        launches: launches and copies, captured or not; one for each launch of a graph.
        refused: calls that CUDA would refuse during a capture.
        largest: bytes of the largest allocation.
        waits: times that the host waits for its launches.
    """

    pid: int
    bytes: tuple[int, ...]
    peak: tuple[int, ...]
    graphs: int
    nodes: int
    launches: int
    refused: int
    largest: int
    waits: int


def read(path: str | Path) -> list[Process]:
    """Return the processes in the file; none if the file does not exist yet.

    A process that ended is in the file until another process takes its place or reads the memory in use.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    usable = len(content) // LAYOUT.size * LAYOUT.size
    return [_process(values) for values in LAYOUT.iter_unpack(content[:usable]) if values[0]]


def _process(values: tuple[int, ...]) -> Process:
    pid, *numbers = values
    rest = numbers[2 * DEVICES :]
    return Process(pid, tuple(numbers[:DEVICES]), tuple(numbers[DEVICES : 2 * DEVICES]), *rest)
