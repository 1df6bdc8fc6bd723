"""Messages between the flow and the stage `dit`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

AR, DIT = "ar", "dit"
"""Names of the stages."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class DitParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the stage `dit`, with their names in the reference implementation.

    None: the default of text to image or of an edit (`parameters.image_parameters`, which checks the values too).
    """

    height: Positive | None = None
    width: Positive | None = None
    num_timesteps: Annotated[int, msgspec.Meta(ge=2, le=1000)] | None = None
    timestep_shift: Annotated[float, msgspec.Meta(gt=0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    cfg_text_scale: float | None = None
    cfg_img_scale: float | None = None
    cfg_interval: tuple[float, float] | None = None
    cfg_renorm_type: Literal["global", "channel", "text_channel"] | None = None
    cfg_renorm_min: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    think: bool | None = None
    max_think_token_n: Positive | None = None


class Text(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """A text of a prompt: its token ids, with the start and end ids around them."""

    ids: list[int]


class Picture(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    """A picture of a prompt, resized for the autoencoder: uint8 [height, width, 3] RGB, row by row."""

    height: int
    width: int
    pixels: bytes


Part = Text | Picture


def last_size(parts: Sequence[Part]) -> tuple[int, int] | None:
    """Return height and width of the last picture in pixels; None if there is no picture."""
    sizes = [(part.height, part.width) for part in parts if isinstance(part, Picture)]
    return sizes[-1] if sizes else None


class Draw(msgspec.Struct, frozen=True, kw_only=True, tag="draw"):
    """The message to the stage `dit` that requests one picture. Equal messages give the same picture in every replica.

    Attributes:
        parts: texts and pictures of the client, in order, without the system prompt.
        parameters: parameters of the picture, all of them set by `BagelRuntime`.
        thought: token ids that the stage `ar` generated, without the start id. None: `dit` generates the thought itself
            if `parameters.think` is set.
        previews: number of previews that the stage sends before the picture.
        latent: `Drawn` contains the picture's latent.
    """

    parts: list[Part]
    parameters: DitParams
    thought: list[int] | None = None
    previews: int = 0
    latent: bool = False


class Drawn(msgspec.Struct, frozen=True, kw_only=True, tag="drawn"):
    """The message from the stage `dit` with a finished picture.

    Attributes:
        pixels: uint8 [height, width, 3], row by row.
        latent: float32 [tokens, channels], row by row; None if it was not requested.
        thought: the text of the thought; None for a request without a thought.
        thought_tokens: number of tokens of the thought, without start and end ids.
        seconds: duration of each part of the work: "queue", "prefill", "think", "steps", "vae".
    """

    height: int
    width: int
    pixels: bytes
    latent: bytes | None = None
    thought: str | None = None
    thought_tokens: int = 0
    seconds: dict[str, float] = {}


class Preview(msgspec.Struct, frozen=True, kw_only=True, tag="preview"):
    """The message from the stage `dit` with a preview: the picture that is predicted after some of the denoise steps.

    Attributes:
        number: number of the preview, from 0.
        pixels: uint8 [height, width, 3], row by row.
        done, total: number of completed denoise steps, and of all denoise steps.
    """

    number: int
    height: int
    width: int
    pixels: bytes
    done: int
    total: int


DitAnswer = Drawn | Preview
