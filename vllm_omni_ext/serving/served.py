"""Gives HTTP handlers and plugins access to the served model, and reads the options and media of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import envs
from vllm.multimodal.audio import AudioResampler
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from vllm_omni_ext import resampling
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import TEXT
from vllm_omni_ext.modalities.registry import modalities_of
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.http import HttpSurface
from vllm_omni_ext.plugins.registry import family_of
from vllm_omni_ext.plugins.runtime import RequestOptions
from vllm_omni_ext.plugins.spec import resolve
from vllm_omni_ext.serving.limits.media import PIXELS, pixel_budget
from vllm_omni_ext.serving.options import (
    CHUNKS,
    LIST,
    MODALITIES,
    RequestFields,
    read_chunks,
    read_modalities,
    read_params,
)
from vllm_omni_ext.serving.responses import printable

IMAGE_PARTS = ("image_url", "input_image")
"""Values of `type` of message parts that contain a picture."""

SLOWEST_HZ, FASTEST_HZ = 1_000, 384_000
"""Lowest and highest sample rate of a sound that `ServedModel.sound` reads: resampling from other rates could take all
memory."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The result of `ServedModel.read`.

    Attributes:
        options: options of the request.
        paths: full names in the body of the fields that the model declares, by field, e.g. {"voice": "audio.voice"}.
        encodings: how to encode each modality of the answer, by modality; from `Modality.read`.
    """

    options: RequestOptions
    paths: Mapping[str, str]
    encodings: Mapping[str, Any]


class ServedModel:
    """The served model, for HTTP handlers; one object per API server.

    Implements `plugins.http.OmniServer`, the interface for plugins.
    """

    def __init__(self, omni: AsyncOmni) -> None:
        family = family_of(omni.plan.family)
        self.omni = omni
        self.runtime = omni.runtime
        self.capabilities = omni.capabilities
        self.max_media_tokens = omni.plan.config.limits.max_media_tokens
        self.surface: HttpSurface = resolve(family.http)() if family.http else HttpSurface()
        self.modalities = modalities_of(family)
        self.fields = RequestFields(omni.runtime.fields)
        self.generate = omni.start
        self.tokenize = omni.tokenize

    def refuse_unknown(self, names: Iterable[str], known: Collection[str], route: str) -> None:
        """Raise RequestError for the first field that is not in `known`, and that is no field of the model or a stage.

        Args:
            names: names of the fields of a request.
            known: names of further fields that the route reads.
            route: path of the route, for the error.
        """
        stages = [stage.model_stage for stage in self.omni.plan.model_stages()]
        used = {*known, *self.fields.names, *stages, LIST}
        for name in names:
            if name not in used:
                raise RequestError(f"{name:.100}: is unknown to {route}", parameter=f"{name:.100}")

    def read(
        self,
        body: Mapping[str, Any],
        *,
        stream: bool,
        seed: int | None,
        nth: int = 0,
        modalities: tuple[str, ...] | None = None,
    ) -> ReadOptions:
        """Read and check the options in a request body.

        Args:
            body: the fields that the API's own request type does not read, and all fields that the model declares.
            seed: the request's `seed`.
            nth: see `read_params`.
            modalities: modalities of the answer, if the API determines them; None: the body of a chat sets them.

        Raises:
            RequestError: a field is unknown, invalid, or contradicts another one; names the field and allowed values.
        """
        encodings: dict[str, Any] = {}
        inside: dict[str, Any] = {}
        for name in self.capabilities.modalities:
            encodings[name], fields = self.modalities[name].read(body, stream=stream)
            inside |= fields
        fields = inside | {name: body[name] for name in self.fields.names if name in body}
        values, paths = self.fields.read(fields)
        requested = modalities or read_modalities(body.get(MODALITIES), self.capabilities)
        options = RequestOptions(
            modalities=requested,
            params=read_params(
                self.omni.plan, body, seed=seed, nth=nth, chat=modalities is None, text_only=requested == (TEXT,)
            ),
            chunks=read_chunks(body.get(CHUNKS), self.omni.plan.chunks),
            fields=values,
            streamed=stream,
            named=frozenset(
                stage.model_stage for stage in self.omni.plan.model_stages() if body.get(stage.model_stage)
            ),
        )
        return ReadOptions(options=options, paths=paths, encodings=encodings)

    async def images(self, messages: Sequence[Any]) -> list[Any]:
        """Return the pictures of a conversation as PIL images, in order.

        They are counted in a pixel budget of their own (see `limits.media.PIXELS`), because vLLM's renderer decodes the
        same pictures again, and counts them in the request's budget.
        """
        connector = self._connector()
        before = PIXELS.set(pixel_budget(self.omni.plan.config))
        try:
            return [await connector.fetch_image_async(url) for url in image_urls(messages)]
        finally:
            PIXELS.reset(before)

    async def sounds(self, messages: Sequence[Any], *, rate: int) -> list[np.ndarray[Any, Any]]:
        """Return the sounds of a conversation, float32 [samples] in mono at `rate` Hz, in order."""
        return [await self.sound(url, rate=rate, field="messages") for url in sound_urls(messages)]

    async def sound(self, url: str, *, rate: int, field: str) -> np.ndarray[Any, Any]:
        """Return one sound, float32 [samples] in mono at `rate` Hz.

        Args:
            url: an address, or a `data:` URL with the file in base64.
            field: the request field that contains the URL.

        Raises:
            RequestError: the URL is not allowed, or its file is not a readable sound; names the field.
        """
        if not isinstance(url, str):
            raise RequestError(f"{field}: must be the URL of a sound, or a data: URL", parameter=field)
        try:
            samples, given = await self._connector().fetch_audio_async(url)
            if not SLOWEST_HZ <= given <= FASTEST_HZ:
                raise ValueError(f"its sample rate is {given:g} Hz, allowed are {SLOWEST_HZ} to {FASTEST_HZ}")
            method: Any = resampling.available()
            if method is None and given != rate:
                raise ValueError("no package of this server converts its sample rate")
            resampler = AudioResampler(rate, *([method] if method else []))
            made = await asyncio.to_thread(resampler.resample, samples, orig_sr=given)
        except Exception as error:  # media libraries raise errors of any type
            why = printable(str(error) or type(error).__name__)
            raise RequestError(f"{field}: a sound could not be read: {why}", parameter=field) from error
        return np.asarray(made, np.float32)

    def _connector(self) -> Any:
        return MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            allowed_local_media_path=self.omni.model_config.allowed_local_media_path,
            allowed_media_domains=self.omni.model_config.allowed_media_domains,
        )


def sound_urls(messages: Sequence[Any]) -> list[str]:
    """Return the URLs of the sounds of a conversation, in order; the sound of an `input_audio` as a `data:` URL."""
    found: list[Any] = []
    for part in _parts(messages):
        audio = part.get(str(part.get("type")))
        if part.get("type") == "input_audio" and isinstance(audio, dict):
            found.append(f"data:audio/{audio.get('format')};base64,{audio.get('data')}")
        elif part.get("type") == "audio_url":
            found.append(audio.get("url") if isinstance(audio, dict) else audio)
    return [url for url in found if isinstance(url, str)]


def _parts(messages: Sequence[Any]) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def image_urls(messages: Sequence[Any]) -> list[str]:
    """Return the URLs of the pictures of a conversation, in order."""
    found = [part.get("image_url") for part in _parts(messages) if part.get("type") in IMAGE_PARTS]
    return [url for each in found if isinstance(url := each.get("url") if isinstance(each, dict) else each, str)]
