"""Hidden rows as one tensor: vLLM's per-step output field holds a single tensor, so a small header goes in front.

Layout, uint8: int64 header [first, count, width, dtype code], then `count` x `width` elements.
"""

from __future__ import annotations

import torch

_HEADER = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(first: int, rows: torch.Tensor) -> torch.Tensor:
    """Pack rows [count, width]; `first` is the index of rows[0] among all rows the request exports."""
    head = torch.tensor([first, rows.shape[0], rows.shape[1], _DTYPES.index(rows.dtype)], dtype=torch.int64)
    return torch.cat([head.view(torch.uint8), rows.contiguous().view(torch.uint8).reshape(-1).cpu()])


def unpack(blob: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return (first, rows [count, width]); the rows are a copy, so the received frame can be freed."""
    size = _HEADER * 8
    first, count, width, code = blob[:size].clone().view(torch.int64).tolist()
    return first, blob[size:].clone().view(_DTYPES[code]).reshape(count, width)
