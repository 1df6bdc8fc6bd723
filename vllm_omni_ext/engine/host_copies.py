"""Copies tensors of a device to the host without a wait in the engine's step.

A copy is queued on its own stream, after the work that the step has queued so far, into page-locked memory of a fixed
size. Another thread waits for the end of the copy. `HostCopies` calls the device through an object of type `Streams`.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from vllm_omni_ext.connectors.arena import Arena

PAGE_LOCKED_BYTES = 64 * 1024 * 1024
"""Page-locked memory of a worker: 16,384 hidden states of 2048 values in bfloat16, i.e. two steps of 8,192 tokens."""


class Streams(Protocol):
    """The functions of a device's streams and of page-locked memory."""

    def page_locked(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes of page-locked host memory, uint8 [size]."""

    def mark(self) -> Any:
        """Return an event after all work that this thread has queued on its current stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Queue a copy to the host on the stream of copies, after the event `after`; return the event of its end."""

    def wait(self, event: Any) -> None:
        """Wait for an event, without Python's interpreter lock."""


class CudaStreams:
    """`Streams` of a CUDA device.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def page_locked(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        done = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return done

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


class HostCopy:
    """A tensor whose copy to the host is queued. `tensor` and `free` are called by one thread, not the engine's.

    Attributes:
        shape: shape of the tensor.
        page_locked: the copy is in memory that `free` makes available for other copies.
    """

    def __init__(
        self, copies: HostCopies, source: torch.Tensor, place: int | None, target: torch.Tensor, event: Any
    ) -> None:
        self.shape = source.shape
        self.page_locked = place is not None
        self._copies = copies
        self._source: torch.Tensor | None = source  # its memory is not used again before the copy has ended
        self._place = place
        self._target = target
        self._event = event

    def tensor(self) -> torch.Tensor:
        """Wait for the end of the copy; return the tensor in host memory, valid until `free`."""
        if self._source is not None:
            self._target = self._copies.finish(self._source, self._place, self._target, self._event)
            self._source = None
        return self._target

    def free(self) -> None:
        """Free the page-locked memory of the copy. Called once, after `tensor`."""
        if self._place is not None:
            self._copies.free(self._place)


class HostCopies:
    """Copies tensors to the host through page-locked memory of a fixed size.

    A tensor for which there is no room stays on the device until the thread that needs it copies it to other memory.

    Args:
        streams: functions of the device; None: tensors are in host memory already, and nothing is copied.
        capacity: bytes of page-locked memory, allocated at once.
    """

    def __init__(self, streams: Streams | None, capacity: int = PAGE_LOCKED_BYTES) -> None:
        self._streams = streams
        self._arena = Arena(0 if streams is None else capacity)
        self._memory = torch.empty(0, dtype=torch.uint8) if streams is None else streams.page_locked(capacity)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of page-locked memory with copies that were not freed."""
        return self._arena.used_bytes

    def begin(self, source: torch.Tensor) -> HostCopy:
        """Queue the copy of a tensor whose computation the step has queued. Never waits for the device."""
        if self._streams is None:
            return HostCopy(self, source, None, source, None)
        after, size = self._streams.mark(), source.numel() * source.element_size()
        with self._lock:
            place = self._arena.take(size)
        if place is None:
            return HostCopy(self, source, None, source, after)
        target = self._memory[place : place + size].view(source.dtype).view(source.shape)
        return HostCopy(self, source, place, target, self._streams.copy(target, source, after))

    def finish(self, source: torch.Tensor, place: int | None, target: torch.Tensor, event: Any) -> torch.Tensor:
        """Return a tensor in host memory, after the end of its copy; called by `HostCopy.tensor`.

        If page-locked memory had no room (`place` is None), the tensor is copied to other memory now.
        """
        if self._streams is None:
            return source
        if place is None:
            target = torch.empty(source.shape, dtype=source.dtype)
            event = self._streams.copy(target, source, event)
        self._streams.wait(event)
        return target

    def free(self, place: int) -> None:
        """Free the range of page-locked memory that begins at offset `place`."""
        with self._lock:
            self._arena.free(place)
