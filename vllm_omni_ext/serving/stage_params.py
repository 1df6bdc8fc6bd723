"""Parameters by stage in a request: `"talker": {"temperature": 0.5}`, or a list with one entry per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.plugins.params import param_names
from vllm_omni_ext.plugins.spec import SAMPLING_PARAMS, resolve
from vllm_omni_ext.topology.plan import Plan, StagePlan

LIST = "sampling_params_list"
LARGEST_INTEGER = 2**63 - 1
"""Largest integer in a message to an engine."""

SEED = "seed"
_Integer = Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
_Number = Annotated[float, Field(description="a number", allow_inf_nan=False)]
_Int64 = Annotated[_Integer, Field(description="an integer of 64 bits")]


class StageSampling(BaseModel):
    """The fields of vLLM's `SamplingParams` that a request may set for a stage. Errors show the field descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: _Number = 0.0
    top_p: _Number = 0.0
    top_k: _Int64 = 0
    min_p: _Number = 0.0
    seed: _Int64 = 0
    max_tokens: _Int64 = 0
    min_tokens: _Int64 = 0
    repetition_penalty: _Number = 0.0
    presence_penalty: _Number = 0.0
    frequency_penalty: _Number = 0.0


class FrontendSampling(StageSampling):
    """The fields that a list entry may set for the frontend; each is also a field of the request."""

    stop: Annotated[str | list[str], Field(description="a text or a list of texts")] = ""
    stop_token_ids: Annotated[list[_Integer], Field(description="a list of token ids")] = []
    ignore_eos: Annotated[bool, Field(description="true or false")] = False


class _Ignored(BaseModel):
    """Accepted in the list because clients of other servers send these fields; the stages set them themselves."""

    detokenize: Annotated[bool, Field(description="true or false")] = False


class _ListedSampling(StageSampling, _Ignored):
    pass


class _ListedFrontend(FrontendSampling, _Ignored):
    pass


@dataclass(frozen=True)
class RequestValue:
    """One value of a request, with its full name in the request."""

    name: str
    value: Any


RequestValues = dict[str, RequestValue]


def named_stages(plan: Plan) -> list[StagePlan]:
    """Return the stages whose parameters are a field of a request, with the stage's name.

    The frontend is left out if it takes vLLM's sampling parameters: vLLM reads those from the request itself.
    """
    frontend = plan.frontend().model_stage
    stages = plan.model_stages()
    return [stage for stage in stages if stage.model_stage != frontend or stage.params_type != SAMPLING_PARAMS]


def read_params(plan: Plan, body: Mapping[str, Any], *, seed: int | None) -> dict[str, Any]:
    """Read parameters by stage, for stages where the request changes the configured ones.

    `talker.x` overrides the stage's list entry, which overrides the request's own seed.

    Args:
        body: the request's fields that are not vLLM's, such as the names of stages.
        seed: the request's own seed; stages without another seed use it too.

    Returns:
        `SamplingParams`, or the stage's own type, by stage.

    Raises:
        RequestError: names `stage.key`, or the key of the list.
    """
    listed = _read_list(plan, body.get(LIST))
    found: dict[str, Any] = {}
    for stage in named_stages(plan):
        name = stage.model_stage
        requested = {SEED: RequestValue(SEED, seed)} if seed is not None and SEED in stage_param_names(stage) else {}
        requested |= listed.get(name, {}) | _check_types(name, body.get(name), stage, StageSampling)
        if not requested:
            continue
        built = _build(name, stage, stage.params, requested)
        if stage.params or stage.params_type != SAMPLING_PARAMS:  # else there is nothing to set
            found[name] = built
    return found


def stage_params(stage: StagePlan, params: Any, configured: Mapping[str, Any]) -> Any:
    """Return a stage's parameters from an object of their type, or from a mapping that overrides the configured ones.

    Raises:
        RequestError: names `stage.key`, or the stage.
    """
    kind, name = resolve(stage.params_type), stage.model_stage
    if isinstance(params, kind):
        return params
    if not isinstance(params, Mapping):
        raise RequestError(f"{name}: must be {kind.__name__} or a dict, got {params!r:.100}", parameter=name)
    return _build(name, stage, configured, _check_types(name, dict(params), stage, FrontendSampling))


