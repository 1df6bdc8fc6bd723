"""A model that paints: the part of its plugin in an API server."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.modalities.base import IMAGE, TEXT
from vllm_omni_ext.plugins.http import IMAGES, HttpSurface, OmniServer
from vllm_omni_ext.plugins.runtime import Capabilities, Rendered, RequestOptions
from vllm_omni_ext.plugins.spec import API_VERSION, ModelFamily


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: str | None = None
    seed: int | None = Field(None, ge=0)
    steps: int | None = Field(None, ge=1, le=100)


class Runtime:
    fields = Fields

    def __init__(self, context: Any) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(
            modalities=(TEXT, IMAGE),
            default_modalities=(TEXT,),
            routes={TEXT: frozenset({"thinker"}), IMAGE: frozenset({"talker"})},
            card={"sizes": ["32x24"]},
        )

    def validate(self, options: RequestOptions) -> None:
        if options.fields.get("size") not in (None, "32x24"):
            raise RequestError("size: must be 32x24", parameter="size")


class Reply:
    """The parts of a request that the scripted engine reads."""

    def __init__(self, reply: list[int], images: list[Any]) -> None:
        self.reply, self.images = reply, images


class Surface(HttpSurface):
    apis = (IMAGES,)

    async def chat_options(self, options: RequestOptions, body: Any, server: OmniServer) -> RequestOptions:
        self.pictures = await server.images(body.messages)
        return options

    async def image(self, body: Any, options: RequestOptions, server: OmniServer) -> tuple[Rendered, RequestOptions]:
        tokens = await server.tokenize(body.prompt, special=False)
        return Rendered(data=Reply(tokens, body.images), input_tokens=len(tokens)), options


FAMILY = ModelFamily(
    name="painter",
    api_version=API_VERSION,
    architectures=(),
    pipelines=(),
    runtime=f"{__name__}:Runtime",
    http=f"{__name__}:Surface",
)
