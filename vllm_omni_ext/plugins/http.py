"""A model plugin's HTTP interface: ready-made APIs to switch on, how to read their bodies, and the plugin's own routes.

Imported in API servers only. A plugin that serves only chat needs no subclass: `HttpSurface` itself is the default.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from vllm_omni_ext.plugins.runtime import Capabilities, Rendered, RequestOptions

SPEECH = "vllm_omni_ext.serving.speech:install"
IMAGES = "vllm_omni_ext.serving.images:install"
REALTIME = "vllm_omni_ext.serving.realtime.socket:install"
"""Ready-made APIs. `REALTIME` uses chat, and no method of the surface."""


class OmniServer(Protocol):
    """The server's interface for plugins."""

    capabilities: Capabilities
    runtime: Any
    """The plugin's `ModelRuntime` of this API server."""
    max_media_tokens: int | None
    """The stage config's limit of an image's, a video's or a sound's tokens; None: no limit."""

    def generate(self, request: Rendered, options: RequestOptions, request_id: str) -> AsyncGenerator[Any, None]:
        """Start a request that does not use the frontend; yields `modalities.base.OutputChunk`s.

        The request is planned, and refused if necessary, before the generator is returned; closing the generator aborts
        it.
        """

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, computed in the thread that may use the tokenizer.

        Args:
            special: marks of the chat format in the text become their special tokens; otherwise they are plain
                characters.
        """

    async def images(self, messages: Sequence[Any]) -> list[Any]:
        """Return the pictures of a conversation as PIL images, in order; fetched under the server's limits."""


class HttpSurface:
    """Base class: chat with the fields of the modalities and of the runtime, without further APIs."""

    apis: tuple[str, ...] = ()
    """Ready-made APIs to switch on: "pkg.mod:attr" of `(app, model: serving.served.ServedModel, **stock) -> None`."""

    speech_stage: str = ""
    """The stage whose tokens `max_new_tokens` of `/v1/audio/speech` limits; "" = the field is refused."""

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        """Change the options that the core read from a chat body (routes, defaults, pictures of the conversation)."""
        return options

    async def speech(self, body: Any, options: RequestOptions, server: OmniServer) -> Rendered:
        """Turn a body of `/v1/audio/speech` into a request; only for families with the API `SPEECH`."""
        raise NotImplementedError

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        """Turn a body of `/v1/images/*` into a request for one picture; only for families with the API `IMAGES`."""
        raise NotImplementedError

    def routers(self, server: OmniServer) -> Sequence[Any]:
        """Return FastAPI routers with the plugin's own routes."""
        return ()

    def card(self) -> Mapping[str, Any]:
        """Return additional entries for the model's card in `/v1/models`."""
        return {}
