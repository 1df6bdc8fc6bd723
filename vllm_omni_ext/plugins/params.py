"""Parameters of a stage: vLLM's `SamplingParams`, or a frozen `msgspec.Struct` of the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS, resolve


def param_names(type_name: str) -> tuple[str, ...]:
    """Return the field names of a stage's parameter type "pkg.mod:attr", in order."""
    return tuple(name for name in resolve(type_name).__struct_fields__ if not name.startswith("_"))


def make_params(type_name: str, values: Mapping[str, Any]) -> Any:
    """Create a stage's parameters.

    Args:
        type_name: "pkg.mod:attr" of their type.
        values: fields by name; missing fields have the type's default.

    Raises:
        ValueError: a field is unknown, missing or has a wrong value; the message names it where the type does.
    """
    kind = resolve(type_name)
    try:
        if type_name == SAMPLING_PARAMS:  # its constructor checks the values, and accepts more than its annotations do
            return kind(**values)
        return msgspec.convert(dict(values), kind)
    except Exception as err:  # each type raises its own errors
        raise ValueError(" ".join(str(err).split())) from err
