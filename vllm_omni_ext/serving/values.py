"""Values that JSON can say and no engine can take: NaN, integers of more than 64 bits, halves of characters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.stage_sampling import LARGEST_INTEGER
from vllm_omni_ext.wire.handoff import RESERVED

MOST_VALUES = 100_000
"""Values and keys looked at outside of messages and tools; more are refused before any of them is looked at."""

CONVERSATION = frozenset({"messages", "tools"})
"""Fields that never reach an engine as they are."""

EXTRA_ARGS = "vllm_xargs"

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def refuse_absurd_values(request: BaseModel) -> None:
    """Look at every value of a request outside its conversation.

    Raises:
        RequestError: names the field.
    """
    fields = {name: getattr(request, name) for name in request.model_fields_set if name not in CONVERSATION}
    for name, value in _walk(fields):
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: must be a finite number, got {value}", parameter=name)
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise RequestError(f"{name}: must be an integer of at most 64 bits", parameter=name)
        if isinstance(value, str) and has_half_characters(value):
            raise RequestError(f"{name}: must be text; it has half of a surrogate pair in it", parameter=name)
    for key in fields.get(EXTRA_ARGS) or ():
        if key in RESERVED:
            raise RequestError(f"{EXTRA_ARGS}.{key}: is reserved", parameter=f"{EXTRA_ARGS}.{key}")


def has_half_characters(text: str) -> bool:
    """Whether a text cannot be encoded: JSON may escape one half of a surrogate pair without the other."""
    return _HALF_CHARACTER.search(text) is not None


def _walk(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value with its path, and every key as a value of its own.

    Raises:
        RequestError: there are too many; names where they are, and has made nothing of them.
    """
    waiting = list(fields.items())
    due = len(waiting)
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, dict | list | tuple):
            due += len(value) * (2 if isinstance(value, dict) else 1)
            if due > MOST_VALUES:
                raise RequestError(f"{name}: with it the request has more than {MOST_VALUES} values", parameter=name)
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", each) for key, each in value.items()]
            waiting += [(name, key) for key in value]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", each) for index, each in enumerate(value)]
        yield name, value
