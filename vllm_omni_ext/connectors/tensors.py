"""Converts the parts of a chunk to bytes and back. Torch is imported only for tensors.

Every part begins at a multiple of 64 bytes in the chunk, so that any element type can be read in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from vllm_omni_ext.connectors.arena import aligned
from vllm_omni_ext.connectors.base import MAX_PARTS, Part
from vllm_omni_ext.connectors.messages import PartHead
from vllm_omni_ext.encoding import Malformed

if TYPE_CHECKING:
    import torch

BYTES = ""
"""The dtype of a part that is bytes."""


def is_tensor(part: Part) -> TypeGuard[torch.Tensor]:
    """Whether a part is a torch tensor; False if torch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(part, torch.Tensor)


def describe(parts: Sequence[Part]) -> tuple[tuple[PartHead, ...], int]:
    """Return (headers, total size in bytes) of the parts. TypeError if a part is neither tensor nor bytes."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"a chunk of {len(parts)} parts; at most {MAX_PARTS} are allowed")
    heads, offset = [], 0
    for part in parts:
        offset = aligned(offset)
        if is_tensor(part):
            if part.layout != sys.modules["torch"].strided:
                raise TypeError(f"a part must be a dense tensor, not {part.layout}")
            nbytes = part.numel() * part.element_size()
            heads.append(PartHead(str(part.dtype).removeprefix("torch."), tuple(part.shape), offset, nbytes))
        else:
            nbytes = memoryview(part).nbytes
            heads.append(PartHead(BYTES, (nbytes,), offset, nbytes))
        offset += nbytes
    return tuple(heads), offset


def write(parts: Sequence[Part], heads: Sequence[PartHead], target: memoryview) -> None:
    """Copy the parts to the offsets in their headers; one copy each, also from a device or of a strided tensor."""
    for part, head in zip(parts, heads, strict=True):
        if not head.nbytes:
            continue
        place = target[head.offset : head.offset + head.nbytes]
        if is_tensor(part) and not (part.is_cpu and part.is_contiguous()):
            _view(head, place).copy_(part.detach())
        else:  # not torch: its threads wait for each other when other processes use the cores
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(_memory(part), np.uint8))


def read(heads: Sequence[PartHead], source: Any) -> tuple[Part, ...]:
    """Return the parts inside a writable buffer, without a copy; the parts keep the buffer alive."""
    view = memoryview(source)
    return tuple(
        _view(head, place) if head.dtype else place
        for head in heads
        for place in (view[head.offset : head.offset + head.nbytes],)
    )


def host_views(parts: Sequence[Part]) -> list[memoryview]:
    """Return the bytes of each part; only parts on a device and strided tensors are copied."""
    return [memoryview(_memory(part)) for part in parts]


def check(heads: Sequence[PartHead], nbytes: int) -> None:
    """Raise Malformed unless the parts fit into `nbytes` and shapes match sizes: headers come from another process."""
    for head in heads:
        if head.offset + head.nbytes > nbytes:
            raise Malformed(f"a part of bytes {head.offset} to {head.offset + head.nbytes} in a chunk of {nbytes}")
        size = _itemsize(head.dtype)
        for length in head.shape:
            size *= length
        if size != head.nbytes:
            raise Malformed(f"{head.dtype or 'bytes'} {list(head.shape)} has {size} bytes, not {head.nbytes}")


def _itemsize(name: str) -> int:
    return _dtype(name).itemsize if name else 1


def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Malformed(f"'{name}' is no dtype")
    return found


def _view(head: PartHead, place: memoryview) -> torch.Tensor:
    import torch

    dtype = _dtype(head.dtype)
    if not head.nbytes:
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(place, dtype=dtype).view(head.shape)


def _memory(part: Part) -> Any:
    """Return a part's bytes, flat. Numpy has no bfloat16, so tensors are viewed as uint8 first."""
    if not is_tensor(part):
        return memoryview(part).cast("B")
    return part.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
