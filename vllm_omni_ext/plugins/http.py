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
"""Values for `HttpSurface.apis`. `SPEECH` needs the method `HttpSurface.speech`, and `IMAGES` needs
`HttpSurface.image`. `REALTIME` sends chat requests, so it needs no method.
"""


class OmniServer(Protocol):
    """The part of an API server that plugins may use: the argument `server` of the methods of `HttpSurface`."""

    capabilities: Capabilities
    runtime: Any
    """The plugin's `ModelRuntime` of this API server."""
    max_media_tokens: int | None
    """Most tokens of an image, a video or a sound (`limits.max_media_tokens`); None: no limit."""

    def generate(self, request: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        """Start a request that does not use the frontend stage; yield its `modalities.base.OutputChunk`s.

        The runtime plans or refuses the request before this method returns the generator. Closing the generator aborts
        the request.

        Raises:
            RequestError: the request cannot be served.
        """

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, computed in the only thread that uses the tokenizer.

        Args:
            special: convert markers of the chat format in the text to special tokens; False: tokenize them as plain
                text.
        """

    async def images(self, messages: Sequence[Any]) -> list[Any]:
        """Load the pictures of OpenAI chat messages, within the server's limits for media; return PIL images."""

    async def sounds(self, messages: Sequence[Any], *, rate: int) -> list[Any]:
        """Load the sounds of OpenAI chat messages within the server's limits for media.

        Returns:
            For each sound, in order: float32 [samples], mono, at `rate` Hz.

        Raises:
            RequestError: a sound cannot be read.
        """

    async def sound(self, url: str, *, rate: int, field: str) -> Any:
        """Load the sound at a URL or `data:` URL; return float32 [samples], mono, at `rate` Hz.

        Args:
            field: name of the request field with the URL, for errors.

        Raises:
            RequestError: the sound cannot be read.
        """


class HttpSurface:
    """Base class of a plugin's HTTP interface, and the interface of a plugin without a subclass.

    This class serves chat requests, whose additional fields are those of the modalities and of `ModelRuntime.fields`.
    It adds no other API.
    """

    apis: tuple[str, ...] = ()
    """APIs besides chat: `SPEECH`, `IMAGES`, `REALTIME`, or "pkg.mod:attr" of a function
    `(app, model: serving.served.ServedModel, **stock) -> None` that adds routes to the FastAPI application. `stock` are
    arguments of vLLM's handlers."""

    speech_stage: str = ""
    """The stage whose tokens the field `max_new_tokens` of `/v1/audio/speech` limits; "" = the field is refused."""

    speech_fields: tuple[str, ...] = ()
    """Optional fields of `/v1/audio/speech` that `speech` reads: `speed`, `instructions`, `ref_audio`, `ref_text`,
    `sample_rate`, `language`. The core refuses the others, except those of `ModelRuntime.fields` and a speed of 1.
    `voice` and `speaker` are refused unless they are among `ModelRuntime.fields`."""

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        """Return the options of a chat request; called before vLLM renders the prompt.

        A plugin may change the modalities, set defaults, or add pictures of the conversation.

        Args:
            options: the options that the core has read from the body.
            body: vLLM's chat request.
        """
        return options

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Convert a body of `/v1/audio/speech` to a prompt; called only for families with the API `SPEECH`."""
        raise NotImplementedError

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Return (prompt, options) of one picture for a body of `/v1/images/*`; only for families with `IMAGES`."""
        raise NotImplementedError

    def routers(self, server: OmniServer) -> Sequence[Any]:
        """Return FastAPI routers with the plugin's own routes."""
        return ()

    def card(self) -> Mapping[str, Any]:
        """Return additional entries for the model's object in the response of `/v1/models`."""
        return {}
