"""`RequestOptions` from the fields of a body, or from keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.plugins.runtime import Capabilities, ModelRuntime, RequestOptions

MODALITIES, CHUNKS = "modalities", "chunks"


def read_modalities(requested: Any, capabilities: Capabilities) -> tuple[str, ...]:
    """Return the modalities of an answer; None takes the model's default.

    Raises:
        RequestError: the model has no such modality.
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


def read_chunks(requested: Any) -> Mapping[str, Any]:
    """Return a request's chunk sizes; the model checks their values."""
    if requested is not None and not isinstance(requested, Mapping):
        raise RequestError('chunks: must be an object such as {"frames": [4, 25]}', parameter=CHUNKS)
    return requested or {}


class RequestFields:
    """The request fields that a model declares.

    Args:
        kind: `ModelRuntime.fields`.
    """

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kind = kind
        self._fields: dict[str, str] = {}
        for field, info in kind.model_fields.items():
            alias = info.validation_alias
            others = alias.choices if isinstance(alias, AliasChoices) else [alias]
            self._fields |= {field: field} | {other: field for other in others if isinstance(other, str)}

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which a request may have a field."""
        return tuple(self._fields)

    def read(self, requested: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Read the fields of a request.

        Args:
            requested: values by their name in the request; a dotted name ends with the name of the field. The first
                value of a field counts; None counts as no value.

        Returns:
            (values by field, name in the request by field)

        Raises:
            RequestError: a field is unknown or wrong; named as in the request.
        """
        values: dict[str, Any] = {}
        paths: dict[str, str] = {}
        for path, value in requested.items():
            field = self._fields.get(path.rpartition(".")[2])
            if field is None:
                allowed_names = ", ".join(self._fields) or "none"
                raise RequestError(f"{path}: is unknown; fields of this model: {allowed_names}", parameter=path)
            if value is not None and field not in values:
                values[field], paths[field] = value, path
        try:
            checked = self._kind.model_validate(values, by_name=True, by_alias=False)
        except ValidationError as err:
            raise _refusal(err, paths) from err
        return {field: getattr(checked, field) for field in values}, paths


def check(runtime: ModelRuntime, options: RequestOptions, paths: Mapping[str, str]) -> None:
    """Let the model check options; errors name a field as in the request.

    Args:
        paths: names in the request by field.
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
    *,
    modalities: Sequence[str] | None,
    chunks: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> RequestOptions:
    """Return checked options.

    Raises:
        RequestError: a value is unknown or wrong.
    """
    values, paths = RequestFields(runtime.fields).read(fields)
    options = RequestOptions(
        modalities=read_modalities(modalities, capabilities), chunks=read_chunks(chunks), fields=values
    )
    check(runtime, options, paths)
    return options


def _refusal(error: ValidationError, paths: Mapping[str, str]) -> RequestError:
    """Return the first validation error as a RequestError."""
    first = error.errors()[0]
    field, *inside = [str(part) for part in first["loc"]] or [""]
    name = ".".join([paths.get(field, field), *inside])
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{name}: {message}, got {first['input']!r:.100}", parameter=name)
