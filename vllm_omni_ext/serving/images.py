"""`/v1/images/generations` and `/v1/images/edits`, as in OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from vllm import envs
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.multimodal.image import convert_image_mode

from vllm_omni_ext.errors import OmniError, RequestError, RequestFailed
from vllm_omni_ext.modalities.base import IMAGE
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.modalities.fields import choice
from vllm_omni_ext.modalities.image import FORMATS, PNG, ImageEncoding, base64_of
from vllm_omni_ext.orchestrator.answers import merged, with_first
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.serving.limits.bodies import BodyScan
from vllm_omni_ext.serving.limits.media import PIXELS, count_pixels
from vllm_omni_ext.serving.limits.texts import refuse_long
from vllm_omni_ext.serving.limits.validation import validate_json_values
from vllm_omni_ext.serving.options import LARGEST_INTEGER
from vllm_omni_ext.serving.responses import (
    DONE,
    ERROR_RESPONSES,
    EVENT_STREAM,
    as_vllm_error,
    named_event,
    refusal,
    refusals_counted,
)
from vllm_omni_ext.serving.served import ServedModel

AUTO, B64_JSON = "auto", "b64_json"
MOST_IMAGES = 10
MOST_PREVIEWS = 3
GENERATION, EDIT = "image_generation", "image_edit"
"""Names of the events of a stream."""

UPLOADS = re.compile(r"(image|mask)(\[\d*\])?")
"""Names of the form parts that are files."""

_SIZE = re.compile(r"\d{1,5}x\d{1,5}")
Job = tuple[Rendered, RequestOptions]

router = APIRouter()

_RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"content": {"application/json": {}, EVENT_STREAM: {}}},
    **ERROR_RESPONSES,
}


class ImageRequest(OpenAIBaseModel):
    """Body of both endpoints; the model's fields and the parameters of its stages are accepted too.

    For the plugin, `images` and `mask` are the pictures to edit, as PIL images; `size` is None for "auto".
    """

    prompt: str
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_IMAGES, description="How many pictures.")
    size: str | None = Field(None, description="Width x height, or 'auto'.")
    seed: int | None = Field(None, ge=0, le=LARGEST_INTEGER, description="Of the first picture; others count on.")
    response_format: str | None = Field(None, description="Only b64_json: pictures are not kept.")
    output_format: str | None = Field(None, description=f"One of {', '.join(FORMATS)}.")
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of JPEG and WebP.")
    quality: str | None = None
    background: str | None = None
    moderation: str | None = None
    style: str | None = None
    user: str | None = None
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=MOST_PREVIEWS, description="Previews in a stream.")
    images: list[Any] = Field(default_factory=list, exclude=True)
    mask: Any = Field(None, exclude=True)

    @property
    def encoding(self) -> ImageEncoding:
        """The encoding of the pictures."""
        quality = 100 if self.output_compression is None else self.output_compression
        return ImageEncoding(format=self.output_format or PNG, quality=quality)


@router.post("/v1/images/generations", dependencies=[Depends(validate_json_request)], responses=_RESPONSES)
@with_cancellation
@load_aware_call
async def create_image(request: ImageRequest, raw_request: Request) -> Response:
    """Generate pictures from a text."""
    serving: OmniServingImages = raw_request.app.state.omni_serving_images
    request.images, request.mask = [], None  # only forms contain files
    return await serving.create(request, raw_request, GENERATION)


@router.post("/v1/images/edits", responses=_RESPONSES)
@with_cancellation
@load_aware_call
async def edit_image(raw_request: Request) -> Response:
    """Generate pictures from pictures and a text."""
    serving: OmniServingImages = raw_request.app.state.omni_serving_images
    try:
        with refusals_counted(serving.engine_client):
            request = await read_form(raw_request)
    except RequestError as err:
        return refusal(serving.create_error_response(as_vllm_error(err)))
    return await serving.create(request, raw_request, EDIT)


class OmniServingImages(GenerateBaseServing):
    """Pictures without a conversation."""

    def __init__(self, model: ServedModel, **stock: Any) -> None:
        super().__init__(engine_client=model.omni, **stock)
        self._model = model

    async def create(self, request: ImageRequest, raw_request: Request, kind: str) -> Response:
        """Answer a request for pictures."""
        unknown = await self._check_model(request)  # type: ignore[arg-type]  # it reads the model's name
        if unknown is not None:
            return refusal(unknown)
        request_id = f"image-{self._base_request_id(raw_request)}"
        try:
            with refusals_counted(self._model.omni):
                jobs = await read_images(request, self._model)
                self._preflight()
                pictures = await self._pictures(jobs, request_id)
            if not request.stream:
                return await _whole(request, jobs, pictures)
            first = await anext(pictures)  # an error before the first picture still gets its own HTTP status
        except OmniError as err:
            return refusal(self.create_error_response(as_vllm_error(err)))
        events = self._events(request, jobs, with_first(first, pictures), kind)
        return StreamingResponse(events, media_type=EVENT_STREAM)

    async def _pictures(self, jobs: Sequence[Job], request_id: str) -> AsyncGenerator[tuple[int, ImageChunk], None]:
        """Yield the pictures of all jobs as they arrive, each with the number of its job."""
        names = [request_id] if len(jobs) == 1 else [f"{request_id}_{index}" for index in range(len(jobs))]
        started: list[AsyncGenerator[Any, None]] = []
        try:
            for job, name in zip(jobs, names, strict=True):
                started.append(self._model.server.generate(*job, name))
        except OmniError:
            for source in started:
                await source.aclose()
            raise
        return merged(*(_numbered(index, source) for index, source in enumerate(started)))

    async def _events(
        self, request: ImageRequest, jobs: Sequence[Job], pictures: AsyncGenerator[Any, None], kind: str
    ) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(pictures):
                async for index, chunk in pictures:
                    facts = {"b64_json": await base64_of(chunk.pixels, request.encoding), **described(request, chunk)}
                    if chunk.partial:
                        yield named_event(f"{kind}.partial_image", **facts, partial_image_index=chunk.index)
                    else:
                        yield named_event(
                            f"{kind}.completed", **facts, index=index, usage=usage(jobs[index : index + 1])
                        )
        except OmniError as err:
            error = self.create_error_response(as_vllm_error(err)).error
            yield named_event("error", error=error.model_dump())
            yield DONE


def install(app: FastAPI, model: ServedModel, **stock: Any) -> None:
    """Add the routes."""
    app.state.omni_serving_images = OmniServingImages(model, **stock)
    app.include_router(router)


async def read_images(request: ImageRequest, model: ServedModel) -> list[Job]:
    """Read and check a request for pictures; return one job per picture.

    Raises:
        RequestError: a field is unknown or contradicts another one; names the field and the allowed values.
    """
    await refuse_long(model.omni, "prompt", request.prompt)
    validate_json_values(request.model_copy(update={"images": [], "mask": None}))
    request.size = None if request.size == AUTO else request.size
    if request.size is not None and not _SIZE.fullmatch(request.size):
        raise RequestError(f"size: must be '{AUTO}' or width x height such as 1024x1024", parameter="size")
    if request.response_format not in (None, B64_JSON):
        raise RequestError(
            f"response_format: only {B64_JSON} is available; the server keeps no pictures", parameter="response_format"
        )
    if request.output_format is not None:
        choice("output_format", request.output_format, FORMATS)
    if request.partial_images and not request.stream:
        raise RequestError("partial_images: needs stream: true", parameter="partial_images")
    jobs = []
    for index in range(request.n or 1):
        seed = None if request.seed is None else (request.seed + index) % (LARGEST_INTEGER + 1)
        body = request.model_copy(update={"seed": seed})
        fields = {name: value for name in body.model_fields_set if (value := getattr(body, name)) is not None}
        found = model.read({**fields, **(body.model_extra or {})}, stream=False, seed=seed, modalities=(IMAGE,))
        rendered, options = await model.surface.image(body, found.options, model.server)
        model.check(found, options)
        jobs.append((rendered, options))
    return jobs


async def read_form(raw_request: Request) -> ImageRequest:
    """Read the form of an edit: files as PIL images, other parts as the fields of a body.

    Raises:
        RequestError: the body is not a form, or a part is wrong; names the part.
    """
    if not raw_request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise RequestError("body: must be multipart/form-data with the parts image and prompt", parameter="body")
    fields: dict[str, Any] = {}
    files: dict[str, list[Any]] = {"image": [], "mask": []}
    async with raw_request.form() as form:
        for name, part in form.multi_items():
            upload = UPLOADS.fullmatch(name)
            if isinstance(part, UploadFile):
                if upload is None:
                    raise RequestError(f"{name}: is not a file here; use image and mask", parameter=name)
                files[upload[1]].append(await asyncio.to_thread(opened, name, await part.read()))
            elif upload is not None:
                raise RequestError(f"{name}: must be a file", parameter=name)
            else:
                BodyScan(raw_request.app.state.engine_client.plan.config.limits.max_body_values).feed(part.encode())
                fields[name] = _value(name, part)
    if not files["image"]:
        raise RequestError("image: is missing; send a picture", parameter="image")
    try:
        request = ImageRequest.model_validate(fields)
    except ValidationError as err:
        first = err.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{name}: {first['msg']}", parameter=name) from err
    request.images, request.mask = files["image"], next(iter(files["mask"]), None)
    return request


def _value(name: str, text: str) -> Any:
    """Return the value of a form field. JSON is parsed, so that values have the same types as in a body."""
    field = ImageRequest.model_fields.get(name)
    if field is not None and field.annotation in (str, str | None):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def opened(name: str, data: bytes) -> Any:
    """Return a file as a PIL image, RGB with white behind transparent areas, as in chats (a mask: as it is).

    Raises:
        RequestError: it is not a picture, or has too many pixels.
    """
    from PIL import Image

    if (budget := PIXELS.get()) is not None:
        count_pixels(budget, data)
    try:
        with Image.open(io.BytesIO(data)) as picture:
            pixels, most = picture.width * picture.height, envs.VLLM_MAX_IMAGE_PIXELS
            if pixels > most:
                raise RequestError(f"{name}: {pixels} pixels are too many, at most {most} are read", parameter=name)
            picture.load()
            return picture.copy() if name.startswith("mask") else convert_image_mode(picture, "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as err:
        raise RequestError(f"{name}: is not a picture that can be read", parameter=name) from err


async def _whole(request: ImageRequest, jobs: Sequence[Job], pictures: AsyncGenerator[Any, None]) -> Response:
    made: dict[int, list[ImageChunk]] = {}
    async with aclosing(pictures):
        async for index, chunk in pictures:
            if not chunk.partial:
                made.setdefault(index, []).append(chunk)
    ordered = [chunk for index in sorted(made) for chunk in made[index]]
    if not ordered:
        raise RequestFailed("the model made no picture")
    data = []
    for chunk in ordered:
        entry: dict[str, Any] = {"b64_json": await base64_of(chunk.pixels, request.encoding)}
        data.append(entry if chunk.seed is None else entry | {"seed": chunk.seed})
    facts = {"created": int(time.time()), "data": data, "output_format": request.encoding.format}
    return JSONResponse({**facts, "size": size_of(ordered[0]), "usage": usage(jobs)})


def described(request: ImageRequest, chunk: ImageChunk) -> dict[str, Any]:
    """Return an event's description of its picture."""
    facts = {
        "created_at": int(time.time()),
        "size": size_of(chunk),
        "output_format": request.encoding.format,
        "quality": request.quality or AUTO,
        "background": request.background or AUTO,
    }
    return facts if chunk.seed is None else facts | {"seed": chunk.seed}


def size_of(chunk: ImageChunk) -> str:
    """Return width x height."""
    height, width = chunk.pixels.shape[:2]
    return f"{width}x{height}"


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the usage of the requests. A picture has no tokens."""
    tokens = sum(rendered.tokens for rendered, _ in jobs)
    return {
        "input_tokens": tokens,
        "output_tokens": 0,
        "total_tokens": tokens,
        "input_tokens_details": {"text_tokens": tokens, "image_tokens": 0},
    }


async def _numbered(index: int, source: AsyncGenerator[Any, None]) -> AsyncGenerator[tuple[int, ImageChunk], None]:
    async with aclosing(source):
        async for chunk in source:
            if isinstance(chunk, ImageChunk):
                yield index, chunk
