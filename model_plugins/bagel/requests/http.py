"""HTTP interface of BAGEL: chat, `/v1/images/generations` and `/v1/images/edits`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.model_plugins.bagel.memory import picture_tokens
from vllm_omni_ext.model_plugins.bagel.requests.fields import LATENTS, PREVIEWS, SEED, SIZE, THINK
from vllm_omni_ext.model_plugins.bagel.requests.payloads import DIT
from vllm_omni_ext.model_plugins.bagel.requests.thought import NAME as THOUGHT
from vllm_omni_ext.plugins.http import IMAGES, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions

ACCEPTED: Mapping[str, tuple[str, ...]] = {
    "quality": ("auto", "standard"),
    "background": ("auto", "opaque"),
    "moderation": ("auto", "low"),
    "style": (),
}
"""Accepted values of fields of OpenAI's image API: those with the model's fixed behaviour, which have no effect."""

INSTEAD: Mapping[str, str] = {
    "quality": "use num_inference_steps",
    "background": "pictures are opaque",
    "moderation": "the server has no other",
    "style": "describe it in the prompt",
}


class BagelHttp(HttpSurface):
    """`plugins.http.HttpSurface` of BAGEL: chat, `/v1/images/generations` and `/v1/images/edits`."""

    apis = (IMAGES,)

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        """Return the options of a chat; a picture request with `think` gets the modality "thought".

        If text is requested too, the thought is the text, and the modality is not added.

        Raises:
            RequestError: the body sets `return_latents`, or `previews` without `stream`.
        """
        _refuse_latents(options)
        _refuse_unsent_previews(options, body)
        stage = options.params.get(DIT)
        thinks = options.fields.get(THINK, getattr(stage, THINK, None))
        if not thinks or IMAGE not in options.modalities or TEXT in options.modalities:
            return options
        return replace(options, modalities=(*options.modalities, THOUGHT))

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Return the request for one picture from a body of `/v1/images/*`, and its options.

        `Rendered.data` has the parts of the prompt: the body's pictures, then its text.

        Raises:
            RequestError: the prompt is empty, a picture has too many tokens, two fields contradict each other, or the
                body has a value that the model does not support.
        """
        _refuse_latents(options)
        _refuse_unsent_previews(options, body)
        if body.partial_images not in (None, options.fields.get(PREVIEWS, body.partial_images)):
            message = f"{PREVIEWS}: has another value than 'partial_images'; set one of them"
            raise RequestError(message, parameter=PREVIEWS)
        refuse_others(body)
        shown = sum(_picture_tokens(picture, server) for picture in body.images)
        if not body.prompt.strip():
            raise RequestError("prompt: must not be empty", parameter="prompt")
        given = {SIZE: body.size, SEED: body.seed, PREVIEWS: body.partial_images}
        fields = {**options.fields, **{name: value for name, value in given.items() if value is not None}}
        ids = await server.tokenize(body.prompt, special=False)
        parts = await asyncio.to_thread(server.runtime.parts, body.images, ids)
        return Rendered(data=parts, input_tokens=shown + len(ids)), replace(options, fields=fields)


def refuse_others(body: Any) -> None:
    """Raise RequestError, with the field's name, for values of fields of OpenAI's image API that are not supported."""
    for name, allowed in ACCEPTED.items():
        value = getattr(body, name)
        if value is not None and value not in allowed:
            listed = f"use {' or '.join(allowed)}; " if allowed else ""
            raise RequestError(f"{name}: '{value:.100}' is not available; {listed}{INSTEAD[name]}", parameter=name)
    if body.mask is not None:
        raise RequestError("mask: is not available; say in the prompt which part to change", parameter="mask")


def _picture_tokens(picture: Any, server: OmniServer) -> int:
    """Return the number of a picture's ViT tokens, which chats count too.

    Raises:
        RequestError: they are more than `max_media_tokens`.
    """
    tokens = picture_tokens(server.runtime.sizes, picture.height, picture.width, latents=False)
    if (most := server.max_media_tokens) is not None and tokens > most:
        message = f"image: a picture has {tokens:,} tokens, but limits.max_media_tokens is {most:,}"
        raise RequestError(message, parameter="image")
    return tokens


def _refuse_unsent_previews(options: RequestOptions, body: Any) -> None:
    if options.fields.get(PREVIEWS) and not body.stream:
        raise RequestError(f"{PREVIEWS}: needs stream: true", parameter=PREVIEWS)


def _refuse_latents(options: RequestOptions) -> None:
    if options.fields.get(LATENTS):
        raise RequestError(f"{LATENTS}: is only available in Python, with LLM(..., omni=True)", parameter=LATENTS)
