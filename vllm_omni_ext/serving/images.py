"""Routes `/v1/images/generations` and `/v1/images/edits` of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.multimodal.media.image import ImageMediaIO

from vllm_omni_ext.errors import RequestError, RequestFailed
from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.modalities.chunks import ImageChunk
from vllm_omni_ext.modalities.fields import choice
from vllm_omni_ext.modalities.image import FORMATS, PNG, ImageEncoding, base64_of
from vllm_omni_ext.orchestrator.answers import merged
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions
from vllm_omni_ext.serving.direct import DirectAnswer, DirectServing, only
from vllm_omni_ext.serving.limits.bodies import BodyScan
from vllm_omni_ext.serving.limits.media import PIXELS, count_pixels
from vllm_omni_ext.serving.limits.texts import refuse_long
from vllm_omni_ext.serving.limits.validation import validate_json_values
from vllm_omni_ext.serving.options import CHUNKS, LARGEST_INTEGER, check
from vllm_omni_ext.serving.responses import ERROR_RESPONSES, EVENT_STREAM, named_event, printable
from vllm_omni_ext.serving.served import ServedModel

AUTO, B64_JSON = "auto", "b64_json"
MOST_IMAGES = 10
MOST_PREVIEWS = 3

FILES = ("images", "mask")
"""Fields of `ImageRequest` that only `read_form` sets."""

UPLOADS = re.compile(r"(image|mask)(\[\d*\])?")
"""Matches the names of form parts that must be files: image, image[], image[0], mask."""

PART = re.compile(r"[^\[\]]+(\[[^\[\]]+\])?(\[\])?")
"""Matches the names of form parts that are not files: field, field[], field[key], field[key][]."""

_SIZE = re.compile(r"\d{1,5}x\d{1,5}")
Job = tuple[Rendered, RequestOptions]

router = APIRouter()

_RESPONSES: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK.value: {"content": {"application/json": {}, EVENT_STREAM: {}}},
    **ERROR_RESPONSES,
}


class ImageRequest(OpenAIBaseModel):
    """Body of both endpoints. Fields that the model declares, and fields named after its stages, are allowed too.

    `images` and `mask` are the pictures to edit, as PIL images, which `read_form` sets. `size` is None for "auto".
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
    safety_identifier: str | None = None
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=MOST_PREVIEWS, description="Previews in a stream.")
    images: list[Any] = Field(default_factory=list, exclude=True)
    mask: Any = Field(None, exclude=True)

    @property
    def encoding(self) -> ImageEncoding:
        """Format and quality in which the answer's pictures are encoded."""
        quality = 100 if self.output_compression is None else self.output_compression
        return ImageEncoding(format=self.output_format or PNG, quality=quality)


@router.post("/v1/images/generations", dependencies=[Depends(validate_json_request)], responses=_RESPONSES)
@with_cancellation
@load_aware_call
async def create_image(request: ImageRequest, raw_request: Request) -> Response:
    """Generate pictures from a text."""
    for name in FILES:
        if getattr(request, name) not in (None, []):
            raise RequestError(f"{name}: is a file of /v1/images/edits; it is not read here", parameter=name)
    return await _respond(request, raw_request, "image_generation")


async def read_form(raw_request: Request) -> ImageRequest:
    """Read the form of `/v1/images/edits`: convert files to PIL images, and other parts to fields of the request.

    Raises:
        RequestError: a part of the form is invalid or missing; names the part.
    """
    if not raw_request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError("body: must be multipart/form-data with the parts image and prompt", parameter="body")
    fields: dict[str, Any] = {}
    files: dict[str, list[Any]] = {"image": [], "mask": []}
    scan = BodyScan(raw_request.app.state.engine_client.plan.config.limits.max_body_values)
    async with raw_request.form() as form:
        for name, part in form.multi_items():
            upload = UPLOADS.fullmatch(name)
            if isinstance(part, UploadFile):
                if upload is None:
                    raise RequestError(f"{name}: is not a file here; use image and mask", parameter=name)
                if upload[1] == "mask" and files["mask"]:
                    raise RequestError(f"{name}: may be sent once", parameter=name)
                files[upload[1]].append(await asyncio.to_thread(opened, name, await part.read()))
            elif upload is not None or name.partition("[")[0] in FILES:
                raise RequestError(f"{name}: must be a file with the name image or mask", parameter=name)
            else:
                _add(fields, name, _value(name, part, scan))
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


