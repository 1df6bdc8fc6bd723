"""A model plugin's HTTP interface: the APIs that it serves, methods that read their bodies, and its own routes.

Imported in API servers only. A plugin that serves only chat needs no subclass: `HttpSurface` itself is the default.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from vllm_omni_ext.plugins.runtime import Capabilities, Rendered, RequestOptions

SPEECH = "vllm_omni_ext.serving.speech:install"
IMAGES = "vllm_omni_ext.serving.images:install"
REALTIME = "vllm_omni_ext.serving.realtime.socket:install"
"""Values for `HttpSurface.apis`. `REALTIME` sends chat requests, and needs no method of the surface."""


class OmniServer(Protocol):
    """The attributes and methods of an API server that plugins may use."""

    capabilities: Capabilities
    runtime: Any
    """The plugin's `ModelRuntime` of this API server."""
    max_media_tokens: int | None
    """Most tokens of an image, a video or a sound (`limits.max_media_tokens`); None: no limit."""

    def generate(self, request: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        """Start a request that does not use the frontend; yield `modalities.base.OutputChunk`s.

        The request is planned or refused before the generator is returned. Closing the generator aborts the request.
        """

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, computed in the only thread that uses the tokenizer.

        Args:
            special: markers of the chat format in the text become special tokens; otherwise they are plain text.
        """

    async def images(self, messages: Sequence[Any]) -> list[Any]:
        """Return the pictures of a conversation as PIL images, in order; the server's limits for media apply."""

    async def sounds(self, messages: Sequence[Any], *, rate: int) -> list[Any]:
        """Return the sounds of a conversation as float32 arrays [samples], mono, at `rate` Hz, in order.

        The server's limits for media apply. RequestError: a sound cannot be read.
        """

    async def sound(self, url: str, *, rate: int, field: str) -> Any:
        """Return the sound at a URL (also a `data:` URL) as `sounds` does; `field` is the request field of the URL."""


class HttpSurface:
    """Base class, and the default: chat with the fields of the modalities and of the runtime, without further APIs."""

    apis: tuple[str, ...] = ()
    """APIs to install: "pkg.mod:attr" of functions `(app, model: serving.served.ServedModel, **stock) -> None`."""

    speech_stage: str = ""
    """The stage whose tokens `max_new_tokens` of `/v1/audio/speech` limits; "" = the field is refused."""

    speech_fields: tuple[str, ...] = ()
    """Optional fields of `/v1/audio/speech` that `speech` reads: `speed`, `instructions`, `ref_audio`, `ref_text`,
    `sample_rate`, `language`. The core refuses the others, except those of `ModelRuntime.fields` and a speed of 1.
    `voice` and `speaker` are refused unless they are among `ModelRuntime.fields`."""

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        """Return the options of a chat request; `options` are those that the core has read from the body.

        A plugin may change the modalities, set defaults, or add pictures of the conversation.
        """
        return options

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Return the request for a body of `/v1/audio/speech`; only for families with the API `SPEECH`."""
        raise NotImplementedError

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Convert a body of `/v1/images/*` to the request for one picture; only for families with the API `IMAGES`."""
        raise NotImplementedError

    def routers(self, server: OmniServer) -> Sequence[Any]:
        """Return FastAPI routers with the plugin's own routes."""
        return ()

    def card(self) -> Mapping[str, Any]:
        """Return additional entries for the model's object in the response of `/v1/models`."""
        return {}
