"""Checks the message of a picture request, converts it to the model's input, and computes the request's costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from PIL import Image

from vllm_omni_ext.model_plugins.bagel import memory
from vllm_omni_ext.model_plugins.bagel.guidance import branch_names
from vllm_omni_ext.model_plugins.bagel.parameters import ImageParameters, ParameterError, image_parameters
from vllm_omni_ext.model_plugins.bagel.prompts import (
    MARKERS,
    THINK_THEN_DRAW,
    ImagePlan,
    Piece,
    Prompts,
    TextSegment,
    image_plan,
)
from vllm_omni_ext.model_plugins.bagel.requests.payloads import Draw, Part, Picture, last_size
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

_CHANNELS = 3


def check(draw: Draw, sizes: BagelSizes) -> ImageParameters:
    """Check a request's parameters, sizes and token ids; return its parameters.

    Raises:
        ValueError: the request is invalid; the message contains the field's name.
    """
    given = {name: value for name, value in msgspec.structs.asdict(draw.parameters).items() if value is not None}
    size = last_size(draw.parts)
    parameters = image_parameters(given, edit=size is not None)
    parameters.image_size(sizes, size)
    if not draw.parts:
        raise ParameterError("prompt: must be at least one text or picture", parameter="prompt")
    if draw.previews < 0:
        raise ValueError(f"previews: must be 0 or more, not {draw.previews}")
    for part in draw.parts:
        if isinstance(part, Picture):
            _check_picture(part, sizes)
        else:
            _check_ids("prompt", part.ids, sizes)
            if not part.ids:
                raise ValueError("prompt: a text has no token ids")
    _check_ids("thought", draw.thought or (), sizes)
    return parameters


def plan(draw: Draw, prompts: Prompts, *, think: bool) -> ImagePlan:
    """Return the prompts of a request's guidance branches, without the thought.

    Args:
        draw: the request's message.
        prompts: creates the model's segments.
        think: the prompts begin with the system prompt for a thought.
    """
    return image_plan([_piece(part, prompts) for part in draw.parts], prompts.text(THINK_THEN_DRAW) if think else None)


def costs(draw: Draw, sizes: BagelSizes, tokens: Tokens, element_bytes: int) -> tuple[int, int]:
    """Return the costs of a request while it runs, for `DitScheduler`, without decoding its pictures.

    Args:
        draw: the request's message.
        sizes, tokens: sizes and tokenizer of the checkpoint.
        element_bytes: bytes of one element of keys and values.

    Returns:
        Bytes of the request's contexts and latent, and tokens that it adds to a denoise step. A thought that is not
        generated yet counts with its greatest length.

    Raises:
        ValueError: as in `check`.
    """
    parameters = check(draw, sizes)
    system = TextSegment(tokens.text(THINK_THEN_DRAW)) if parameters.think else None
    drawn = image_plan([_sized_piece(part, sizes) for part in draw.parts], system)
    if parameters.think:
        length = parameters.max_think_token_n if draw.thought is None else len(draw.thought)
        drawn = drawn.with_thought(_text_of(length + 2))
    names = branch_names(parameters)
    block = memory.image_tokens(sizes, *parameters.image_size(sizes, drawn.size))
    kept = memory.context_tokens(drawn.branch(name) for name in names)
    latent_bytes = (block - MARKERS) * sizes.token_channels * memory.FLOAT32_BYTES
    return kept * memory.kv_bytes_per_token(sizes.llm, element_bytes) + latent_bytes, len(names) * block


def _check_picture(part: Picture, sizes: BagelSizes) -> None:
    """Raise ValueError unless a picture has a size that the resize can give, and the right number of bytes.

    Its sides must be multiples of a latent token's side, and at most `largest_side`.
    """
    step, largest = sizes.token_pixels, sizes.largest_side
    for name, side in (("height", part.height), ("width", part.width)):
        if side < step or side % step or side > largest:
            raise ValueError(f"prompt: the {name} of a picture must be a multiple of {step}, at most {largest}")
    if len(part.pixels) != part.height * part.width * _CHANNELS:
        raise ValueError(f"prompt: a picture of {part.width}x{part.height} pixels has {len(part.pixels)} bytes")


def _check_ids(name: str, ids: Sequence[int], sizes: BagelSizes) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < sizes.llm.vocabulary:
        raise ValueError(f"{name}: token ids must be from 0 to {sizes.llm.vocabulary - 1}")


def _piece(part: Part, prompts: Prompts) -> Piece:
    if isinstance(part, Picture):
        return prompts.picture(Image.frombytes("RGB", (part.width, part.height), part.pixels))
    return Piece((TextSegment(tuple(part.ids)),))


def _sized_piece(part: Part, sizes: BagelSizes) -> Piece:
    """Return a piece for the costs: its segments have the right lengths; a picture's segments have no content."""
    if isinstance(part, Picture):
        size = part.height, part.width
        lengths = memory.latent_tokens(sizes, *size), memory.patch_tokens(sizes, *size)
        return Piece(tuple(_text_of(length) for length in lengths), size)
    return Piece((TextSegment(tuple(part.ids)),))


def _text_of(length: int) -> TextSegment:
    return TextSegment((0,) * length)
