"""Plain data (from YAML or JSON) to the schema, with errors that name the offending key by its full path."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm_omni_ext.config.checks import MAPPING, unknown_key
from vllm_omni_ext.config.disaggregation import PREFILL_DECODE, check_said_below, lay_over
from vllm_omni_ext.config.schema import OmniConfig, PrefillDecode, ReplicasConfig, StageConfig, keys
from vllm_omni_ext.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names that this package cannot know by itself, given by the caller.

    Attributes:
        stages: the stages of the pipeline.
        engine: fields of vLLM's `EngineArgs`; None = not checked.
        sampling: fields of vLLM's `SamplingParams`; None = not checked.
    """

    stages: Collection[str]
    engine: Collection[str] | None = None
    sampling: Collection[str] | None = None


def parse_config(data: Any, names: Names) -> OmniConfig:
    """Turn the content of a file into an `OmniConfig`.

    Raises:
        ConfigError: an unknown key or stage, or a value of the wrong type; starts with the path of the key.
    """
    top = _mapping("the configuration", {} if data is None else data)
    known = keys(OmniConfig)
    values: dict[str, Any] = {}
    for key, value in top.items():
        if key == "stages":
            values[key] = _stages(value, names)
        elif key in known:
            values[key] = known[key].check(key, value)
        else:
            raise unknown_key("", key, [*known, "stages"])
    return OmniConfig(**values)


def parse_stage(name: str, data: Any, names: Names) -> StageConfig:
    """Turn the mapping below `stages.<name>` into a `StageConfig`."""
    path = f"stages.{name}"
    given = _mapping(path, {} if data is None else data)
    split = None
    if PREFILL_DECODE in given:
        check_said_below(path, given)
        where = f"{path}.{PREFILL_DECODE}"
        split = lay_over(where, PrefillDecode(), given.pop(PREFILL_DECODE), partial(_side, names))
    values = _values(StageConfig, path, given, names, more=(PREFILL_DECODE,))
    return StageConfig(**values, prefill_decode=split)


def _side(names: Names, path: str, before: ReplicasConfig, given: Mapping[str, Any]) -> ReplicasConfig:
    return replace(before, **_values(ReplicasConfig, path, given, names))


def _values(
    schema: type[ReplicasConfig], path: str, given: Mapping[str, Any], names: Names, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The checked values of a mapping whose keys are those of `schema`; `more` are known too, and handled elsewhere."""
    known = keys(schema)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            if names.engine is not None and key in names.engine:
                raise ConfigError(f"{path}.{key}: is an engine setting; write it as {path}.engine.{key}")
            raise unknown_key(path, key, [*known, *more])
        values[key] = known[key].check(f"{path}.{key}", value)
    check_names(f"{path}.engine", values.get("engine", {}), names.engine)
    check_names(f"{path}.sampling", values.get("sampling", {}), names.sampling)
    return values


def check_names(path: str, given: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Refuse a key of `given` that is not in `known`; None means nothing is known and all pass."""
    if known is None:
        return
    for key in given:
        if key not in known:
            raise unknown_key(path, key, known)


def check_stage(name: str, stages: Collection[str]) -> None:
    """Refuse a stage that the pipeline does not have."""
    if name not in stages:
        raise ConfigError(f"stages.{name}: no such stage; use one of {', '.join(stages)}")


def _stages(data: Any, names: Names) -> dict[str, StageConfig]:
    found: dict[str, StageConfig] = {}
    for name, value in _mapping("stages", {} if data is None else data).items():
        check_stage(name, names.stages)
        found[name] = parse_stage(name, value, names)
    return found


def _mapping(path: str, value: Any) -> dict[str, Any]:
    checked: dict[str, Any] = MAPPING(path, value)
    return checked
