"""Converts plain data (YAML or JSON) to the classes of `config.schema`; errors contain the path of the wrong key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from vllm_omni_ext.config.checks import UNKNOWN_KEY, unknown_key
from vllm_omni_ext.config.disaggregation import PREFILL_DECODE, refuse_keys_of_split_stage
from vllm_omni_ext.config.schema import (
    GROUPS,
    SETTINGS,
    OmniConfig,
    PrefillDecode,
    ReplicasConfig,
    Schema,
    StageConfig,
    setting_path,
)
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import SIDES

_Schema = TypeVar("_Schema")
_MAPPING = "must be a mapping with string keys"
_NO_MAPPING = ("dataclass_type", "dict_type", "mapping_type")
"""Pydantic's error types for a value that is not a mapping."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names that a configuration may contain, for the check of its keys.

    Attributes:
        stages: the stages of the pipeline.
        engine: fields of vLLM's `EngineArgs`; None = not checked.
        engine_value: function that is called with each of these fields and its value, and raises ValueError if the type
            is wrong; the message is written after the path of the field.
        params: names of the parameters that `stages.<name>.params` may contain, by stage. A stage that is not in this
            mapping is not checked.
    """

    stages: Collection[str]
    engine: Collection[str] | None = None
    engine_value: Callable[[str, Any], None] = lambda name, value: None
    params: Mapping[str, Collection[str]] = field(default_factory=dict)


def parse_config(data: Any, names: Names, *, flat: bool = False) -> OmniConfig:
    """Convert the content of a stage config file to an `OmniConfig`.

    Args:
        data: the parsed YAML or JSON; None for an empty file.
        names: valid names of stages, engine fields and parameters.
        flat: `EngineArgs` fields may be written next to the keys of a stage, as in `--stage-overrides`. Errors about
            unknown keys then suggest these fields too.

    Raises:
        ConfigError: a key or stage is unknown, or a value has the wrong type; the message starts with the key's path.
    """
    data = {} if data is None else data
    config = checked(OmniConfig, data, engine=names.engine or (), flat=flat)
    for name, stage in config.stages.items():
        if name not in names.stages:
            raise ConfigError(f"stages.{name}: no such stage; use one of {', '.join(names.stages)}")
        _check_stage(f"stages.{name}", stage, data["stages"][name] or (), names)
        _check_names(f"stages.{name}.params", stage.params, names.params.get(name))
    return config


def checked(
    schema: type[_Schema], data: Any, *, path: str = "", engine: Collection[str] = (), flat: bool = False
) -> _Schema:
    """Return data converted to a class of the schema.

    Args:
        schema: a dataclass or `TypedDict` with annotations for pydantic.
        path: path of the data in the configuration.
        engine: fields of vLLM's `EngineArgs`. If a field is set outside of `engine`, the error contains the right path.
        flat: see `parse_config`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type; the message is about the first such key.
    """
    try:
        return cast(_Schema, _adapter(cast(Any, schema)).validate_python(data))
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
    keys = [str(key) for key in first["loc"] if key != "[key]"]
    level: Any = _schema_at(keys[:-1]) if schema is OmniConfig else schema
    above = ".".join([*filter(None, [path]), *keys[:-1]])
    if first["type"] in UNKNOWN_KEY:
        raise _unknown(level, above, keys[-1], engine, flat=flat)
    where = ".".join(filter(None, [above, *keys[-1:]])) or "the configuration"
    text = _MAPPING if first["type"] in _NO_MAPPING else first["msg"].replace("Input should be", "must be")
    null = ", or null" if keys and getattr(level, keys[-1], "") is None else ""
    raise ConfigError(f"{where}: {text}{null}, got {first['input']!r}")


def _unknown(schema: Any, path: str, key: str, engine: Collection[str], *, flat: bool) -> ConfigError:
    if key in engine and issubclass(schema, ReplicasConfig):
        return ConfigError(f"{path}.{key}: is an engine setting; write it as {path}.engine.{key}")
    if key in SETTINGS and schema in (OmniConfig, *GROUPS.values()):
        group, _ = SETTINGS[key]
        place = f"goes below '{group}'" if group else "goes to the top level"
        return ConfigError(f"{path}.{key}: {place}" if path else f"{key}: {place}")
    known = [name for name in get_type_hints(schema) if name != "engine_overrides"]
    if schema is OmniConfig:
        known += [setting_path(name) for name in SETTINGS if name not in known]
    return unknown_key(path, key, [*known, *engine] if flat else known)


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _schema_at(keys: list[str]) -> Schema:
    if not keys:
        return OmniConfig
    if len(keys) == 1 and keys[0] in GROUPS:
        return GROUPS[keys[0]]
    return ReplicasConfig if keys[-1] in SIDES else PrefillDecode if keys[-1] == PREFILL_DECODE else StageConfig


def _check_stage(path: str, stage: StageConfig, given: Collection[str], names: Names) -> None:
    _check_engine(f"{path}.engine", stage.engine, names)
    if stage.prefill_decode is not None:
        refuse_keys_of_split_stage(path, given)
        for side in SIDES:
            below: ReplicasConfig = getattr(stage.prefill_decode, side)
            _check_engine(f"{path}.{PREFILL_DECODE}.{side}.engine", below.engine, names)


def _check_engine(path: str, given: Mapping[str, Any], names: Names) -> None:
    """Raise ConfigError for an unknown engine argument, and for one with a value of a wrong type."""
    _check_names(path, given, names.engine)
    for key, value in given.items():
        try:
            names.engine_value(key, value)
        except ValueError as err:
            raise ConfigError(f"{path}.{key}: {err}") from err


def _check_names(path: str, given: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raise ConfigError for a key of `given` that is not in `known`. If `known` is None, all keys are accepted."""
    for key in given:
        if known is not None and key not in known:
            raise unknown_key(path, key, known)