def apply_to_frontend(plan: Plan, request: ChatCompletionRequest) -> None:
    """Copy the frontend's parameters into the request, in place: the list's entry, else those of the stage config.

    Fields that the request has keep their values.

    Raises:
        RequestError: names the key of the list.
    """
    frontend = plan.frontend()
    requested = _read_list(plan, (request.model_extra or {}).get(LIST)).get(frontend.model_stage, {})
    _build(frontend.model_stage, frontend, {}, requested)
    explicit = request.model_fields_set | ({"max_tokens"} if request.max_completion_tokens is not None else set())
    values = {**frontend.sampling, **{key: each.value for key, each in requested.items()}}
    for key in values.keys() & type(request).model_fields.keys() - explicit:
        setattr(request, key, values[key])


def _read_list(plan: Plan, entries: Any) -> dict[str, RequestValues]:
    """Return the list's settings by stage."""
    if entries is None:
        return {}
    stages = plan.model_stages()
    if not isinstance(entries, list) or len(entries) > len(stages):
        names = ", ".join(stage.model_stage for stage in stages)
        raise RequestError(
            f"{LIST}: must be a list with one object for each of {names}; the last ones may be missing", parameter=LIST
        )
    found: dict[str, RequestValues] = {}
    for index, (stage, entry) in enumerate(zip(stages, entries, strict=False)):
        kind = _ListedFrontend if stage.model_stage == plan.frontend().model_stage else _ListedSampling
        requested = _check_types(f"{LIST}[{index}]", entry, stage, kind)
        found[stage.model_stage] = {key: each for key, each in requested.items() if key not in _Ignored.model_fields}
    return found


def stage_param_names(stage: StagePlan) -> tuple[str, ...]:
    """Return the names that a request may set for a stage."""
    if stage.params_type == SAMPLING_PARAMS:
        return tuple(StageSampling.model_fields)
    return param_names(stage.params_type)


def _check_types(path: str, params: Any, stage: StagePlan, kind: type[StageSampling]) -> RequestValues:
    """Return the values of a request's object by name, with their types checked."""
    if params is None:
        return {}
    sampled = stage.params_type == SAMPLING_PARAMS
    names = tuple(kind.model_fields) if sampled else stage_param_names(stage)
    if not isinstance(params, dict):
        raise RequestError(f"{path}: must be an object with any of {', '.join(names)}", parameter=path)
    for key in params:
        if key not in names and (sampled or key not in _Ignored.model_fields):
            name = f"{path}.{key}"
            raise RequestError(f"{name}: is unknown; use one of {', '.join(names)}", parameter=name)
    if sampled:
        try:
            kind.model_validate(params)
        except ValidationError as err:
            key = str(err.errors()[0]["loc"][0])
            name, expected = f"{path}.{key}", kind.model_fields[key].description
            raise RequestError(f"{name}: must be {expected}, got {params[key]!r:.100}", parameter=name) from err
    return {key: RequestValue(f"{path}.{key}", value) for key, value in params.items()}


def _build(name: str, stage: StagePlan, configured: Mapping[str, Any], requested: RequestValues) -> Any:
    """Return the parameters of a stage; errors of their type are reported under the field's name in the request."""
    values = {**configured, **{key: each.value for key, each in requested.items()}}
    kind = resolve(stage.params_type)
    try:
        return kind(**values) if stage.params_type == SAMPLING_PARAMS else msgspec.convert(values, kind)
    except VLLMValidationError as err:
        key = err.parameter if err.parameter in requested else _field_named_in(str(err), requested)
        message, cause = str(err.args[0]), err
    except ValueError as other:  # msgspec's errors are ValueErrors too
        key, message, cause = _field_named_in(str(other), requested), str(other), other
    path = requested[key].name if key else name
    raise RequestError(f"{path}: {message}", parameter=path) from cause


def _field_named_in(message: str, requested: RequestValues) -> str | None:
    """Return the field that a message is about: vLLM and msgspec name the field in the text."""
    return next((key for key in requested if key in message), None)
