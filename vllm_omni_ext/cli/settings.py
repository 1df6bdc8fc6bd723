"""Makes the plan for a command line, or for the keyword arguments of `LLM(...)`."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import StructuredOutputsParams

from vllm_omni_ext.cli.args import EXPLICIT, KEYS, check_chat, check_flags
from vllm_omni_ext.cli.engine_fields import ENGINE_FIELDS, check_engine_value
from vllm_omni_ext.cli.members import check_address, check_reachable, for_this_process, listening, refuse_joining
from vllm_omni_ext.cli.model import architecture, detect_host, detect_machine, load_hf_config, model_facts
from vllm_omni_ext.compat import require_seams
from vllm_omni_ext.config.checks import AUTO, modality_names, unknown_key
from vllm_omni_ext.config.disaggregation import stage_path
from vllm_omni_ext.config.load import load_config, pipeline_of, stage_config_names
from vllm_omni_ext.config.overrides import with_overrides, with_settings
from vllm_omni_ext.config.parse import Names
from vllm_omni_ext.config.schema import SETTINGS, Limits, OmniConfig, keys, setting_path
from vllm_omni_ext.errors import ConfigError
from vllm_omni_ext.plugins.http import REALTIME, HttpSurface
from vllm_omni_ext.plugins.registry import family_for
from vllm_omni_ext.plugins.spec import (
    LOGPROBS,
    SAMPLING_PARAMS,
    TEXT_ONLY,
    ModelFamily,
    PipelineSpec,
    make_params,
    param_names,
    resolve,
)
from vllm_omni_ext.runtime.launch.engine_args import engine_value
from vllm_omni_ext.topology.disaggregation import expand
from vllm_omni_ext.topology.machine import Machine, parse_machine
from vllm_omni_ext.topology.plan import Plan
from vllm_omni_ext.topology.planner import make_plan, resolved_params

SERVER_REQUEST_TIMEOUT_S = 3600.0
"""Default request timeout of a server, in seconds. After it, the client has disconnected, or the request is stuck."""

REALTIME_KEYS = "realtime_"
"""Prefix of the configuration keys about sessions of `/v1/realtime`."""


def from_cli(args: argparse.Namespace, *, machine: str | None = None) -> tuple[Plan, argparse.Namespace]:
    """Make the plan for a command line parsed by `parse_serve`.

    Args:
        machine: the machine to plan for, as text for `parse_machine`; None: this machine.

    Returns:
        (plan, arguments for vLLM's HTTP server)

    Raises:
        ConfigError: a flag, the stage config or the model's config is wrong.
    """
    given = getattr(args, EXPLICIT)
    text_args = {name: getattr(args, name) for name in sorted(ENGINE_FIELDS & given)}
    hf_config = load_hf_config(args.model, text_args)
    family = _family(args.model, hf_config)
    ignored = {"api_servers"} if args.headless else set()
    settings = {key: getattr(args, name) for name, key in KEYS.items() if name in given - ignored}
    pipeline, config = _read(family, args.stage_config, args.stage_overrides, settings, text_args)
    _check_params_of_chats(pipeline, config)
    check_flags(args, given, frontend=pipeline.frontend)
    _check_realtime(config.limits, {*settings}, family)
    pipeline, config = expand(pipeline, config)
    config = for_this_process(args, pipeline, config)
    if config.timeouts.request_timeout_s == AUTO:
        config = with_settings(config, {"request_timeout_s": SERVER_REQUEST_TIMEOUT_S})
    check_address(config)
    if not args.headless:
        config = listening(config, None if args.uds else args.port)
        check_reachable(pipeline, config)
    where = detect_machine() if machine is None else parse_machine(machine, detect_host())
    plan = _plan(args.model, family, pipeline, hf_config, config, text_args, where)
    args = with_frontend(args, plan)
    check_chat(args)
    return plan, args


OF_THE_FRONTEND = (
    "disable_log_stats",
    "enable_log_requests",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "served_model_name",
    "structured_outputs_config",
)
"""`EngineArgs` fields that vLLM's HTTP server reads from the command line instead of the engine's config."""


def with_frontend(args: argparse.Namespace, plan: Plan) -> argparse.Namespace:
    """Return the arguments of the HTTP server with the values that the frontend's engines have of `OF_THE_FRONTEND`.

    In stock vLLM, the server's `structured_outputs_config` is the object into which the engine's config writes
    `--reasoning-parser`.
    """
    engine, name = plan.frontend().engine_args, "structured_outputs_config"
    args = argparse.Namespace(**{**vars(args), **{key: engine[key] for key in OF_THE_FRONTEND if key in engine}})
    config = copy.copy(engine_value(plan.frontend_stage, name, args.structured_outputs_config))
    for key in ("reasoning_parser", "reasoning_parser_plugin"):
        setattr(config, key, getattr(args, key) or getattr(config, key))
        setattr(args, key, getattr(config, key))
    args.structured_outputs_config = config
    if isinstance(args.served_model_name, str):
        args.served_model_name = [args.served_model_name]
    return args


SERVERS_OWN = {
    "max_body_mib",
    "max_body_values",
    "max_request_pixels",
    "max_batch_files_mib",
    "api_key_routes",
    "allow_private_media",
    "streaming_input",
}
"""Keys of which only a server makes use; as keywords of `LLM(omni=True)` they are refused."""

JOINING = ("cluster_auth", "cluster_secret_file", "drain_timeout_s", "heartbeat_timeout_s")
"""Keys about replicas that join a head or leave it; as keywords of `LLM(omni=True)` they are refused."""

OFFLINE_DEFAULTS = {"disable_log_stats": True}
"""Engine arguments of each stage that vLLM's `LLM` sets unless the program does."""


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
        stage_config: value of `--stage-config`.
        stage_overrides: value of `--stage-overrides`, as a mapping or as JSON.
        engine_kwargs: `EngineArgs` fields, which apply to the frontend (the stage that writes text), and keys of the
            stage config without their group (e.g. `startup_timeout_s`).

    Raises:
        ConfigError: a keyword is unknown, or a value is wrong.
    """
    for name in engine_kwargs:
        if name not in ENGINE_FIELDS and name not in SETTINGS:
            raise unknown_key("", name, [*ENGINE_FIELDS, *SETTINGS, "stage_config", "stage_overrides"])
    text_args = {name: value for name, value in engine_kwargs.items() if name in ENGINE_FIELDS}
    for name, value in text_args.items():
        try:
            check_engine_value(name, value)
        except ValueError as err:
            raise ConfigError(f"{name}: {err}") from err
    hf_config = load_hf_config(model, text_args)
    settings = {"async_chunk": async_chunk} | {k: v for k, v in engine_kwargs.items() if k in SETTINGS}
    family = _family(model, hf_config)
    pipeline, config = expand(*_offline(*_read(family, stage_config, stage_overrides, settings, text_args)))
    _check_realtime(config.limits, {*settings}, None)
    for name in sorted(SERVERS_OWN & engine_kwargs.keys()):
        raise ConfigError(f"{name}: LLM(omni=True) has no HTTP routes; leave it out, got {engine_kwargs[name]!r}")
    for name in JOINING:
        if name in engine_kwargs:
            raise ConfigError(
                f"{setting_path(name)}: no replica can join or leave LLM(omni=True); leave it out, "
                f"got {engine_kwargs[name]!r}"
            )
    if config.api_servers != 1:
        raise ConfigError(
            f"api_servers: LLM(omni=True) is a program without API servers; leave it out, got {config.api_servers}"
        )
    if config.playground:
        raise ConfigError("playground: LLM(omni=True) is a program without API servers; leave it out")
    if config.batch_dir is not None:
        raise ConfigError(f"batch_dir: LLM(omni=True) has no HTTP routes; leave it out, got {config.batch_dir}")
    for spec in pipeline.stages:
        if (least := config.stage(spec.name).min_replicas) != 1:
            path = f"{stage_path(spec.name)}.min_replicas"
            raise ConfigError(f"{path}: LLM(omni=True) has no health probes; leave it out, got {least}")
    refuse_joining(pipeline, config)
    return _plan(model, family, pipeline, hf_config, config, text_args, detect_machine())


def _offline(pipeline: PipelineSpec, config: OmniConfig) -> tuple[PipelineSpec, OmniConfig]:
    """Return the arguments, with `OFFLINE_DEFAULTS` in each stage that has no other value."""
    stages = {spec.name: config.stage(spec.name) for spec in pipeline.stages}
    stages = {name: replace(stage, engine={**OFFLINE_DEFAULTS, **stage.engine}) for name, stage in stages.items()}
    return pipeline, replace(config, stages=stages)


def _family(model: str, hf_config: Any) -> ModelFamily:
    """Return the model family that serves a model, chosen by the architecture in the model's config.

    Raises:
        IncompatibleVllm: vLLM's functions that the family replaces are not those that it was written for.
    """
    family = family_for(architecture(model, hf_config))
    require_seams(family)
    return family


def _read(
    family: ModelFamily,
    source: str | None,
    overrides: Any,
    settings: Mapping[str, Any],
    text_args: Mapping[str, Any],
) -> tuple[PipelineSpec, OmniConfig]:
    """Return the selected pipeline and its configuration.

    Later sources override earlier ones: the stage config, the stage overrides, and the top-level settings.

    Args:
        source: value of `--stage-config`; None: the stage config with the pipeline's name, if there is one.
        overrides: value of `--stage-overrides`.
        settings: values of keys in `SETTINGS`.
        text_args: `EngineArgs` fields of the frontend that the user has set as flags or keywords.
    """
    chosen = settings.get("pipeline") or (pipeline_of(source, family.stage_configs) if source else "")
    pipeline = family.pipeline(chosen)
    if source is None and pipeline.name in stage_config_names(family.stage_configs):
        source = pipeline.name
    names = Names(
        stages=tuple(stage.name for stage in pipeline.stages),
        engine=ENGINE_FIELDS,
        engine_value=check_engine_value,
        params={stage.name: param_names(stage.params) for stage in pipeline.stages},
    )
    config = load_config(source, names, family.stage_configs) if source else OmniConfig()
    config = _with_generation(pipeline, config, text_args.get("override_generation_config") or {})
    config = with_overrides(config, overrides or {}, names)
    _check_params(pipeline, config)
    config = with_settings(config, settings)
    if config.default_modalities is not None:
        modality_names(config.default_modalities, pipeline.modalities, f"'{pipeline.name}'")
    for key in ("log_dir", "batch_dir"):
        if (given := getattr(config, key)) is not None:
            folder = Path(os.path.expanduser(given))
            if folder.parts[0].startswith("~"):
                raise ConfigError(f"{key}: there is no home folder for '{given}'; name another folder")
            _check_folder(key, folder.absolute())
            changed: dict[str, Any] = {key: str(folder)}
            config = replace(config, **changed)
    _check_environment(config)
    return pipeline, config


def _with_generation(pipeline: PipelineSpec, config: OmniConfig, generation: Mapping[str, Any]) -> OmniConfig:
    """Return a config in which values of `--override-generation-config` replace the frontend's `params` of that name.

    A server and `LLM` apply `params` after the generation config, so those of the stage config would override the flag.
    """
    frontend = pipeline.stage(pipeline.frontend)
    if frontend.params != SAMPLING_PARAMS:
        return config
    params = resolved_params(pipeline, config)[frontend.name]
    given = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in generation.items()}
    changed = {name: value for name, value in given.items() if name in params and value is not None}
    if not changed:
        return config
    stage = config.stage(frontend.name)
    return replace(config, stages={**config.stages, frontend.name: replace(stage, params={**stage.params, **changed})})


def _check_environment(config: OmniConfig) -> None:
    """Raise ConfigError for environment variables from which vLLM makes each engine a data parallel rank."""
    for name in ("VLLM_DP_SIZE", "VLLM_DP_RANK"):
        found = [("", os.environ), *((f"stages.{stage}.env.", each.env) for stage, each in config.stages.items())]
        for where, variables in found:
            if variables.get(name, "") not in ("", "0" if name.endswith("RANK") else "1"):
                raise ConfigError(f"{where}{name}: replicas replace data parallel ranks; unset it, and write replicas")


def _check_realtime(limits: Limits, given: Collection[str], family: ModelFamily | None) -> None:
    """Raise ConfigError if limits of realtime sessions do not fit together, or are set where there are no sessions.

    Args:
        given: names of the keys that the command line or the program has set.
        family: family of the served model; None: there is no server.
    """
    changed = [name for name in keys(Limits) if getattr(limits, name) != getattr(Limits(), name) or name in given]
    changed = [name for name in changed if name.startswith(REALTIME_KEYS)]
    if not changed:
        return
    path = setting_path(changed[0])
    if family is None:
        raise ConfigError(f"{path}: LLM(omni=True) is a program without realtime sessions; leave it out")
    if REALTIME not in (resolve(family.http) if family.http else HttpSurface).apis:
        raise ConfigError(f"{path}: the family '{family.name}' has no /v1/realtime; leave it out")
    if limits.realtime_sound_mib < limits.realtime_buffer_mib:
        raise ConfigError(
            f"limits.realtime_sound_mib: must be at least realtime_buffer_mib, {limits.realtime_buffer_mib}, "
            f"got {limits.realtime_sound_mib}"
        )


def _check_params(pipeline: PipelineSpec, config: OmniConfig) -> None:
    values = resolved_params(pipeline, config)
    for stage in pipeline.stages:
        try:
            make_params(stage.params, values[stage.name])
        except ValueError as err:
            raise ConfigError(f"stages.{stage.name}.params: {' '.join(str(err).split())}") from err
        if stage.params != SAMPLING_PARAMS:
            continue
        if stage.name == pipeline.frontend:
            _check_params_of_text(f"stages.{stage.name}.params", config.stage(stage.name).params)
            continue
        pooling = stage.engine.get("runner") == "pooling"
        for field in config.stage(stage.name).params:
            if pooling or field in LOGPROBS or field in TEXT_ONLY:
                why = "is not returned for this stage" if field in LOGPROBS else "has no effect in this stage"
                raise ConfigError(f"stages.{stage.name}.params.{field}: {why}; remove it")


def _check_params_of_text(path: str, params: Mapping[str, Any]) -> None:
    """Raise ConfigError for parameters of the frontend that neither a server nor `LLM` can use."""
    if "output_kind" in params:
        raise ConfigError(f"{path}.output_kind: has no effect in this stage; remove it")
    structured = params.get("structured_outputs")
    if structured is not None and not isinstance(structured, StructuredOutputsParams):
        raise ConfigError(f"{path}.structured_outputs: is set by each request; remove it")


def _check_params_of_chats(pipeline: PipelineSpec, config: OmniConfig) -> None:
    """Raise ConfigError for parameters of the frontend that cannot be defaults of a chat request.

    `logprobs` of a chat is a flag, whose number is another field of the request. `LLM` uses all of them.
    """
    if pipeline.stage(pipeline.frontend).params != SAMPLING_PARAMS:
        return
    for field in config.stage(pipeline.frontend).params:
        path = f"stages.{pipeline.frontend}.params.{field}"
        if field not in ChatCompletionRequest.model_fields:
            raise ConfigError(f"{path}: has no effect in a server; remove it")
        if field == "logprobs":
            raise ConfigError(f"{path}: is set by each request of a server; remove it")


def _check_folder(key: str, folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{key}: '{existing}' is not a folder; name another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: this user may not write in '{existing}'; name another folder")


def _plan(
    model: str,
    family: ModelFamily,
    pipeline: PipelineSpec,
    hf_config: Any,
    config: OmniConfig,
    text_args: Mapping[str, Any],
    machine: Machine,
) -> Plan:
    return make_plan(
        model=model,
        family=family.name,
        pipeline=pipeline,
        config=config,
        text_args=text_args,
        machine=machine,
        facts=model_facts(model, family, hf_config, resolved_params(pipeline, config), text_args),
    )
