"""A connector whose consumer holds one chunk back until a test releases it.

Its setting `device` names a folder. While the folder has the file `armed`, the next `get` removes the file, opens the
FIFO `reached` for writing, and returns when a writer has opened and closed the FIFO `gate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_omni_ext.connectors.shared_memory import SharedConsumer, SharedMemory

NAME = f"{__name__}:Held"


@dataclass(frozen=True)
class Held(SharedMemory):
    """Shared memory whose consumers hold a chunk back."""

    def consumer(self, edge: str) -> SharedConsumer:
        return _HeldConsumer(edge, self.config)


class _HeldConsumer(SharedConsumer):
    def get(self, source: str, request: str, index: int, timeout_s: float) -> torch.Tensor:
        folder = Path(self._config.device)
        try:
            (folder / "armed").unlink()
        except FileNotFoundError:
            return super().get(source, request, index, timeout_s)
        os.close(os.open(folder / "reached", os.O_WRONLY))
        (folder / "gate").read_bytes()
        return super().get(source, request, index, timeout_s)


@dataclass(frozen=True)
class Gate:
    """The test's side of the connector."""

    folder: Path

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Hold the next chunk back until the block ends."""
        (self.folder / "armed").touch()
        try:
            yield
        finally:
            if not (self.folder / "armed").exists():
                (self.folder / "gate").write_bytes(b"")

    def reached(self) -> None:
        """Wait until a consumer holds a chunk."""
        (self.folder / "reached").read_bytes()


def gate(folder: Path) -> Gate:
    """Create the FIFOs in a folder."""
    folder.mkdir()
    for name in ("reached", "gate"):
        os.mkfifo(folder / name)
    return Gate(folder)
