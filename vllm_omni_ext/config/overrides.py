"""Lay what the command line says over what the file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_ext.config.checks import MAPPING, unknown_key
from vllm_omni_ext.config.parse import Names, check_names, check_stage
from vllm_omni_ext.config.schema import OmniConfig, StageConfig, keys
from vllm_omni_ext.errors import ConfigError

STAGE_OVERRIDES = "--stage-overrides"
_MERGED = ("sampling", "env")


def parse_overrides(text: str) -> dict[str, dict[str, Any]]:
    """Read the JSON of `--stage-overrides`: `{"talker": {"replicas": 2, "max_num_seqs": 4}}`."""
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{STAGE_OVERRIDES}: is not valid JSON: {err}") from err
    stages: dict[str, Any] = MAPPING(STAGE_OVERRIDES, data)
    return {name: MAPPING(f"{STAGE_OVERRIDES}: stages.{name}", values) for name, values in stages.items()}


def with_overrides(config: OmniConfig, overrides: Mapping[str, Mapping[str, Any]], names: Names) -> OmniConfig:
    """Lay stage overrides over a config.

    A key of `StageConfig` goes there (`sampling` and `env` are merged key by key, `engine` likewise); a field of
    `EngineArgs` goes to the engine; anything else is an error.
    """
    stages = dict(config.stages)
    try:
        for name, values in overrides.items():
            check_stage(name, names.stages)
            stages[name] = _override_stage(name, config.stage(name), values, names)
    except ConfigError as err:
        raise ConfigError(f"{STAGE_OVERRIDES}: {err}") from err
    return replace(config, stages=stages)


def with_settings(config: OmniConfig, settings: Mapping[str, Any]) -> OmniConfig:
    """Lay top-level settings over a config; None means that nothing was said."""
    known = keys(OmniConfig)
    given = {key: value for key, value in settings.items() if value is not None}
    check_names("", given, known)
    return replace(config, **{key: known[key].check(key, value) for key, value in given.items()})


def _override_stage(name: str, stage: StageConfig, values: Mapping[str, Any], names: Names) -> StageConfig:
    path = f"stages.{name}"
    known = keys(StageConfig)
    engine = dict(stage.engine_overrides)
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key in known:
            changes[key] = known[key].check(f"{path}.{key}", value)
        elif names.engine is None or key in names.engine:
            engine[key] = value
        else:
            raise unknown_key(path, key, [*known, *names.engine])
    given_engine = changes.pop("engine", {})
    check_names(f"{path}.engine", given_engine, names.engine)
    check_names(f"{path}.sampling", changes.get("sampling", {}), names.sampling)
    for key in _MERGED:
        if key in changes:
            changes[key] = {**getattr(stage, key), **changes[key]}
    return replace(stage, engine_overrides={**engine, **given_engine}, **changes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{STAGE_OVERRIDES}: key '{key}' is written twice; keep one of the two")
        found[key] = value
    return found
