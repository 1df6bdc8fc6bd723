"""Numbers that JSON can say and no engine can take: NaN, infinities, integers of more than 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.stage_sampling import LARGEST_INTEGER

MOST_VALUES = 100_000
"""Values looked at outside of texts and messages; more are refused."""

CONVERSATION = frozenset({"messages", "tools"})
"""Fields whose numbers never reach an engine."""


def refuse_absurd_numbers(request: BaseModel) -> None:
    """Look at every number of a request outside its conversation.

    Raises:
        RequestError: names the field.
    """
    fields = {name: getattr(request, name) for name in request.model_fields_set if name not in CONVERSATION}
    for seen, (name, value) in enumerate(_walk(fields)):
        if seen > MOST_VALUES:
            raise RequestError(f"{name}: has more than {MOST_VALUES} values", parameter=name)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: must be a finite number, got {value}", parameter=name)
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise RequestError(f"{name}: must be an integer of at most 64 bits", parameter=name)


def _walk(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value with its path."""
    waiting = list(fields.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, BaseModel):
            value = dict(value)
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", each) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{name}[{index}]", each) for index, each in enumerate(value)]
        yield name, value
