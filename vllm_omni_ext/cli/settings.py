"""From a command line, or the keywords of `LLM(...)`, to a plan; and from a plan to vLLM's engine arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams

from vllm_omni_ext.cli.args import EXPLICIT, SETTINGS
from vllm_omni_ext.cli.members import check_reachable, for_this_process
from vllm_omni_ext.cli.model import architecture, detect_host, detect_machine, load_hf_config, model_facts
from vllm_omni_ext.cli.refusals import check_flags
from vllm_omni_ext.config.checks import unknown_key
from vllm_omni_ext.config.load import load_config
from vllm_omni_ext.config.overrides import parse_overrides, with_overrides, with_settings
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import OmniConfig, keys
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.model_plugins.registry import PipelineSpec, pipeline_for
from vllm_omni_ext.runtime.engine_args import stage_engine_args
from vllm_omni_ext.topology.disaggregation import expand
from vllm_omni_ext.topology.machines import parse_machine
from vllm_omni_ext.topology.plan import Machine, Plan, make_plan

__all__ = ["ENGINE_FIELDS", "SAMPLING_FIELDS", "from_cli", "from_kwargs", "stage_engine_args"]

ENGINE_FIELDS = frozenset(f.name for f in fields(AsyncEngineArgs))
SAMPLING_FIELDS = frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))


@dataclass(frozen=True, kw_only=True)
class _Wishes:
    """What the user said, whichever way."""

    stage_config: str | None
    overrides: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def from_cli(args: argparse.Namespace, *, machine: str | None = None) -> tuple[Plan, argparse.Namespace]:
    """Make the plan for a command line parsed by `parse_serve`.

    Args:
        machine: plan for this one, in the words of `parse_machine`; None: the one that this is.

    Returns:
        The plan, and the arguments for the HTTP server (stock ones, with `model` set).

    Raises:
        ConfigError: something in the flags, the stage config or the model's config is wrong.
    """
    given = getattr(args, EXPLICIT)
    text_args = {name: getattr(args, name) for name in sorted(ENGINE_FIELDS & given)}
    hf_config = load_hf_config(args.model, text_args)
    pipeline = pipeline_for(architecture(args.model, hf_config))
    check_flags(args, given, text_stage=_text_stage(pipeline))
    ignored = {"api_servers"} if args.headless else set()
    wishes = _Wishes(
        stage_config=args.stage_config,
        overrides=parse_overrides(args.stage_overrides) if args.stage_overrides else {},
        settings={key: getattr(args, name) for name, key in SETTINGS.items() if name in given - ignored},
    )
    pipeline, config = expand(pipeline, _config(pipeline, wishes))
    config = for_this_process(args, pipeline, config)
    where = detect_machine() if machine is None else parse_machine(machine, detect_host())
    return _plan(args.model, pipeline, hf_config, config, text_args, machine=where, headless=args.headless), args


def from_kwargs(
    model: str,
    *,
    stage_config: str | None = None,
    stage_overrides: Mapping[str, Mapping[str, Any]] | str | None = None,
    async_chunk: bool | None = None,
    **engine_kwargs: Any,
) -> Plan:
    """Make the plan for `LLM(model, omni=True, ...)`.

    Args:
        stage_config: as `--stage-config`.
        stage_overrides: as `--stage-overrides`, as a mapping or as JSON.
        engine_kwargs: `EngineArgs` fields, for the text stage as stock flags are; keys of the stage config's top
            level (e.g. `startup_timeout_s`) are taken as such.

    Raises:
        ConfigError: also for a keyword nobody knows.
    """
    top = keys(OmniConfig)
    for name in engine_kwargs:
        if name not in ENGINE_FIELDS and name not in top:
            raise unknown_key("", name, [*ENGINE_FIELDS, *top, "stage_config", "stage_overrides"])
    text_args = {name: value for name, value in engine_kwargs.items() if name in ENGINE_FIELDS}
    hf_config = load_hf_config(model, text_args)
    wishes = _Wishes(
        stage_config=stage_config,
        overrides=parse_overrides(stage_overrides) if isinstance(stage_overrides, str) else stage_overrides or {},
        settings={"async_chunk": async_chunk} | {k: v for k, v in engine_kwargs.items() if k in top},
    )
    pipeline = pipeline_for(architecture(model, hf_config))
    pipeline, config = expand(pipeline, _config(pipeline, wishes))
    if config.api_servers != 1:
        raise ConfigError(
            f"api_servers: LLM(omni=True) is a program without API servers; leave it out, got {config.api_servers}"
        )
    return _plan(model, pipeline, hf_config, config, text_args, machine=detect_machine())


def _config(pipeline: PipelineSpec, wishes: _Wishes) -> OmniConfig:
    names = Names(stages=tuple(s.name for s in pipeline.stages), engine=ENGINE_FIELDS, sampling=SAMPLING_FIELDS)
    config = load_config(wishes.stage_config or pipeline.name, names)
    return with_settings(with_overrides(config, wishes.overrides, names), wishes.settings)


def _plan(
    model: str,
    pipeline: PipelineSpec,
    hf_config: Any,
    config: OmniConfig,
    text_args: Mapping[str, Any],
    *,
    machine: Machine,
    headless: bool = False,
) -> Plan:
    if not headless:
        check_reachable(pipeline, config)
    return make_plan(
        model=model,
        pipeline=pipeline,
        config=config,
        text_args=text_args,
        machine=machine,
        facts=model_facts(model, pipeline, hf_config, config, text_args),
        headless=headless,
    )


def _text_stage(pipeline: PipelineSpec) -> str:
    return next(stage.name for stage in pipeline.stages if stage.text_stage)
