"""Converts texts and pictures of a request to its prompts. A prompt is a tuple of segments.

A segment is a text, a picture as input of the ViT, or a picture as input of the autoencoder. The model computes the
keys and values of one segment in one pass. Segments are pure data (ids and pixels): the model's weights are not used.
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
"""A text or a picture of a prompt."""

MARKERS = 2
"""Number of marker tokens around an image: one before and one after."""

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
"""The system prompts with which the model was trained; they must match exactly."""


@dataclass(frozen=True, eq=False)
class TextSegment:
    """A text, usually with start and end tokens. Its attention is causal; each token has one position."""

    ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class VitSegment:
    """A picture as input of the ViT; all its tokens have one position.

    Attributes:
        patches: `[n, patch * patch * 3]` float32.
        places: `[n]` int64, indices in the table of patch positions.
    """

    patches: Tensor = field(repr=False)
    places: Tensor = field(repr=False)

    @property
    def length(self) -> int:
        """Number of tokens, including the markers."""
        return self.patches.shape[0] + MARKERS


@dataclass(frozen=True, eq=False)
class VaeSegment:
    """A picture as input of the autoencoder, whose latents get no noise; all its tokens have one position.

    Attributes:
        pixels: `[3, height, width]` float32 from -1 to 1.
        rows, columns: number of rows and columns of latent tokens.
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
    """Prompts of the guidance branches of an image request. The model predicts a velocity with each of them.

    Attributes:
        cond: the whole prompt.
        text: the prompt without its last text. Guidance by text increases the difference between the predictions of
            `cond` and `text`.
        img: the prompt without its pictures. Guidance by pictures increases the difference from the prediction of
            `img`.
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
        """Return the plan with the model's thought at the end of `cond` only, so that guidance includes the thought."""
        return replace(self, cond=(*self.cond, thought))


@dataclass(frozen=True)
class Piece:
    """A text or a picture of an image request, as segments.

    Attributes:
        segments: one segment for a text; a `VaeSegment` and a `VitSegment` for a picture.
        size: height and width of a picture after its resize, in pixels; None for a text.
    """

    segments: Segments
    size: tuple[int, int] | None = None


def image_plan(pieces: Sequence[Piece], system: TextSegment | None = None) -> ImagePlan:
    """Return the prompts of an image request.

    Args:
        pieces: texts and pictures of the request, in order.
        system: system prompt with which the model generates a thought first; None without a thought.
    """
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
    """Converts texts and pictures of a request to segments, with a checkpoint's tokenizer and sizes."""

    def __init__(self, tokens: Tokens, sizes: BagelSizes) -> None:
        self._tokens, self._sizes = tokens, sizes

    def image(self, parts: Sequence[Part], *, think: bool = False) -> ImagePlan:
        """Return the prompts of an image request from texts and pictures, in order.

        Without pictures the request is text to image, with pictures an edit. ParameterError if there are no parts.

        Args:
            parts: texts and pictures.
            think: the prompts begin with the system prompt for a thought.
        """
        pieces = [
            Piece((self.text(part),)) if isinstance(part, str) else self.picture(self._resized(part))
            for part in _checked(parts)
        ]
        return image_plan(pieces, self.text(THINK_THEN_DRAW) if think else None)

    def reply(self, parts: Sequence[Part], *, think: bool = False) -> Segments:
        """Return the prompt of a text reply from texts and pictures, in order; pictures are input of the ViT only."""
        found: Segments = (self.text(THINK_THEN_ANSWER),) if think else ()
        for part in _checked(parts):
            found = (*found, self.text(part) if isinstance(part, str) else self.patches(self._resized(part)))
        return found

    def text(self, text: str) -> TextSegment:
        """Return the segment of a text."""
        return TextSegment(self._tokens.text(text))

    def picture(self, resized: Image.Image) -> Piece:
        """Return the part of a prompt with a picture to edit; `resized`: in RGB, resized for the autoencoder."""
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
        """Return the autoencoder's input for a resized picture.

        As in the reference, the picture is resized a second time, which may change its size.
        """
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
