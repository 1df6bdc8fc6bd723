"""Records (captures) CUDA graphs of functions that work on buffers with fixed addresses.

A replay of a graph runs the kernels of one call with the addresses of that call, without Python. A function can be
recorded if it reads and writes only memory that its owner allocated before and keeps (weights and buffers), if no shape
and no branch depends on a value, and if it draws no random number. Tests check this without a GPU, with a recorder that
repeats operators instead of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from vllm.logger import init_logger

logger = init_logger(__name__)

WARM_UPS = 2
"""Number of calls before the recorded call, in which libraries choose their kernels and allocate their workspaces."""


class Recorder(Protocol):
    """Interface of `CudaGraphs`; a test may pass a recorder that works without a GPU."""

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Call `body` one or more times, record the last call, and return a function that replays the recorded call."""


class CudaGraphs:
    """Records graphs on one device. All graphs share one memory pool, so only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """Warm `body` up and capture it; RuntimeError if `body` does an operation that a graph cannot contain."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                body()
            torch.cuda.synchronize(self._device)
            try:
                # Not torch.cuda.graph(): it collects garbage before each of dozens of graphs.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
            except BaseException:
                self._pool = torch.cuda.graph_pool_handle()  # the allocator may still record into the old one
                raise
        current.wait_stream(self._stream)
        return graph.replay  # type: ignore[no-any-return]


def recorder_for(device: torch.device, *, eager: bool) -> CudaGraphs | None:
    """Return a recorder for a CUDA device; None if `eager` is set or for another device."""
    return None if eager or device.type != "cuda" else CudaGraphs(device)


def buckets(most: int) -> list[int]:
    """Return the batch sizes to record, largest first: powers of two up to the first that holds `most` rows.

    One graph is recorded for each size; `bucket_of` selects a size for a batch.
    """
    return [1 << power for power in range((most - 1).bit_length(), -1, -1)]


def bucket_of(rows: int, sizes: Iterable[int]) -> int | None:
    """Return the smallest of the batch sizes `sizes` that is at least `rows`; None if all are smaller."""
    return min((size for size in sizes if size >= rows), default=None)
