"""Pictures of digits and of coloured shapes with their names. All randomness is from the given generator."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dev.training.tiny_omni.world import DIGITS, SHAPES

INKS = {
    "red": (220, 30, 30),
    "blue": (30, 50, 220),
    "green": (20, 150, 40),
    "yellow": (240, 225, 30),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
    "orange": (245, 140, 20),
    "purple": (130, 30, 160),
    "pink": (250, 150, 190),
}
SIDES = (64, 96)
"""Sides in pixels: 2 and 3 merged patches."""
SIZES = (0.65, 0.75)
"""Smallest and largest size of the drawn digit or shape, as a share of the picture's side."""
INK_NOISE = 10
GREYS = (90, 170)
GRAIN = 4.0


def picture(random: np.random.Generator) -> tuple[Image.Image, list[str]]:
    """Return a picture with its name: a black digit, or a shape with its colour."""
    side = int(random.choice(SIDES))
    image = Image.new("RGB", (side, side), (int(random.integers(*GREYS)),) * 3)
    colour = list(INKS)[random.integers(len(INKS))]
    ink = tuple(int(np.clip(part + random.integers(-INK_NOISE, INK_NOISE + 1), 0, 255)) for part in INKS[colour])
    size = side * random.uniform(*SIZES)
    corner = random.uniform(0.3, 0.7, 2) * (side - size)
    if random.random() < 0.5:
        digit = int(random.integers(10))
        draw_digit(image, digit, INKS["black"], size, corner)
        return grained(image, random), [DIGITS[digit]]
    shape = SHAPES[random.integers(len(SHAPES))]
    draw_shape(image, shape, ink, size, corner)
    return grained(image, random), [colour, shape]


@cache
def font_of(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font in a size; cached, because loading takes a millisecond."""
    return ImageFont.load_default(size=size)


def draw_digit(image: Image.Image, digit: int, ink: tuple[int, ...], size: float, corner: np.ndarray) -> None:
    """Draw a digit whose height is about `size`."""
    font = font_of(round(size * 1.2))
    draw = ImageDraw.Draw(image)
    left, top, _, _ = draw.textbbox((0, 0), str(digit), font=font)
    draw.text((corner[0] - left, corner[1] - top), str(digit), fill=ink, font=font)


def draw_shape(image: Image.Image, shape: str, ink: tuple[int, ...], size: float, corner: np.ndarray) -> None:
    """Draw a filled shape that is `size` wide and high."""
    left, top = corner
    right, bottom = left + size, top + size
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=ink)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=ink)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=ink)


def grained(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return the picture with noise."""
    pixels = np.asarray(image, np.float32) + random.normal(0, GRAIN, (*image.size[::-1], 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
