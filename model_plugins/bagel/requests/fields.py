"""Defines the fields of a request, and converts them to the parameters of a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, ParameterError, RenormType, image_parameters
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DIT, DitParams

SIZE, WIDTH, HEIGHT, STEPS, TIMESTEPS, SEED, THINK = (
    "size",
    "width",
    "height",
    "num_inference_steps",
    "num_timesteps",
    "seed",
    "think",
)
PREVIEWS, LATENTS, THOUGHT_TOKENS = "previews", "return_latents", "max_think_token_n"
AUTO = "auto"
MOST_PREVIEWS = 16

_SIZE = re.compile(r"\d{1,5}x\d{1,5}")
_Integer = Annotated[int, Field(strict=True)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Flag = Annotated[bool, Field(strict=True)]

REFUSED: Mapping[str, str] = {
    "negative_prompt": "guidance leads away from the prompt's absence, not from another prompt; say in the prompt "
    "what the picture shows",
    "true_cfg_scale": "use cfg_text_scale",
    "strength": "an edit begins with noise; use cfg_img_scale to stay closer to the picture",
    "num_outputs_per_prompt": "use n of /v1/images/generations, or send several requests",
    "num_images_per_prompt": "use n of /v1/images/generations, or send several requests",
    "input_fidelity": "use cfg_img_scale to stay closer to the picture",
    "sigmas": "use num_timesteps and timestep_shift",
}
"""Fields of other servers and libraries that are rejected -> the reason, or the field to use instead."""

_HARMLESS: tuple[Any, ...] = ("", [], 1, 1.0)
"""Values of rejected fields that are accepted, because they have no effect."""


class Fields(BaseModel):
    """Fields of a picture request: the reference's parameters (see `ImageParameters`), also by other servers' names."""

    model_config = ConfigDict(extra="forbid")

    size: str | None = Field(None, description="width x height, or 'auto'")
    height: _Integer | None = None
    width: _Integer | None = None
    num_timesteps: _Integer | None = Field(None, description="points in time, one more than denoise steps")
    num_inference_steps: _Integer | None = Field(None, ge=1, le=999, description="denoise steps: num_timesteps - 1")
    timestep_shift: _Number | None = None
    seed: _Integer | None = None
    cfg_text_scale: _Number | None = Field(None, validation_alias=AliasChoices("cfg_text_scale", "guidance_scale"))
    cfg_img_scale: _Number | None = Field(
        None, validation_alias=AliasChoices("cfg_img_scale", "guidance_scale_2", "image_guidance_scale")
    )
    cfg_interval: list[_Number] | None = Field(None, min_length=2, max_length=2)
    cfg_renorm_type: RenormType | None = None
    cfg_renorm_min: _Number | None = None
    think: _Flag | None = Field(None, description="the model writes a plan of the picture first")
    max_think_token_n: _Integer | None = None
    previews: _Integer | None = Field(None, ge=0, le=MOST_PREVIEWS, description="previews of a streamed picture")
    return_latents: _Flag | None = Field(None, description="only for LLM: outputs have `latents`")
    negative_prompt: Any = None
    true_cfg_scale: Any = None
    strength: Any = None
    num_outputs_per_prompt: Any = None
    num_images_per_prompt: Any = None
    input_fidelity: Any = None
    sigmas: Any = None

    @field_validator("size")
    @classmethod
    def _two_numbers(cls, value: str | None) -> str | None:
        if value is not None and value != AUTO and not _SIZE.fullmatch(value):
            raise ValueError(f"must be '{AUTO}' or width x height such as 1024x1024")
        return value

    @field_validator(*REFUSED)
    @classmethod
    def _not_available(cls, value: Any, info: Any) -> Any:
        if value is not None and value not in _HARMLESS:
            raise ValueError(f"is not available; {REFUSED[info.field_name]}")
        return value


@dataclass(frozen=True)
class RequestedParameters:
    """The parameters of a picture that a request or the configuration sets.

    Attributes:
        values: values of the parameters, by their name in `ImageParameters`.
        names: name of each parameter in the request, for errors.
        sized: height and width in pixels that the request itself sets, each None if the request does not set it.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str]
    sized: tuple[int | None, int | None] = (None, None)

    def parameters(self, *, edit: bool) -> ImageParameters:
        """Return all parameters; RequestError for an invalid value, with the field's name in the request."""
        values = {name: value for name, value in self.values.items() if not (edit and name in (HEIGHT, WIDTH))}
        return self.checked(lambda: image_parameters(values, edit=edit))

    def checked(self, compute: Any) -> Any:
        """Call `compute` and return its result; a ParameterError becomes a RequestError with the field's name."""
        try:
            return compute()
        except ParameterError as error:
            raise self.error(error.parameter, str(error).removeprefix(f"{error.parameter}: ")) from error

    def error(self, parameter: str, message: str) -> RequestError:
        """Return an error about a parameter; it contains the name under which the client sent the parameter."""
        request_name = self.names.get(parameter, parameter)
        return RequestError(f"{request_name}: {message}", parameter=request_name)

    def refuse_other_size(self, picture: tuple[int, int]) -> None:
        """Reject a requested size that differs from the edited picture's (height, width) in pixels."""
        for name, requested, side in zip((HEIGHT, WIDTH), self.sized, picture, strict=True):
            if requested is not None and requested != side:
                size = f"{picture[1]}x{picture[0]}"
                raise self.error(name, f"an edit has the size of its picture after resizing, {size}; leave it out")


def requested_parameters(given: Mapping[str, Any], stage: Any, configured: Mapping[str, Any]) -> RequestedParameters:
    """Return the parameters of a picture request. Fields of the request override its object `dit`.

    Args:
        given: fields of the request, by name.
        stage: the request's `DitParams`, which include the configured values; None: only the configured values apply.
        configured: `stages.dit.params` of the stage config.

    Raises:
        RequestError: two fields contradict each other.
    """
    defaults = msgspec.convert(dict(configured), DitParams)
    of_stage = msgspec.structs.asdict(defaults if stage is None else stage)
    values = {name: value for name, value in of_stage.items() if value is not None}
    names = {name: f"{DIT}.{name}" for name in values}
    own = _own(given)
    values |= {name: value for name, (value, _) in own.items()}
    names |= {name: request_name for name, (_, request_name) in own.items()}
    unchanged = msgspec.structs.asdict(defaults)
    height, width = (
        values.get(name) if name in own or values.get(name) != unchanged[name] else None for name in (HEIGHT, WIDTH)
    )
    return RequestedParameters(values, names, (height, width))


def _own(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return (value, name in the request) of each parameter that a request's fields set, by parameter name."""
    names = set(DitParams.__struct_fields__)
    found = {name: (value, name) for name, value in given.items() if name in names and value is not None}
    if (steps := given.get(STEPS)) is not None:
        _add(found, TIMESTEPS, steps + 1, STEPS)
    if (size := given.get(SIZE)) not in (None, AUTO):
        width, height = (int(side) for side in size.split("x"))
        _add(found, WIDTH, width, SIZE)
        _add(found, HEIGHT, height, SIZE)
    return found


def _add(found: dict[str, tuple[Any, str]], name: str, value: Any, request_name: str) -> None:
    if name in found and found[name][0] != value:
        raise RequestError(
            f"{request_name}: contradicts {name}={found[name][0]}; give one of them", parameter=request_name
        )
    found[name] = value, request_name