@router.post("/v1/images/edits", responses=_RESPONSES)
@with_cancellation  # drops pieces of the body that have not been read
@load_aware_call
async def edit_image(request: Annotated[ImageRequest, Depends(read_form)], raw_request: Request) -> Response:
    """Generate pictures from pictures and a text."""
    return await _respond(request, raw_request, "image_edit")


async def _respond(request: ImageRequest, raw_request: Request, kind: str) -> Response:
    serving: DirectServing = raw_request.app.state.omni_serving_images
    if (unknown := await serving.check_model(request)) is not None:
        return unknown
    serving.refuse_adapter(request.model, *(serving.model.capabilities.routes.keys() - {TEXT}))
    return await serving.respond(
        ImageAnswer(request, await read_images(request, serving.model), kind), raw_request, "image"
    )


Pictures = AsyncGenerator[tuple[int, ImageChunk], None]
"""Yields (index of the picture's `Job`, chunk with the picture or a preview) in the order of arrival."""


class ImageAnswer(DirectAnswer):
    """Starts one request for each picture, and writes the response of the images API.

    Args:
        jobs: prompt and options of each picture.
        kind: prefix of the names of a stream's events, e.g. "image_generation".
    """

    error_event = "error"

    def __init__(self, request: ImageRequest, jobs: Sequence[Job], kind: str) -> None:
        self._request = request
        self._jobs = jobs
        self._kind = kind
        self.media_type = EVENT_STREAM if request.stream else None

    def start(self, model: ServedModel, request_id: str) -> Pictures:
        names = [request_id] if len(self._jobs) == 1 else [f"{request_id}_{at}" for at in range(len(self._jobs))]
        started = [model.generate(*job, name) for job, name in zip(self._jobs, names, strict=True)]
        return merged(*(_numbered(index, only(ImageChunk, source)) for index, source in enumerate(started)))

    async def whole(self, chunks: Pictures) -> Response:
        async with aclosing(chunks):
            made = [(index, chunk) async for index, chunk in chunks if not chunk.partial]
        if not made:
            raise RequestFailed("the model made no picture")
        ordered = [chunk for _, chunk in sorted(made, key=itemgetter(0))]
        facts = {"created": int(time.time()), "data": [await self._encoded(chunk) for chunk in ordered]}
        about = {"output_format": self._request.encoding.format, "size": size_of(ordered[0])}
        return JSONResponse({**facts, **about, "usage": self._usage(self._jobs)})

    async def stream(self, chunks: Pictures) -> AsyncGenerator[str | bytes, None]:
        request = self._request
        about = {
            "output_format": request.encoding.format,
            "quality": request.quality or AUTO,
            "background": request.background or AUTO,
        }
        async with aclosing(chunks):
            async for index, chunk in chunks:
                facts = {"created_at": int(time.time()), "size": size_of(chunk), **about, **await self._encoded(chunk)}
                if chunk.partial:
                    yield named_event(f"{self._kind}.partial_image", **facts, partial_image_index=chunk.index)
                else:
                    tokens = self._usage(self._jobs[index : index + 1])
                    yield named_event(f"{self._kind}.completed", **facts, index=index, usage=tokens)

    def _usage(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the `usage` object of an answer: the prompt tokens of all jobs. Pictures count 0 output tokens.

        The tokens of an edit have no details: the plugin counts text and pictures together.
        """
        tokens = sum(rendered.tokens for rendered, _ in jobs)
        details = {"input_tokens_details": {"text_tokens": tokens, "image_tokens": 0}}
        counts = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
        return counts if self._request.images else {**counts, **details}

    async def _encoded(self, chunk: ImageChunk) -> dict[str, Any]:
        seed = {} if chunk.seed is None else {"seed": chunk.seed}
        return {"b64_json": await base64_of(chunk.pixels, self._request.encoding), **seed}


def install(app: FastAPI, model: ServedModel, **stock: Any) -> None:
    """Add the routes of the images API to the application; `stock` are arguments of `GenerateBaseServing`."""
    app.state.omni_serving_images = DirectServing(model, **stock)
    app.include_router(router)


async def read_images(request: ImageRequest, model: ServedModel) -> list[Job]:
    """Check a request, and return (prompt, options) of each requested picture (`n`).

    Raises:
        RequestError: a field is invalid; names the field and the allowed values.
    """
    await refuse_long(model.omni, "prompt", request.prompt)
    validate_json_values(request.model_copy(update={"images": [], "mask": None}))
    model.refuse_unknown(request.model_extra or {}, (CHUNKS,), "/v1/images/*")
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
        given = {**fields, **(body.model_extra or {})}
        found = model.read(given, stream=False, seed=request.seed, nth=index, modalities=(IMAGE,))
        rendered, options = await model.surface.image(body, found.options, model)
        check(model.runtime, options, found.paths)
        jobs.append((rendered, options))
    return jobs


def _add(fields: dict[str, Any], name: str, value: Any) -> None:
    """Add the value of a form part to the fields of the request.

    OpenAI's client sends a list as parts with the name `field[]`, and an object as parts with the names `field[key]` or
    `field[key][]`.

    Raises:
        RequestError: the name has another form, or the field has a value already.
    """
    if PART.fullmatch(name) is None:
        raise RequestError(f"{name}: is unknown to /v1/images/edits", parameter=name)
    path = [key.removesuffix("]") for key in name.split("[")]
    target: Any = fields
    for key, inside in pairwise(path):
        target = target.setdefault(key, {} if inside else []) if isinstance(target, dict) else None
    if isinstance(target, list) and not path[-1]:
        target.append(value)
    elif isinstance(target, dict) and path[-1] not in target:
        target[path[-1]] = value
    else:
        raise RequestError(f"{name}: may be sent once", parameter=name)


def _value(name: str, text: str, scan: BodyScan) -> Any:
    """Return the value of a form field: parsed JSON, or the text if it is not JSON or the field is a string.

    Args:
        scan: counts the values of all fields of the form.
    """
    field = ImageRequest.model_fields.get(name)
    if field is not None and field.annotation in (str, str | None):
        return text
    scan.begin_field(name)
    scan.feed(text.encode())
    try:
        return json.loads(text)
    except ValueError:
        return text


def opened(name: str, data: bytes) -> Any:
    """Return a file as a PIL image, as in chats: upright, RGB, white behind transparent areas. Masks keep their mode.

    Args:
        name: name of the form part.

    Raises:
        RequestError: the file is not a picture, or has too many pixels.
    """
    if (budget := PIXELS.get()) is not None:
        count_pixels(budget, data, name)
    try:
        return ImageMediaIO(None if name.startswith("mask") else "RGB").load_bytes(data).media
    except Exception as err:  # Pillow's decoders raise errors of any type
        message = f"{name}: is not a picture that can be read: {printable(str(err))}"
        raise RequestError(message, parameter=name) from err


def size_of(chunk: ImageChunk) -> str:
    """Return a picture's size as text, e.g. "1024x768" (width x height)."""
    height, width = chunk.pixels.shape[:2]
    return f"{width}x{height}"


async def _numbered(index: int, source: AsyncGenerator[ImageChunk, None]) -> Pictures:
    async with aclosing(source):
        async for chunk in source:
            yield index, chunk
