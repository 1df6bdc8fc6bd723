"""The memory of CUDA devices as text and as plain data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni_ext.topology.budget import Share, Sheet, gib

_COLUMNS = ("GiB", "weights", "KV cache", "activations", "graphs", "buffers", "context", "sum", "KV tokens")
_WIDTHS = (0, 9, 10, 13, 8, 9, 9, 8, 12)


def as_lines(sheets: Sequence[Sheet]) -> list[str]:
    """One block of lines per device: the memory of each replica and the remaining memory, in GiB."""
    names = max([len("free"), *(len(share.replica) for sheet in sheets for share in sheet.shares)])
    lines = []
    for sheet in sheets:
        lines.append(f"device {sheet.device}: {gib(sheet.device_bytes)} GiB, {gib(sheet.usable)} of it to hand out")
        lines.append(_row(_COLUMNS, names))
        lines += [_row((share.replica, *_cells(share)), names) for share in sheet.shares]
        lines.append(_row(("free", *[""] * 6, gib(sheet.free), ""), names))
    return [f"  {line.rstrip()}" for line in lines]


def as_data(sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
    """The same as plain data, in bytes and tokens."""
    return [
        {
            "device": sheet.device,
            "bytes": sheet.device_bytes,
            "usable_bytes": sheet.usable,
            "free_bytes": sheet.free,
            "replicas": [
                {
                    "id": share.replica,
                    "weights_bytes": share.need.weights,
                    "kv_cache_bytes": share.kv_bytes,
                    "kv_cache_tokens": share.kv_tokens,
                    "activations_bytes": share.need.activations,
                    "graphs_bytes": share.need.graphs,
                    "buffers_bytes": share.need.buffers,
                    "context_bytes": share.need.context,
                }
                for share in sheet.shares
            ],
        }
        for sheet in sheets
    ]


def _cells(share: Share) -> tuple[str, ...]:
    need = share.need
    sizes = (need.weights, share.kv_bytes, need.activations, need.graphs, need.buffers, need.context, share.total)
    return (*map(gib, sizes), f"{share.kv_tokens:,}" if need.kv_token else "-")


def _row(cells: Sequence[str], names: int) -> str:
    return cells[0].ljust(names) + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells[1:], _WIDTHS[1:], strict=True)
    )
