"""Writes safetensors files of zeros, as sparse files: a header, and a hole of the size of the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_ALIGNMENT = 8


def write_zeros(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file with tensors of these shapes and dtypes, on any device; their values are not read."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(file.tell() + end)
