"""Reads and checks the options of a request, from the fields of a body or from keyword arguments.

The options are modalities, fields that the model declares, chunk sizes, and parameters of each stage. A request sets
the parameters of a stage in a field named after the stage, e.g. `"talker": {"temperature": 0.5}`, or in
`sampling_params_list`, which has one entry per stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from vllm_omni_ext.config.checks import ADAPTIVE, chunk_value
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.plugins.runtime import Capabilities, ModelRuntime, RequestOptions
from vllm_omni_ext.plugins.spec import LOGPROBS, SAMPLING_PARAMS, param_names, resolve
from vllm_omni_ext.topology.plan import Plan, StagePlan

MODALITIES, CHUNKS = "modalities", "chunks"
LIST = "sampling_params_list"
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that a message to an engine can contain."""

SEED = "seed"
_INTEGER = Annotated[int, Field(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]


def _type(kind: Any, expected: str) -> tuple[TypeAdapter[Any], str]:
    return TypeAdapter(kind, config=ConfigDict(strict=True)), expected


_NUMBER = _type(Annotated[float, Field(allow_inf_nan=False)], "a number")
_INT64 = _type(_INTEGER, "an integer of 64 bits")
_FLAG = _type(bool, "true or false")

STAGE_SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("top_k", SEED, "max_tokens", "min_tokens"), _INT64),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _NUMBER),
}
"""Fields of vLLM's `SamplingParams` that a request may set for a stage: (type, name of the type in errors) by field."""

FRONTEND_SAMPLING = STAGE_SAMPLING | {
    "stop": _type(str | list[str], "a text or a list of texts"),
    "stop_token_ids": _type(list[_INTEGER], "a list of token ids"),
    "ignore_eos": _FLAG,
}
"""Fields of `SamplingParams` that a request may set for the frontend (the stage that writes text), as STAGE_SAMPLING.

Each of them is also a field of vLLM's `ChatCompletionRequest`."""

IGNORED = {"detokenize": _FLAG}
"""Fields of `sampling_params_list` that are checked but have no effect: clients of other servers send them."""

Values = dict[str, tuple[str, Any]]
"""Parameters of a stage: (full name in the request, value) by key, e.g. "temperature": ("talker.temperature", 0.5)."""


def read_modalities(requested: Any, capabilities: Capabilities) -> tuple[str, ...]:
    """Return the modalities of an answer, without duplicates.

    Args:
        requested: the request's `modalities`; None: the model's default is returned.

    Raises:
        RequestError: `requested` is not a list, is empty, or contains an unknown name.
    """
    if requested is None:
        return capabilities.default_modalities
    allowed = ", ".join(capabilities.modalities)
    if not isinstance(requested, list | tuple) or not all(isinstance(name, str) for name in requested):
        raise RequestError(f"modalities: must be a list of names out of {allowed}", parameter=MODALITIES)
    for name in requested:
        if name not in capabilities.modalities:
            raise RequestError(f"modalities: '{name:.100}' is not available; use {allowed}", parameter=MODALITIES)
    if not requested:
        raise RequestError("modalities: name at least one", parameter=MODALITIES)
    return tuple(dict.fromkeys(requested))


