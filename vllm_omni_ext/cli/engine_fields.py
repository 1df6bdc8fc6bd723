"""Names and types of vLLM's engine arguments, for the check of values that are not from a command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs

_FIELDS = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}

ENGINE_FIELDS = frozenset(_FIELDS)

_PLAIN = (bool, int, float, str, NoneType)
_DATA = (*_PLAIN, Mapping, list, tuple, set)


def check_engine_value(name: str, value: Any) -> None:
    """Raise ValueError if the type of an engine argument is not the one that vLLM declares for it.

    Accepted are all values that vLLM converts, without texts for numbers. Objects, e.g. a config of vLLM or a dtype of
    torch, and the keys of nested configs are not checked: vLLM does it when it makes the config of an engine.

    Args:
        name: one of `ENGINE_FIELDS`.

    Raises:
        ValueError: the type is wrong; the message is to be written after the name of the field.
    """
    if not isinstance(value, _DATA) or (value is None and _FIELDS[name].default in (None, dataclasses.MISSING)):
        return
    try:
        _adapter(name).validate_python(value, strict=isinstance(value, str | bool))
    except ValidationError as err:
        first, *more = (error["msg"].removeprefix("Input should be ") for error in err.errors(include_url=False))
        said = " or ".join(dict.fromkeys([first, *more]))
        raise ValueError(f"must be {said}, got {value!r:.100}") from None


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_data_type(_FIELDS[name].type), config=ConfigDict(allow_inf_nan=False))


def _data_type(kind: Any) -> Any:
    """Return the type of the plain data that vLLM accepts for an annotation; `Any` for classes that are no data."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        return kind
    if origin in (Union, UnionType):
        return Union[tuple(map(_data_type, inside))]  # noqa: UP007
    if origin in (list, set, dict):
        return origin[tuple(map(_data_type, inside))]
    if origin is Callable:
        return Any
    if kind is CompilationConfig:
        return Mapping[str, Any] | int  # the mode alone, as in vLLM's `LLM`
    return Mapping[str, Any] if dataclasses.is_dataclass(kind) or kind is dict else Any
