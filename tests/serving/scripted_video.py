"""A video loader that follows its data; a module of its own, so that a new process imports little for it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from vllm.multimodal.video import VideoLoader

from tests.support.descriptors import open_files

MEMORY_BYTES = 1 << 30
"""The memory limit of a call; the script `memory` takes twice as much."""


class Scripted(VideoLoader):
    """Follows its data."""

    @classmethod
    def load_bytes(cls, data: bytes, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        match data[:8].split()[0]:
            case b"crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case b"hang":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
                while True:
                    signal.pause()
            case b"memory":
                np.ones(2 * MEMORY_BYTES, np.uint8)
            case b"raise":
                raise AssertionError("that is no video")
            case b"silent":
                raise AssertionError
            case b"nothing":
                return np.empty((0, 4, 4, 3), np.uint8), {}
        about = {"options": options, "bytes": len(data), "pid": os.getpid(), "files": open_files()}
        return np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)[::-1], about | {"fps": np.float64(2.5)}