def read_chunks(requested: Any, configured: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's chunk sizes by edge (a transfer of data from one stage to another, e.g. "frames").

    Args:
        requested: the request's `chunks`; None: {} is returned.
        configured: `Plan.chunks`: the configured sizes of all edges that transfer data in chunks.

    Raises:
        RequestError: `requested` is not a mapping, or has an unknown edge or a wrong value; names the entry.
    """
    if requested is None:
        return {}
    if not isinstance(requested, Mapping):
        raise RequestError('chunks: must be an object such as {"frames": [4, 25]}', parameter=CHUNKS)
    if requested and not configured.keys() - {ADAPTIVE}:
        raise RequestError("chunks: this model hands nothing over in chunks", parameter=CHUNKS)
    for key, value in requested.items():
        name = f"{CHUNKS}.{key!s:.100}"
        if key not in configured:
            raise RequestError(f"{name}: is unknown; use one of {', '.join(configured)}", parameter=name)
        try:
            chunk_value(key, value)
        except ValueError as err:
            raise RequestError(f"{name}: {err}", parameter=name) from None
    return requested


class RequestFields:
    """Reads and checks the request fields that a model declares in `ModelRuntime.fields`."""

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kind = kind
        self._fields: dict[str, str] = {}
        for field, info in kind.model_fields.items():
            alias = info.validation_alias
            others = alias.choices if isinstance(alias, AliasChoices) else [alias]
            self._fields |= {field: field} | {other: field for other in others if isinstance(other, str)}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, and their aliases."""
        return tuple(self._fields)

    def read(self, requested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Check the fields of a request, and return their values.

        Args:
            requested: values by their full name in the request, e.g. "audio.voice", where "voice" is the field.
                Several names (aliases) may denote the same field; None is as if the name were missing.

        Returns:
            (checked values by field, full name in the request by field)

        Raises:
            RequestError: a field is unknown or invalid, or two names of one field have different values; the error
                contains its name in the request.
        """
        values: dict[str, Any] = {}
        paths: dict[str, str] = {}
        for path, value in requested.items():
            field = self._fields.get(path.rpartition(".")[2])
            if field is None:
                allowed_names = ", ".join(self._fields) or "none"
                raise RequestError(f"{path}: is unknown; fields of this model: {allowed_names}", parameter=path)
            if value is None:
                continue
            if field not in values:
                values[field], paths[field] = value, path
            elif values[field] != value:
                raise RequestError(f"{path}: has another value than '{paths[field]}'; set one of them", parameter=path)
        try:
            checked = self._kind.model_validate(values, by_name=True, by_alias=False)
        except ValidationError as err:
            first = err.errors()[0]
            field, *inside = [str(part) for part in first["loc"]] or [""]
            name = ".".join([paths.get(field, field), *inside])
            message = first["msg"].removeprefix("Value error, ")
            raise RequestError(f"{name}: {message}, got {first['input']!r:.100}", parameter=name) from err
        return {field: getattr(checked, field) for field in values}, paths


def check(runtime: ModelRuntime, options: RequestOptions, paths: Mapping[str, str]) -> None:
    """Validate options with `ModelRuntime.validate`.

    Args:
        paths: full names in the request by field, e.g. {"voice": "audio.voice"}.

    Raises:
        RequestError: an option is invalid; `parameter` is the field's full name in the request.
    """
    try:
        runtime.validate(options)
    except RequestError as err:
        if err.parameter not in paths:
            raise
        raise RequestError(str(err), parameter=paths[err.parameter]) from err


def from_keywords(
    runtime: ModelRuntime,
    capabilities: Capabilities,
    configured: Mapping[str, Any],
    *,
    modalities: Sequence[str] | None,
    chunks: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> RequestOptions:
    """Return the checked options of a request of the Python API.

    Args:
        configured: `Plan.chunks`: the configured chunk sizes by edge (see `read_chunks`).
        fields: values of the fields that the model declares in `ModelRuntime.fields`, by name.

    Raises:
        RequestError: an option is unknown or invalid.
    """
    values, paths = RequestFields(runtime.fields).read(fields)
    options = RequestOptions(
        modalities=read_modalities(modalities, capabilities), chunks=read_chunks(chunks, configured), fields=values
    )
    check(runtime, options, paths)
    return options


def read_params(
    plan: Plan,
    body: Mapping[str, Any],
    *,
    seed: int | None,
    nth: int = 0,
    chat: bool = False,
    text_only: bool = False,
) -> dict[str, Any]:
    """Return the parameters, of the stage's own type, of each stage for which the request sets a parameter.

    A field named after the stage has precedence over the stage's entry in `sampling_params_list`, and the entry has
    precedence over the request's `seed`.

    Args:
        body: fields of the request that vLLM does not read, among them the fields named after stages.
        seed: the request's `seed`.
        nth: number of the answer, if a request has several answers. It is added to each seed, also to a configured one.
        chat: the body is a chat request, of whose own fields vLLM makes the sampling parameters of the frontend (see
            `apply_to_frontend`); the result has no entry for the frontend.
        text_only: the answer is text. `seed` is not set in a stage with a type of parameters of its own, which may
            refuse a seed that vLLM accepts for texts.

    Raises:
        RequestError: a parameter is invalid; the error names it, e.g. `talker.top_k`, `sampling_params_list[1].top_k`.
    """
    listed = _read_list(plan, body.get(LIST))
    found: dict[str, Any] = {}
    for stage in plan.model_stages():
        name, names = stage.model_stage, stage_param_names(stage)
        if chat and is_sampled_frontend(plan, stage):
            continue
        if not names:
            _refuse_params(name, body.get(name))
            continue
        takes_seed = SEED in names and not (text_only and stage.params_type != SAMPLING_PARAMS)
        requested: Values = {SEED: (SEED, seed)} if seed is not None and takes_seed else {}
        requested |= listed.get(name, {}) | _check_types(name, body.get(name), stage, STAGE_SAMPLING)
        path, first = requested.get(SEED, (name, stage.params.get(SEED)))
        if nth and first is not None:
            requested[SEED] = path, (first + nth) % (LARGEST_INTEGER + 1)
        if requested:
            found[name] = _build(name, stage, stage.params, requested)
    return found


def _refuse_params(name: str, params: Any) -> None:
    if params:
        raise RequestError(f"{name}: this stage takes no parameters", parameter=name)


def stage_params(stage: StagePlan, params: Any, configured: Mapping[str, Any], *, frontend: bool = False) -> Any:
    """Return the parameters of a stage for the Python API.

    Args:
        params: an object of the stage's parameter type, or a mapping of single parameters.
        configured: parameters from the stage config, used if the mapping does not contain them.
        frontend: the stage writes the text of the answer; log probabilities of other stages are not returned.

    Raises:
        RequestError: a parameter is invalid; the error names the stage or the parameter, e.g. `talker.top_k`.
    """
    kind, name = resolve(stage.params_type), stage.model_stage
    if not stage_param_names(stage):
        _refuse_params(name, params)
    if isinstance(params, kind):
        for field in () if frontend else LOGPROBS:
            if getattr(params, field, None) is not None:
                raise RequestError(f"{name}.{field}: is not returned for this stage", parameter=f"{name}.{field}")
        return params
    if not isinstance(params, Mapping):
        raise RequestError(f"{name}: must be {kind.__name__} or a dict, got {params!r:.100}", parameter=name)
    return _build(name, stage, configured, _check_types(name, dict(params), stage, FRONTEND_SAMPLING))


def is_sampled_frontend(plan: Plan, stage: StagePlan) -> bool:
    """Return whether a stage is the frontend and takes vLLM's sampling parameters."""
    return stage.model_stage == plan.frontend().model_stage and stage.params_type == SAMPLING_PARAMS


def apply_to_frontend(plan: Plan, request: ChatCompletionRequest) -> None:
    """Copy the parameters of the frontend (the stage that writes text) into the fields of a chat request, in place.

    A field named after the frontend has precedence over the request's own fields (e.g. `temperature`), over the
    frontend's entry in `sampling_params_list`, and over the stage config, in this order. A field of the request that is
    null is as if it were missing.

    Raises:
        RequestError: a parameter is invalid, or is set both in the field named after the frontend and in the request's
            own field (allowed for `seed`); the error names the parameter.
    """
    frontend, extra = plan.frontend(), request.model_extra or {}
    name = frontend.model_stage
    listed = _read_list(plan, extra.get(LIST)).get(name, {})
    named: Values = {}
    if is_sampled_frontend(plan, frontend):
        named = _check_types(name, extra.get(name), frontend, FRONTEND_SAMPLING)
    _build(name, frontend, {}, listed | named)
    explicit = {key for key in request.model_fields_set if getattr(request, key) is not None}
    if request.max_completion_tokens is not None:
        explicit.add("max_tokens")
    if twice := sorted(named.keys() & explicit - {SEED}):
        raise RequestError(f"{name}.{twice[0]}: is set twice, also as '{twice[0]}'", parameter=f"{name}.{twice[0]}")
    values = {**frontend.sampling, **{key: value for key, (_, value) in listed.items()}}
    for key in values.keys() & type(request).model_fields.keys() - explicit:
        setattr(request, key, values[key])
    for key, (_, value) in named.items():
        setattr(request, key, value)


def _read_list(plan: Plan, entries: Any) -> dict[str, Values]:
    """Return the parameters in `sampling_params_list`, by stage; {} if `entries` is None.

    Entries for stages without parameters are checked, and have no effect.

    Raises:
        RequestError: the list has too many entries, or an entry is invalid.
    """
    if entries is None:
        return {}
    stages = plan.model_stages()
    if not isinstance(entries, list) or len(entries) > len(stages):
        names = ", ".join(stage.model_stage for stage in stages)
        raise RequestError(
            f"{LIST}: must be a list with one object for each of {names}; the last ones may be missing", parameter=LIST
        )
    found: dict[str, Values] = {}
    for index, (stage, entry) in enumerate(zip(stages, entries, strict=False)):
        types = FRONTEND_SAMPLING if stage.model_stage == plan.frontend().model_stage else STAGE_SAMPLING
        requested = _check_types(f"{LIST}[{index}]", entry, stage, types | IGNORED)
        found[stage.model_stage] = {key: each for key, each in requested.items() if key not in IGNORED}
    return found


def stage_param_names(stage: StagePlan) -> tuple[str, ...]:
    """Return the names of the parameters that a request can set for a stage; empty for a pooling engine."""
    if stage.params_type != SAMPLING_PARAMS:
        return param_names(stage.params_type)
    return () if stage.engine_args.get("runner") == "pooling" else tuple(STAGE_SAMPLING)


def _check_types(path: str, params: Any, stage: StagePlan, types: Mapping[str, tuple[TypeAdapter[Any], str]]) -> Values:
    """Check the names and types of a stage's parameters in a request, and return the parameters.

    Args:
        path: full name in the request of the object with the parameters.
        params: the object; None: {} is returned.
        types: (type, name of the type in errors) by parameter, for a stage that takes vLLM's sampling parameters.

    Raises:
        RequestError: a name is unknown, or a value has a wrong type.
    """
    if params is None:
        return {}
    sampled = stage.params_type == SAMPLING_PARAMS
    names = tuple(types) if sampled else stage_param_names(stage)
    if not isinstance(params, dict):
        raise RequestError(f"{path}: must be an object with any of {', '.join(names)}", parameter=path)
    values: Values = {}
    for key, value in params.items():
        name = f"{path}.{key}"
        if key not in names and (sampled or key not in IGNORED):
            raise RequestError(f"{name}: is unknown; use one of {', '.join(names)}", parameter=name)
        if sampled:
            adapter, expected = types[key]
            try:
                adapter.validate_python(value)
            except ValidationError as err:
                raise RequestError(f"{name}: must be {expected}, got {value!r:.100}", parameter=name) from err
        values[key] = name, value
    return values


def _build(name: str, stage: StagePlan, configured: Mapping[str, Any], requested: Values) -> Any:
    """Return a stage's parameters as an object of `StagePlan.params_type`.

    Args:
        name: name of the stage in the request, for errors.
        configured: parameters of the stage config, used if `requested` does not contain them.

    Raises:
        RequestError: a parameter is invalid; the error contains its full name in the request.
    """
    values = {**configured, **{key: value for key, (_, value) in requested.items()}}
    kind = resolve(stage.params_type)
    try:
        return kind(**values) if stage.params_type == SAMPLING_PARAMS else msgspec.convert(values, kind)
    except (VLLMValidationError, ValueError) as err:  # msgspec's errors are ValueErrors too
        message, key = str(err.args[0]), getattr(err, "parameter", None)
        if key not in requested:  # vLLM and msgspec name the field in the text
            key = next((each for each in requested if each in str(err)), None)
        path = requested[key][0] if key else name
        raise RequestError(f"{path}: {message}", parameter=path) from err
