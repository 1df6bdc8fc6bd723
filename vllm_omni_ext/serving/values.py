"""Refuses values that are valid JSON but crash engines: NaN, integers beyond 64 bits, lone surrogates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.stage_params import LARGEST_INTEGER
from vllm_omni_ext.wire.stage_input import RESERVED

MOST_VALUES = 100_000
"""Largest number of values and keys outside of messages and tools; more are refused before they are checked."""

CONVERSATION = frozenset({"messages", "tools"})
"""Fields that do not reach an engine unchanged."""

EXTRA_ARGS = "vllm_xargs"

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def validate_json_values(request: BaseModel) -> None:
    """Check every value of a request outside its conversation.

    Raises:
        RequestError: names the field.
    """
    fields = {name: getattr(request, name) for name in request.model_fields_set if name not in CONVERSATION}
    for name, value in _walk(fields):
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: must be a finite number, got {value}", parameter=name)
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise RequestError(f"{name}: must be an integer of at most 64 bits", parameter=name)
        if isinstance(value, str) and has_lone_surrogate(value):
            raise RequestError(f"{name}: must be text; it has half of a surrogate pair in it", parameter=name)
    for key in fields.get(EXTRA_ARGS) or ():
        if key in RESERVED:
            raise RequestError(f"{EXTRA_ARGS}.{key}: is reserved", parameter=f"{EXTRA_ARGS}.{key}")


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text cannot be encoded: JSON may escape one half of a surrogate pair without the other."""
    return _HALF_CHARACTER.search(text) is not None


def _walk(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, and every key as a value with a path.

    Raises:
        RequestError: there are too many values; names the field, and is raised before any value is yielded.
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
