"""Prompts of a request's rows before the image or the reply, as segments of three kinds.

Pure data (ids and pixels): nothing here computes with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from PIL import Image
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.parameters import ParameterError
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

Part = str | Image.Image
"""An element of a prompt."""

MARKERS = 2
"""Number of tokens around an image."""

THINK_THEN_ANSWER = (
    "You should first think about the reasoning process in the mind and then provide the user with the answer. \n"
    "The reasoning process is enclosed within <think> </think> tags, i.e. <think> reasoning process here </think> "
    "answer here"
)
THINK_THEN_DRAW = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, i.e. <think> planning process here </think> "
    "image here"
)
"""The system prompts that the model was trained with, which must match exactly."""


@dataclass(frozen=True, eq=False)
class TextSegment:
    """A text, mostly between its start and end tokens; causal, one position per token."""

    ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class VitSegment:
    """A picture as input of the ViT; the whole picture has one position.

    Attributes:
        patches: `[n, patch * patch * 3]` float32.
        places: `[n]` int64, in the table of patch positions.
    """

    patches: Tensor = field(repr=False)
    places: Tensor = field(repr=False)

    @property
    def length(self) -> int:
        """Number of tokens, including the markers."""
        return self.patches.shape[0] + MARKERS


@dataclass(frozen=True, eq=False)
class VaeSegment:
    """A picture as latents without noise; the whole picture has one position.

    Attributes:
        pixels: `[3, height, width]` float32 from -1 to 1.
        rows, columns: of latent tokens.
    """

    pixels: Tensor = field(repr=False)
    rows: int
    columns: int

    @property
    def length(self) -> int:
        """Number of tokens, including the markers."""
        return self.rows * self.columns + MARKERS


Segment = TextSegment | VitSegment | VaeSegment
Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class ImagePlan:
    """Prompts of the branches of an image request.

    Attributes:
        cond: the whole prompt.
        text: the prompt without its last text; guidance leads away from this branch's prediction.
        img: the prompt without its pictures, for guidance by pictures in the same way.
        size: height and width of the last picture after its resize, in pixels; None if there was no picture.
    """

    cond: Segments
    text: Segments
    img: Segments
    size: tuple[int, int] | None = None

    def branch(self, name: str) -> Segments:
        """Return the prompt of a branch: "cond", "text" or "img"."""
        return {"cond": self.cond, "text": self.text, "img": self.img}[name]

    def with_thought(self, thought: TextSegment) -> ImagePlan:
        """Return the plan after the model has thought; guidance leads away from the thought too."""
        return replace(self, cond=(*self.cond, thought))


@dataclass(frozen=True)
class Piece:
    """A text or a picture of an image request, as segments.

    Attributes:
        segments: one of a text; the latents and the patches of a picture.
        size: height and width of a picture after its resize, in pixels; None for a text.
    """

    segments: Segments
    size: tuple[int, int] | None = None


def image_plan(pieces: Sequence[Piece], system: TextSegment | None = None) -> ImagePlan:
    """Plan an image from its pieces in their order; `system` precedes all prompts of a request that thinks."""
    cond: Segments = () if system is None else (system,)
    text: Segments = ()
    img, size = cond, None
    for piece in pieces:
        before, cond = cond, (*cond, *piece.segments)
        if piece.size is None:
            text, img = before, (*img, *piece.segments)
        else:
            text, size = cond, piece.size
    return ImagePlan(cond, text, img, size)


class Prompts:
    """Turns user input into segments."""

    def __init__(self, tokens: Tokens, sizes: BagelSizes) -> None:
        self._tokens, self._sizes = tokens, sizes

    def image(self, parts: Sequence[Part], *, think: bool = False) -> ImagePlan:
        """Plan an image from texts and pictures in their order.

        Without pictures this is text to image, with pictures an edit. ParameterError if there are no parts.
        """
        pieces = [
            Piece((self.text(part),)) if isinstance(part, str) else self.picture(self._resized(part))
            for part in _checked(parts)
        ]
        return image_plan(pieces, self.text(THINK_THEN_DRAW) if think else None)

    def reply(self, parts: Sequence[Part], *, think: bool = False) -> Segments:
        """Plan a text reply to texts and pictures in their order; only the ViT reads the pictures."""
        found: Segments = (self.text(THINK_THEN_ANSWER),) if think else ()
        for part in _checked(parts):
            found = (*found, self.text(part) if isinstance(part, str) else self.patches(self._resized(part)))
        return found

    def text(self, text: str) -> TextSegment:
        """Return the segment of a text."""
        return TextSegment(self._tokens.text(text))

    def picture(self, resized: Image.Image) -> Piece:
        """Return the piece of a picture that is edited, in RGB and resized for the autoencoder."""
        return Piece((self.latents(resized), self.patches(resized)), (resized.height, resized.width))

    def patches(self, picture: Image.Image) -> VitSegment:
        """Return the ViT's input for a picture that has been resized for the autoencoder."""
        return self.seen(images.resize(picture, self._sizes.vit_resize))

    def seen(self, picture: Image.Image) -> VitSegment:
        """Return the ViT's input for a picture that has been resized for the ViT."""
        vit, pixels = self._sizes.vit, images.to_pixels(picture)
        grid = pixels.shape[1] // vit.patch, pixels.shape[2] // vit.patch
        return VitSegment(images.to_patches(pixels, vit.patch), images.places(*grid, vit.side))

    def latents(self, picture: Image.Image) -> VaeSegment:
        """Return the autoencoder's input for a resized picture. The rule is applied again and may change the size."""
        pixels = images.to_pixels(images.resize(picture, self._sizes.vae_resize))
        of = self._sizes.token_pixels
        return VaeSegment(pixels, pixels.shape[1] // of, pixels.shape[2] // of)

    def _resized(self, picture: Image.Image) -> Image.Image:
        return images.resize(images.to_rgb(picture), self._sizes.vae_resize)


def _checked(parts: Sequence[Part]) -> Sequence[Part]:
    if isinstance(parts, str) or not parts:
        raise ParameterError("prompt: must be a list with at least one text or picture", parameter="prompt")
    for part in parts:
        if not isinstance(part, str | Image.Image):
            kind = type(part).__name__
            raise ParameterError(f"prompt: consists of texts and PIL images, not of {kind}", parameter="prompt")
    return parts
