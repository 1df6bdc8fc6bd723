"""The HTTP server's view of the model it serves, and the server's interface for plugins."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from vllm_omni_ext.modalities.base import TEXT, Modality
from vllm_omni_ext.modalities.registry import modalities_of
from vllm_omni_ext.omni import AsyncOmni
from vllm_omni_ext.plugins.http import HttpSurface
from vllm_omni_ext.plugins.registry import family_of
from vllm_omni_ext.plugins.runtime import Capabilities, ModelRuntime, Rendered, RequestOptions
from vllm_omni_ext.plugins.spec import resolve
from vllm_omni_ext.serving.limits.media import PIXELS, pixel_budget
from vllm_omni_ext.serving.options import (
    CHUNKS,
    MODALITIES,
    RequestFields,
    check,
    read_chunks,
    read_modalities,
    read_params,
)

IMAGE_PARTS = ("image_url", "input_image")
"""Types of message parts that are pictures."""


class Server:
    """The server's interface for plugins (`plugins.http.OmniServer`)."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni
        self.capabilities: Capabilities = omni.capabilities
        self.runtime: Any = omni.runtime
        self.max_media_tokens = omni.plan.config.limits.max_media_tokens

    def generate(self, request: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        """Start a request that does not use the frontend; yields its chunks."""
        return self._omni.start(request, options, request_id)

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return await self._omni.tokenize(text, special=special)

    async def images(self, messages: Sequence[Any]) -> list[Any]:
        """Return the pictures of a conversation as PIL images, in order.

        They have a separate pixel budget, because vLLM's renderer counts them again.
        """
        connector = MEDIA_CONNECTOR_REGISTRY.load(
            envs.VLLM_MEDIA_CONNECTOR,
            allowed_local_media_path=self._omni.model_config.allowed_local_media_path,
            allowed_media_domains=self._omni.model_config.allowed_media_domains,
        )
        before = PIXELS.set(pixel_budget(self._omni.plan.config))
        try:
            return [await connector.fetch_image_async(url) for url in image_urls(messages)]
        finally:
            PIXELS.reset(before)


def image_urls(messages: Sequence[Any]) -> list[str]:
    """Return the URLs of the pictures of a conversation, in order."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    found = [part.get("image_url") for part in parts if part.get("type") in IMAGE_PARTS]
    return [url for each in found if isinstance(url := each.get("url") if isinstance(each, dict) else each, str)]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a request.

    Attributes:
        paths: names in the request of the model's fields, by field.
        encodings: encoding of the answer, by modality.
    """

    options: RequestOptions
    paths: Mapping[str, str]
    encodings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The facts about the model; created once per application."""

    omni: AsyncOmni
    runtime: ModelRuntime
    capabilities: Capabilities
    surface: HttpSurface
    modalities: Mapping[str, Modality]
    fields: RequestFields
    server: Server

    @classmethod
    def of(cls, omni: AsyncOmni) -> ServedModel:
        """Collect the declarations of a deployment's model family."""
        family = family_of(omni.plan.family)
        return cls(
            omni=omni,
            runtime=omni.runtime,
            capabilities=omni.capabilities,
            surface=resolve(family.http)() if family.http else HttpSurface(),
            modalities=modalities_of(family),
            fields=RequestFields(omni.runtime.fields),
            server=Server(omni),
        )

    def read(
        self, body: Mapping[str, Any], *, stream: bool, seed: int | None, modalities: tuple[str, ...] | None = None
    ) -> ReadOptions:
        """Read the options of a body.

        Args:
            body: fields that the API itself does not read; the model's fields may also be fields of the API.
            modalities: modalities of the answer, if the API fixes them.

        Raises:
            RequestError: a field is unknown or contradicts another one; names the field and the allowed values.
        """
        encodings: dict[str, Any] = {}
        inside: dict[str, Any] = {}
        for name in self.capabilities.modalities:
            encodings[name], fields = self.modalities[name].read(body, stream=stream)
            inside |= fields
        fields = inside | {name: body[name] for name in self.fields.names if name in body}
        values, paths = self.fields.read(fields)
        options = RequestOptions(
            modalities=modalities or read_modalities(body.get(MODALITIES), self.capabilities),
            params=read_params(self.omni.plan, body, seed=seed),
            chunks=read_chunks(body.get(CHUNKS)),
            fields=values,
        )
        return ReadOptions(options=options, paths=paths, encodings=encodings)

    def check(self, read: ReadOptions, options: RequestOptions) -> None:
        """Let the model check options; RequestError names the field as in the request."""
        check(self.runtime, options, read.paths)

    def others(self, options: RequestOptions) -> tuple[str, ...]:
        """Return the modalities of an answer that vLLM's server does not handle."""
        return tuple(name for name in options.modalities if name != TEXT)
