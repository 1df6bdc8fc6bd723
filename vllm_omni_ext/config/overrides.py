"""Merges settings from the command line, or from keyword arguments of `LLM`, into a stage config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from vllm_omni_ext.config.disaggregation import PREFILL_DECODE, refuse_keys_of_split_stage, split_name
from vllm_omni_ext.config.parse import Names, checked, parse_config
from vllm_omni_ext.config.schema import GROUPS, SETTINGS, OmniConfig, PrefillDecode, StageConfig
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.ids import SIDES

STAGE_OVERRIDES = "--stage-overrides"
CACHE, CACHE_FIELD = "kv_cache_bytes", "kv_cache_memory_bytes"
"""Key of a stage, and the `EngineArgs` field that it sets."""

_KEYS = frozenset(each.name for each in fields(StageConfig)) - {"engine_overrides"}


def parse_overrides(text: str) -> Any:
    """Return the data in the JSON of `--stage-overrides`, e.g. `{"talker": {"replicas": 2, "max_num_seqs": 4}}`."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as err:  # also a number with too many digits, and too deep nesting
        raise ConfigError(f"{STAGE_OVERRIDES}: is not valid JSON: {err}") from err


def with_overrides(config: OmniConfig, overrides: Any, names: Names) -> OmniConfig:
    """Return a config with the values of `--stage-overrides`.

    A key of `StageConfig` replaces the config's value; the mappings `params`, `env`, `engine` and `prefill_decode` are
    merged key by key. `prefill_decode: null` removes the config's. A field of `EngineArgs` may be written without
    `engine`. Any other key is an error.

    Args:
        overrides: settings by stage name, as a mapping or as JSON.
        names: valid names of stages, engine fields and parameters.

    Raises:
        ConfigError: a stage or key is unknown, or a value is wrong.
    """
    overrides = parse_overrides(overrides) if isinstance(overrides, str) else overrides
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{STAGE_OVERRIDES}: must be a mapping with string keys, got {overrides!r}")
    try:
        for name, values in overrides.items():
            config = _with_stage(config, *_as_stage(config, name, values), names)
    except ConfigError as err:
        raise ConfigError(f"{STAGE_OVERRIDES}: {err}") from err
    return config


def with_settings(config: OmniConfig, settings: Mapping[str, Any]) -> OmniConfig:
    """Return a config with other values of keys outside of `stages`.

    Args:
        settings: values by the name of the key in `SETTINGS`, without its group, e.g. "max_body_mib". None: the key
            stays unchanged.

    Raises:
        ConfigError: a key is unknown or a value is wrong; the message starts with the path of the key.
    """
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if value is not None:
            group, _ = SETTINGS.get(name, ("", None))
            (given.setdefault(group, {}) if group else given)[name] = value
    over = checked(OmniConfig, given)
    changes = {name: getattr(over, name) for name in given}
    for group in changes.keys() & GROUPS.keys():
        of_group = {name: getattr(changes[group], name) for name in given[group]}
        changes[group] = replace(getattr(config, group), **of_group)
    return replace(config, **changes)


def _as_stage(config: OmniConfig, name: str, values: Any) -> tuple[str, Any]:
    """Return (stage, settings) for one entry of `--stage-overrides`.

    An entry for a side of a split stage, e.g. "STAGE.prefill", becomes one for the stage, with the settings below
    `prefill_decode`. Other entries stay unchanged.
    """
    split = split_name(name) if isinstance(name, str) else None
    if split is None or config.stage(split[0]).prefill_decode is None:
        return name, values
    return split[0], {PREFILL_DECODE: {split[1]: values}}


def _with_stage(config: OmniConfig, name: str, values: Any, names: Names) -> OmniConfig:
    given, before = _engine_apart(f"stages.{name}", values, names), config.stage(name)
    if isinstance(given, Mapping) and given.get(PREFILL_DECODE, ...) is None:
        before = replace(before, prefill_decode=None)
        given = {key: value for key, value in given.items() if key != PREFILL_DECODE}
    over = parse_config({"stages": {name: given}}, names, flat=True).stage(name)
    stage = _merged(before, over, given or {})
    if stage.prefill_decode is not None:
        refuse_keys_of_split_stage(f"stages.{name}", given or ())
    return replace(config, stages={**config.stages, name: stage})


def _engine_apart(path: str, values: Any, names: Names) -> Any:
    """Return a stage's settings with `EngineArgs` fields moved below the key `engine`; unchanged if not a mapping.

    Args:
        path: configuration path of the settings.

    Raises:
        ConfigError: an engine argument is set twice.
    """
    if not isinstance(values, Mapping):
        return values
    engine = {k: v for k, v in values.items() if k not in _KEYS and (names.engine is None or k in names.engine)}
    given = {k: v for k, v in values.items() if k not in engine}
    below = given.get("engine", {})
    if isinstance(below, Mapping):
        for key in [key for key in engine if key in below]:
            raise ConfigError(f"{path}.engine.{key}: is also written without engine; keep one of the two")
        if CACHE_FIELD in {**engine, **below} and given.get(CACHE) is not None:
            raise ConfigError(f"{path}.engine.{CACHE_FIELD}: {path}.{CACHE} says the same; keep one of the two")
        if engine:
            given["engine"] = {**engine, **below}
    if isinstance(split := given.get(PREFILL_DECODE), Mapping):
        given[PREFILL_DECODE] = {
            k: _engine_apart(f"{path}.{PREFILL_DECODE}.{k}", v, names) if k in SIDES else v for k, v in split.items()
        }
    return given


def _merged(before: Any, over: Any, given: Mapping[str, Any]) -> Any:
    """Return the dataclass `before`, with the keys in `given` taken from the dataclass `over`.

    `params` and `env` are merged key by key. `engine` is merged into `engine_overrides`, which also override flags. So
    is `kv_cache_bytes`, because a flag overrides that of a stage config.
    """
    changes = {key: getattr(over, key) for key in given}
    for key in changes.keys() & {"params", "env"}:
        changes[key] = {**getattr(before, key), **changes[key]}
    for key in changes.keys() & {PREFILL_DECODE, *SIDES}:
        changes[key] = _merged(getattr(before, key) or PrefillDecode(), changes[key], given[key] or {})
    if changes.keys() & {"engine", CACHE}:
        engine = {**before.engine_overrides}
        if CACHE in changes:
            engine.pop(CACHE_FIELD, None)
            if changes[CACHE] is not None:
                engine[CACHE_FIELD] = changes[CACHE]
        changes["engine_overrides"] = engine | changes.pop("engine", {})
    return replace(before, **changes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{STAGE_OVERRIDES}: key '{key}' is written twice; keep one of the two")
        found[key] = value
    return found
