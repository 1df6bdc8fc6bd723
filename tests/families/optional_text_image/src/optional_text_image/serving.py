"""The part of the family in an API server."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from optional_text_image.family import AR, PAINTER
from optional_text_image.payloads import Paint
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.plugins.flow import (
    Action,
    Emit,
    Fail,
    Finished,
    Forward,
    ForwardFlow,
    Produced,
    Progress,
    Submit,
)
from vllm_omni_ext.plugins.http import IMAGES, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Capabilities, Planned, Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import StageError, StageProgress

MOST_PIXELS = 256


class Fields(BaseModel):
    """Fields of a request."""

    model_config = ConfigDict(extra="forbid")

    size: str | None = Field(None, pattern=r"^\d{1,4}x\d{1,4}$", description="width x height, e.g. 32x24")
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    think: bool | None = Field(None, description="a picture of the prompt and of what the language model adds to it")


class PaintFlow:
    """A picture; first some text if `think`.

    Args:
        prompt: token ids.
        text: the text is an output too.
    """

    def __init__(self, prompt: list[int], paint: Paint, *, think: bool, text: bool) -> None:
        self.stages = frozenset((AR, PAINTER) if think else (PAINTER,))
        self.outputs = frozenset((TEXT, IMAGE) if text else (IMAGE,))
        self._prompt = prompt
        self._paint = paint
        self._think = think

    def begin(self) -> list[Action]:
        """Forward the request to the language model first if `think`."""
        return [Forward(AR)] if self._think else self.replay(PAINTER)

    def handle(self, event: Produced) -> list[Action]:
        """Paint when the text has ended; then pass on the answers of the painter."""
        if event.finish in ("abort", "error") and not isinstance(event.payload, StageError):
            return [Fail(f"stage '{event.stage}' has not finished its part of the request")]
        if event.stage == AR and event.payload is None:
            self._prompt = [*self._prompt, *event.tokens]
            return [] if event.finish is None else self.replay(PAINTER)
        match event.payload:
            case StageError(reason=reason):
                return [Fail(reason)]
            case StageProgress(done=done, total=total):
                return [Progress(PAINTER, done, total)]
        return [Emit(ImageChunk(pixels=event.payload, seed=self._paint.seed)), Finished()]

    def replay(self, stage: str) -> list[Action]:
        """The same prompt and seed make the same picture."""
        return [Submit(stage=PAINTER, prompt=self._prompt, payload=self._paint)]


class Runtime:
    """Plans text and pictures."""

    fields = Fields

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    def capabilities(self) -> Capabilities:
        """Text, pictures, or pictures of a text."""
        routes = {TEXT: frozenset((AR,)), IMAGE: frozenset((PAINTER,)), "think": frozenset((AR, PAINTER))}
        return Capabilities(modalities=(TEXT, IMAGE), default_modalities=(TEXT,), routes=routes)

    def validate(self, options: RequestOptions) -> None:
        """Check the size."""
        _size(options)

    def plan(self, request: Rendered, options: RequestOptions) -> Planned:
        """Choose the stages of a request."""
        if IMAGE not in options.modalities:
            return Planned(flow=ForwardFlow(AR))
        if not request.prompt:
            raise RequestError("prompt: must not be empty", parameter="prompt")
        width, height = _size(options)
        seed = options.fields.get("seed")
        paint = Paint(width=width, height=height, seed=secrets.randbits(63) if seed is None else seed)
        text = TEXT in options.modalities
        think = text or bool(options.fields.get("think"))
        return Planned(flow=PaintFlow(list(request.prompt), paint, think=think, text=text))

    def decode(self, stage: str, tensor: Any) -> Any:
        """Pixels as a numpy array."""
        return tensor.numpy()


class Http(HttpSurface):
    """Chat, and the API of pictures."""

    apis = (IMAGES,)

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Read a body of `/v1/images/generations`; it never uses the language model."""
        given = {name: value for name in ("size", "seed") if (value := getattr(body, name, None)) is not None}
        rendered = Rendered(prompt=await server.tokenize(body.prompt, special=False))
        return rendered, replace(options, fields={**options.fields, **given})


def _size(options: RequestOptions) -> tuple[int, int]:
    width, height = (int(side) for side in (options.fields.get("size") or "24x16").split("x"))
    if not (1 <= width <= MOST_PIXELS and 1 <= height <= MOST_PIXELS):
        raise RequestError(f"size: each side must be from 1 to {MOST_PIXELS} pixels", parameter="size")
    return width, height
