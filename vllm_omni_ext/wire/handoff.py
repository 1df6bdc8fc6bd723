"""Payloads that travel between stages inside vLLM's own request messages (msgpack; never pickle).

A request of a fed stage is an ordinary ADD whose `sampling_params.extra_args["handoff"]` holds its prompt; a chunk is
another ADD with the same request id and `extra_args["chunk"]`. Tensor rows travel beside them (`wire.rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROMPT = "handoff"
CHUNK = "chunk"
GIVEN = "given"  # in either of the two: how many tensor rows there are by now, and where
EXPORT = "export"
TICKET = "omni_ticket"  # leads from a text request to its options; never leaves the API server
FORGET = "omni_forget"  # this is no request: those of a dead API server, sent before some time, shall end
RESERVED = frozenset({PROMPT, CHUNK, EXPORT, TICKET, FORGET})
"""Keys of `extra_args` that a client must not set."""


def chunk_of(extra_args: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool]:
    """Return (payload, whether it is a chunk). A request without a payload gives an empty, closed prompt."""
    extra = extra_args or {}
    if CHUNK in extra:
        return extra[CHUNK], True
    return extra.get(PROMPT, {"last": True}), False


def export_ranges(extra_args: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Prompt ranges [start, stop) whose hidden rows the stage after this one needs; empty for most requests."""
    return [(int(a), int(b)) for a, b in (extra_args or {}).get(EXPORT, ())]
