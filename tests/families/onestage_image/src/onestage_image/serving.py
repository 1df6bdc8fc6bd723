"""What the family does in an API server."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from onestage_image.family import DENOISER
from onestage_image.payloads import Paint
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import IMAGE
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.plugins.flow import Action, Emit, Fail, Finished, Produced, Progress, Submit
from vllm_omni_ext.plugins.http import IMAGES, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import StageError, StageProgress

MOST_PIXELS = 256


class Fields(BaseModel):
    """Fields of a request."""

    model_config = ConfigDict(extra="forbid")

    size: str | None = Field(None, pattern=r"^\d{1,4}x\d{1,4}$", description="width x height, e.g. 32x24")
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    previews: int | None = Field(None, ge=0, le=3)


class PictureFlow:
    """One picture, and nothing else."""

    stages = frozenset((DENOISER,))
    outputs = frozenset((IMAGE,))

    def __init__(self, paint: Paint) -> None:
        self.paint = paint
        self.shown = 0

    def begin(self) -> list[Action]:
        """Send the request to the denoiser."""
        return [Submit(stage=DENOISER, payload=self.paint)]

    def handle(self, event: Produced) -> list[Action]:
        """Pass progress, previews and the picture on."""
        match event.payload:
            case None:
                return []
            case StageError(reason=reason):
                return [Fail(reason)]
            case StageProgress(done=done, total=total):
                return [Progress(DENOISER, done, total)]
        last = event.finish is not None
        picture = ImageChunk(pixels=event.payload, partial=not last, seed=self.paint.seed, last=last)
        return [Emit(picture), Finished()] if last else [Emit(picture)]

    def replay(self, stage: str) -> list[Action]:
        """The same seed makes the same picture."""
        return self.begin()


class Runtime:
    """Plans pictures."""

    fields = Fields

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    def capabilities(self) -> Capabilities:
        """Pictures only."""
        return Capabilities(modalities=(IMAGE,), default_modalities=(IMAGE,), routes={IMAGE: frozenset((DENOISER,))})

    def validate(self, options: RequestOptions) -> None:
        """Check the size."""
        _size(options)

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Plan one picture."""
        if not request.prompt:
            raise RequestError("prompt: must not be empty", parameter="prompt")
        width, height = _size(options)
        seed = options.fields.get("seed")
        paint = Paint(
            tokens=list(request.prompt),
            width=width,
            height=height,
            seed=secrets.randbits(63) if seed is None else seed,
            previews=options.fields.get("previews") or 0,
        )
        return Planned(flow=PictureFlow(paint))

    def decode(self, stage: str, tensor: Any) -> Any:
        """Pixels as a numpy array."""
        return tensor.numpy()


class Http(HttpSurface):
    """Chat, and the API of pictures."""

    apis = (IMAGES,)

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Read a body of `/v1/images/generations`."""
        given = {name: value for name in Fields.model_fields if (value := getattr(body, name, None)) is not None}
        previews = getattr(body, "partial_images", None)
        fields = {**options.fields, **given, **({"previews": previews} if previews else {})}
        rendered = Rendered(prompt=await server.tokenize(body.prompt, special=False))
        return rendered, replace(options, fields=fields)


def _size(options: RequestOptions) -> tuple[int, int]:
    width, height = (int(side) for side in (options.fields.get("size") or "32x32").split("x"))
    if not (1 <= width <= MOST_PIXELS and 1 <= height <= MOST_PIXELS):
        raise RequestError(f"size: each side must be from 1 to {MOST_PIXELS} pixels", parameter="size")
    return width, height
