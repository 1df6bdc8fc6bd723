"""Lay what the command line says over what the file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vllm_omni_ext.config.checks import MAPPING, unknown_key
from vllm_omni_ext.config.disaggregation import PREFILL_DECODE, check_said_below, lay_over, split_name
from vllm_omni_ext.config.parse import Names, check_names, check_stage
from vllm_omni_ext.config.schema import OmniConfig, PrefillDecode, ReplicasConfig, StageConfig, keys
from vllm_omni_ext.errors import ConfigError

STAGE_OVERRIDES = "--stage-overrides"
_MERGED = ("sampling", "env")
_Replicas = TypeVar("_Replicas", bound=ReplicasConfig)


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
            stage, given = _as_stage(replace(config, stages=stages), name, values)
            check_stage(stage, names.stages)
            stages[stage] = _override_stage(stage, stages.get(stage, StageConfig()), given, names)
    except ConfigError as err:
        raise ConfigError(f"{STAGE_OVERRIDES}: {err}") from err
    return replace(config, stages=stages)


def with_settings(config: OmniConfig, settings: Mapping[str, Any]) -> OmniConfig:
    """Lay top-level settings over a config; None means that nothing was said."""
    known = keys(OmniConfig)
    given = {key: value for key, value in settings.items() if value is not None}
    check_names("", given, known)
    return replace(config, **{key: known[key].check(key, value) for key, value in given.items()})


def _as_stage(config: OmniConfig, name: str, values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """`thinker.prefill` is a side of `thinker` where that has two."""
    split = split_name(name)
    if split is None or config.stage(split[0]).prefill_decode is None:
        return name, values
    return split[0], {PREFILL_DECODE: {split[1]: values}}


def _override_stage(name: str, stage: StageConfig, values: Mapping[str, Any], names: Names) -> StageConfig:
    path = f"stages.{name}"
    given = dict(values)
    if PREFILL_DECODE in given:
        before, where = stage.prefill_decode or PrefillDecode(), f"{path}.{PREFILL_DECODE}"
        split = lay_over(where, before, given.pop(PREFILL_DECODE), partial(_override, names))
        stage = replace(stage, prefill_decode=split)
    if stage.prefill_decode is not None:
        check_said_below(path, given)
    return _override(names, path, stage, given)


def _override(names: Names, path: str, before: _Replicas, values: Mapping[str, Any]) -> _Replicas:
    """Lay values over what is known of replicas: keys of their own, or fields of their engine."""
    known = keys(type(before))
    engine = dict(before.engine_overrides)
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
            changes[key] = {**getattr(before, key), **changes[key]}
    return replace(before, engine_overrides={**engine, **given_engine}, **changes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{STAGE_OVERRIDES}: key '{key}' is written twice; keep one of the two")
        found[key] = value
    return found
