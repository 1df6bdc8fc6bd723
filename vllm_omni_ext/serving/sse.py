"""Server-sent events of OpenAI's API: one JSON object each."""

from __future__ import annotations

import json
from typing import Any

EVENT_STREAM = "text/event-stream"
PREFIX, END = "data: ", "\n\n"
DONE = f"{PREFIX}[DONE]{END}"


def read(event: str) -> dict[str, Any]:
    """Return the object of an event other than `DONE`."""
    found: dict[str, Any] = json.loads(event[len(PREFIX) :])
    return found


def write(data: dict[str, Any]) -> str:
    """Return an event without a name."""
    return f"{PREFIX}{json.dumps(data, ensure_ascii=False, separators=(',', ':'))}{END}"


def named(kind: str, **fields: Any) -> str:
    """Return an event with its kind both as name and as `type`, as OpenAI's do."""
    return f"event: {kind}\n{write({'type': kind, **fields})}"
