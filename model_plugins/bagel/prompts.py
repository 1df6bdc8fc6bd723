"""What a request's rows see before the image or the reply begins, as segments of three kinds.

Pure data up to the ids and pixels: nothing here computes with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from PIL import Image
from torch import Tensor

from vllm_omni_ext.model_plugins.bagel import images
from vllm_omni_ext.model_plugins.bagel.errors import ParameterError
from vllm_omni_ext.model_plugins.bagel.sizes import BagelSizes
from vllm_omni_ext.model_plugins.bagel.tokens import Tokens

Part = str | Image.Image
"""What a prompt consists of."""

MARKERS = 2
"""Tokens around an image."""

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
"""The system prompts that the model was trained with; every character counts."""


@dataclass(frozen=True, eq=False)
class TextSegment:
    """A text between its start and its end; causal, one position for each token."""

    ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class VitSegment:
    """A picture as the ViT sees it; one position in all.

    Attributes:
        patches: `[n, patch * patch * 3]` float32.
        places: `[n]` int64, in the table of patch positions.
    """

    patches: Tensor = field(repr=False)
    places: Tensor = field(repr=False)

    @property
    def length(self) -> int:
        """Tokens, the markers included."""
        return self.patches.shape[0] + MARKERS


@dataclass(frozen=True, eq=False)
class VaeSegment:
    """A picture as latents without noise; one position in all.

    Attributes:
        pixels: `[3, height, width]` float32 from -1 to 1.
        rows, columns: of latent tokens.
    """

    pixels: Tensor = field(repr=False)
    rows: int
    columns: int

    @property
    def length(self) -> int:
        """Tokens, the markers included."""
        return self.rows * self.columns + MARKERS


Segment = TextSegment | VitSegment | VaeSegment
Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class ImagePlan:
    """What the branches of an image request see.

    Attributes:
        cond: everything.
        text: everything but the last text; guidance leads away from what it predicts.
        img: everything but the pictures; as `text`, for guidance by pictures.
        size: height and width of the last picture after its resize, in pixels; None if there was no picture.
    """

    cond: Segments
    text: Segments
    img: Segments
    size: tuple[int, int] | None = None

    def branch(self, name: str) -> Segments:
        """What the branch of that name sees: "cond", "text" or "img"."""
        return {"cond": self.cond, "text": self.text, "img": self.img}[name]

    def with_thought(self, thought: TextSegment) -> ImagePlan:
        """The same after the model has thought; guidance leads away from the thought too."""
        return replace(self, cond=(*self.cond, thought))


class Prompts:
    """Makes segments of what users send."""

    def __init__(self, tokens: Tokens, sizes: BagelSizes) -> None:
        self._tokens, self._sizes = tokens, sizes

    def image(self, parts: Sequence[Part], *, think: bool = False) -> ImagePlan:
        """Plan an image from texts and pictures in their order.

        Without pictures this is text to image, with them an edit. ParameterError if there is nothing in it.
        """
        cond: Segments = (self.text(THINK_THEN_DRAW),) if think else ()
        text: Segments = ()
        img, size = cond, None
        for part in _checked(parts):
            if isinstance(part, str):
                segment = self.text(part)
                text, cond, img = cond, (*cond, segment), (*img, segment)
            else:
                picture = self._resized(part)
                size = picture.height, picture.width
                cond = (*cond, self.latents(picture), self.patches(picture))
                text = cond
        return ImagePlan(cond, text, img, size)

    def reply(self, parts: Sequence[Part], *, think: bool = False) -> Segments:
        """Plan a text reply to texts and pictures in their order; pictures are seen by the ViT only."""
        found: Segments = (self.text(THINK_THEN_ANSWER),) if think else ()
        for part in _checked(parts):
            found = (*found, self.text(part) if isinstance(part, str) else self.patches(self._resized(part)))
        return found

    def text(self, text: str) -> TextSegment:
        """A text."""
        return TextSegment(self._tokens.text(text))

    def patches(self, picture: Image.Image) -> VitSegment:
        """The ViT's view of a picture that has been resized for the autoencoder, which it is resized from."""
        vit = self._sizes.vit
        pixels = images.to_pixels(images.resize(picture, self._sizes.vit_resize))
        grid = pixels.shape[1] // vit.patch, pixels.shape[2] // vit.patch
        return VitSegment(images.to_patches(pixels, vit.patch), images.places(*grid, vit.side))

    def latents(self, picture: Image.Image) -> VaeSegment:
        """The autoencoder's view of a resized picture. The rule is applied again: it need not give the same size."""
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
