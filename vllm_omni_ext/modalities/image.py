"""The output modality image: writes pictures to chat answers as PNG, JPEG or WebP, and records their metrics."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.metrics import counter, histogram
from vllm_omni_ext.modalities.base import IMAGE, Assembled, Modality, ModalityStream, OutputChunk
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.modalities.fields import choice, flag, whole_number

PNG, JPEG, WEBP = "png", "jpeg", "webp"
FORMATS = (PNG, JPEG, WEBP)
FORMAT, COMPRESSION = "format", "compression"
BEST_QUALITY = 100

IMAGE_IN_CONTENT = "image_in_content"
"""Boolean request field: pictures are also sent as parts of `message.content`, where clients of vllm-omni read them."""

TIME_TO_FIRST_IMAGE = histogram(
    "time_to_first_image_seconds", "Time from a request's arrival to its first finished picture."
)
IMAGES = counter("images_total", "images", "Pictures made, without previews.")
METRICS = (TIME_TO_FIRST_IMAGE, IMAGES)


@dataclass(frozen=True, kw_only=True)
class ImageEncoding:
    """Encoding of an answer's pictures.

    Attributes:
        format: one of `FORMATS`.
        quality: 0 to 100, for JPEG and WebP.
        in_content: value of the request field `IMAGE_IN_CONTENT`.
    """

    format: str = PNG
    quality: int = BEST_QUALITY
    in_content: bool = False


def encode(pixels: np.ndarray[Any, Any], encoding: ImageEncoding) -> bytes:
    """Return a picture, uint8 [height, width, 3] in RGB, as the bytes of an encoded file."""
    from PIL import Image as Pictures

    file = io.BytesIO()
    options = {} if encoding.format == PNG else {"quality": encoding.quality}
    Pictures.fromarray(np.ascontiguousarray(pixels)).save(file, format=encoding.format, **options)
    return file.getvalue()


async def base64_of(pixels: np.ndarray[Any, Any], encoding: ImageEncoding) -> str:
    """Return an encoded picture as base64. A thread encodes it, so that the event loop is not blocked."""
    return await asyncio.to_thread(lambda: base64.b64encode(encode(pixels, encoding)).decode("ascii"))


async def _part(chunk: ImageChunk, encoding: ImageEncoding) -> dict[str, Any]:
    """Return the picture as a content part of type "image_url" with a `data:` URL, its index, and its seed if known."""
    url = f"data:image/{encoding.format};base64,{await base64_of(chunk.pixels, encoding)}"
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}, "index": chunk.index}
    if chunk.seed is not None:
        part["seed"] = chunk.seed
    return part


class ImageStream(ModalityStream):
    """Writes the pictures of one streamed chat answer as `delta.images`."""

    def __init__(self, encoding: ImageEncoding) -> None:
        self._encoding = encoding
        self._images = 0

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return a list with one choice, which has the picture; the part of a preview has `"partial": True`."""
        assert isinstance(chunk, ImageChunk)
        part = await _part(chunk, self._encoding)
        if chunk.partial:
            part["partial"] = True
        self._images += not chunk.partial
        delta: dict[str, Any] = {"images": [part]}
        if self._encoding.in_content:
            delta = {"role": "assistant", "content": [part], **delta}
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]

    def usage(self) -> Mapping[str, int]:
        """Return {"images": number of finished pictures so far}."""
        return {"images": self._images}


class Image(Modality):
    """The output modality image."""

    name = IMAGE
    chunk = ImageChunk
    body_fields = (IMAGE, IMAGE_IN_CONTENT)

    def read(self, body: Mapping[str, Any], *, stream: bool) -> tuple[ImageEncoding, Mapping[str, Any]]:
        """Return (requested encoding, request fields of the model in the object `image`, e.g. {"image.size": ...})."""
        given = body.get(IMAGE)
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise RequestError(f"image: must be an object with {FORMAT} and {COMPRESSION}", parameter=IMAGE)
        fields = {f"image.{key}": value for key, value in given.items() if key not in (FORMAT, COMPRESSION)}
        name = choice("image.format", PNG if given.get(FORMAT) is None else given[FORMAT], FORMATS)
        quality = whole_number("image.compression", given.get(COMPRESSION), BEST_QUALITY, 0, BEST_QUALITY)
        in_content = flag(IMAGE_IN_CONTENT, body.get(IMAGE_IN_CONTENT))
        return ImageEncoding(format=name, quality=quality, in_content=in_content), fields

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: ImageEncoding, text: str) -> Assembled:
        """Return the pictures as `images` of the message; an answer without pictures keeps its text."""
        parts = [await _part(chunk, encoding) for chunk in finished(chunks)]
        message: dict[str, Any] = {"images": parts}
        if encoding.in_content and parts:
            message["content"] = parts
        return Assembled(message=message, usage={"images": len(parts)}, keep_text=not parts)

    def stream(self, encoding: ImageEncoding) -> ImageStream:
        """Return the writer for one streamed answer."""
        return ImageStream(encoding)

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return `images`, a list of PIL images, and `latents`, a list that is empty if none were requested."""
        from PIL import Image as Pictures

        pictures = finished(chunks)
        latents = [chunk.latent for chunk in pictures if chunk.latent is not None]
        images = [Pictures.fromarray(np.ascontiguousarray(chunk.pixels)) for chunk in pictures]
        return {"images": images, "latents": latents}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record the arrival times and numbers of pictures and previews."""
        assert isinstance(chunk, ImageChunk)
        trace.times.append(at)
        kind = "previews" if chunk.partial else "images"
        trace.facts[kind] = trace.facts.get(kind, 0) + 1
        if not chunk.partial:
            metrics.of(IMAGES).inc()
            if trace.facts["images"] == 1:
                metrics.of(TIME_TO_FIRST_IMAGE).observe(at)


def finished(chunks: Sequence[OutputChunk]) -> list[ImageChunk]:
    """Return the finished pictures among the chunks, ordered by index."""
    found = [chunk for chunk in chunks if isinstance(chunk, ImageChunk) and not chunk.partial]
    return sorted(found, key=lambda chunk: chunk.index)
