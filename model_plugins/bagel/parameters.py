"""Parameters of an image request, and their allowed values. The names are those of the reference implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes

RenormType = Literal["global", "channel", "text_channel"]

DEFAULT_SIDE = 1024
_INTEGERS = {
    "height": (1, 1 << 20),
    "width": (1, 1 << 20),
    "num_timesteps": (2, 1000),
    "seed": (0, (1 << 63) - 1),
    "max_think_token_n": (1, 1 << 20),
}
"""Smallest and largest value of each integer."""

_EDIT_DEFAULTS: Mapping[str, Any] = {
    "cfg_img_scale": 2.0,
    "cfg_interval": (0.0, 1.0),
    "cfg_renorm_type": "text_channel",
}


class ParameterError(ValueError):
    """A parameter of a request is invalid.

    Args:
        message: the problem, and the allowed values.
        parameter: name of the parameter, as in `ImageParameters`, or "prompt".
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParameters:
    """Parameters of an image; the defaults are those of text to image.

    Attributes:
        height, width: sides of the image in pixels, multiples of a latent token's side. None: 1024, or the model's
            largest side if that is smaller. The image of an edit has the size of its resized picture instead.
        num_timesteps: number of points in time, including that of the image: one more than denoise steps.
        timestep_shift: a value above 1 puts more of the steps near the noise.
        seed: seed of all random numbers.
        cfg_text_scale: strength of guidance by the last text; 1 or less turns all guidance off.
        cfg_img_scale: strength of guidance by pictures, in addition to guidance by text; 1 or less turns it off.
        cfg_interval: guidance applies to times above the first value and up to the second; time decreases from 1
            (noise) to 0.
        cfg_renorm_type: scope in which the length of the guided velocity is limited to the unguided one's: "global",
            the whole image; "channel", each token; "text_channel", each token before guidance by pictures.
        cfg_renorm_min: smallest factor by which that limit reduces the velocity.
        think: whether the model generates a plan (thought) first.
        max_think_token_n: longest thought in tokens, including its start token.
    """

    height: int | None = None
    width: int | None = None
    num_timesteps: int = 50
    timestep_shift: float = 3.0
    seed: int = 0
    cfg_text_scale: float = 4.0
    cfg_img_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.4, 1.0)
    cfg_renorm_type: RenormType = "global"
    cfg_renorm_min: float = 0.0
    think: bool = False
    max_think_token_n: int = 1000

    def __post_init__(self) -> None:
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in ("height", "width"):
                continue
            if type(value) is not int or not least <= value <= most:
                raise _wrong(name, value, f"must be an integer from {least} to {most}")
        for name in ("timestep_shift", "cfg_text_scale", "cfg_img_scale", "cfg_renorm_min"):
            _number(name, getattr(self, name))
        if self.timestep_shift <= 0:
            raise _wrong("timestep_shift", self.timestep_shift, "must be a number above 0")
        if not 0.0 <= self.cfg_renorm_min <= 1.0:
            raise _wrong("cfg_renorm_min", self.cfg_renorm_min, "must be between 0 and 1")
        if self.cfg_renorm_type not in get_args(RenormType):
            allowed = ", ".join(get_args(RenormType))
            raise _wrong("cfg_renorm_type", self.cfg_renorm_type, f"must be one of {allowed}")
        if not isinstance(self.think, bool):
            raise _wrong("think", self.think, "must be true or false")
        if not isinstance(self.cfg_interval, tuple) or len(self.cfg_interval) != 2:
            raise _wrong("cfg_interval", self.cfg_interval, "must be two numbers")
        for bound in self.cfg_interval:
            _number("cfg_interval", bound)
            if not 0.0 <= bound <= 1.0:
                raise _wrong("cfg_interval", self.cfg_interval, "must be two times between 0 and 1")
        if self.cfg_interval[0] > self.cfg_interval[1]:
            raise _wrong("cfg_interval", self.cfg_interval, "must not end before it begins")

    @property
    def evaluations(self) -> int:
        """Number of denoise steps."""
        return self.num_timesteps - 1

    def image_size(self, sizes: BagelSizes, picture: tuple[int, int] | None) -> tuple[int, int]:
        """Return height and width of the image in pixels.

        Args:
            sizes: sizes of the model.
            picture: size of the prompt's last picture after its resize; None if there is no picture.

        Raises:
            ParameterError: the model cannot generate an image of that size.
        """
        if picture is not None:
            return picture
        step, largest = sizes.token_pixels, sizes.largest_side
        default = min(DEFAULT_SIDE, largest)
        size = (default if self.height is None else self.height, default if self.width is None else self.width)
        for name, side in zip(("height", "width"), size, strict=True):
            if side % step or side > largest:
                raise _wrong(name, side, f"must be a multiple of {step}, at most {largest}")
        return size


def image_parameters(given: Mapping[str, Any], *, edit: bool) -> ImageParameters:
    """Return parameters from values by name, and check them.

    Args:
        given: values by the names in `ImageParameters`.
        edit: missing parameters have the defaults of an edit; False: of text to image.

    Raises:
        ParameterError: a name is unknown, or a value is not allowed.
    """
    known = {each.name for each in fields(ImageParameters)}
    for name in given:
        if name not in known:
            raise ParameterError(f"{name}: is not known; use one of {', '.join(sorted(known))}", parameter=name)
    values = {**(_EDIT_DEFAULTS if edit else {}), **given}
    if isinstance(values.get("cfg_interval"), list):
        values["cfg_interval"] = tuple(values["cfg_interval"])
    return ImageParameters(**values)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, value, "must be a number")


def _wrong(name: str, value: Any, what: str) -> ParameterError:
    return ParameterError(f"{name}: {what}, not {value!r}", parameter=name)
