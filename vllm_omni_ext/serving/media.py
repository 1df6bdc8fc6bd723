"""vLLM's media connector for URLs of clients, with our rules for fetching and one error for all failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from urllib3.util import parse_url
from vllm.logger import init_logger
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.failures import BadRequest, as_vllm_error
from vllm_omni_ext.serving.fetching import Budget, Fetcher, Rules
from vllm_omni_ext.serving.pixels import BUDGET

logger = init_logger(__name__)

STOCK = "http"
"""Name of vLLM's own connector, which ours replaces; another one that VLLM_MEDIA_CONNECTOR names stays in use."""

EARLIEST_FAILURE_S = 0.5
"""Seconds. A failure is never answered earlier, so that its time does not reveal whether a port nearby is open."""

MOST_BYTES = 1 << 30
"""Bytes of media from URLs that an API server holds at once, before they are decoded."""

FAILED = "could not be fetched, or is not what it should be"


class MediaNotFetched(BadRequest):
    """Status 400, the same for every failure; the log has the reason."""


class CarefulConnector(MediaConnector):
    """`MediaConnector` that fetches with `Fetcher`.

    Attributes:
        allow_private_media: the stage config's value; set by `install`.
        budget: the process's budget; set by `install`.
    """

    allow_private_media: str | None = None
    budget = Budget(MOST_BYTES)

    def __init__(self, *args: Any, allowed_media_domains: list[str] | None = None, **kwargs: Any) -> None:
        fetcher = Fetcher(Rules.of(self.allow_private_media, allowed_media_domains or ()))
        super().__init__(*args, connection=fetcher, allowed_media_domains=allowed_media_domains, **kwargs)

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load a medium, in a thread without an event loop."""
        if not _is_http(url):
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
        return asyncio.run(self.load_from_url_async(url, media_io, fetch_timeout=fetch_timeout))

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load a medium.

        Raises:
            MediaNotFetched: the medium could not be fetched or read.
            ValueError: the host is not one of `--allowed-media-domains`.
            BadRequest: the images of the request have too many pixels together.
        """
        _count_pixels(media_io)
        if not _is_http(url):
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        self._assert_url_in_allowed_media_domains(parse_url(url))
        since = time.monotonic()
        try:
            with self.budget.lease():
                return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except BadRequest:
            raise
        except Exception as error:
            logger.warning("A medium of %r was not fetched: %r", parse_url(url).host, error)
            await asyncio.sleep(EARLIEST_FAILURE_S - (time.monotonic() - since))
            field = _field(media_io)
            raise MediaNotFetched(f"{field} {FAILED}", parameter=field) from None


def _count_pixels(media_io: Any) -> None:
    """Count the pixels of an image before it is decoded; decoding runs in a thread without the request's context."""
    budget = BUDGET.get()
    if budget is None or not isinstance(media_io, ImageMediaIO):
        return
    decode = media_io.load_bytes

    def load_bytes(data: bytes) -> Any:
        try:
            budget.take(data)
        except RequestError as error:
            raise as_vllm_error(error) from error
        return decode(data)

    media_io.load_bytes = load_bytes  # type: ignore[method-assign]


@contextmanager
def install(allow_private_media: str | None) -> Iterator[None]:
    """Inside the block, this process fetches the media of requests by our rules.

    Args:
        allow_private_media: the stage config's value.
    """
    stock = MEDIA_CONNECTOR_REGISTRY.name2class[STOCK]
    settings = {"allow_private_media": allow_private_media, "budget": Budget(MOST_BYTES)}
    configured = type(CarefulConnector.__name__, (CarefulConnector,), settings)
    MEDIA_CONNECTOR_REGISTRY.register(STOCK)(configured)
    try:
        yield
    finally:
        MEDIA_CONNECTOR_REGISTRY.register(STOCK)(stock)


def _is_http(url: str) -> bool:
    """Return whether vLLM would fetch a URL, by vLLM's own test."""
    return url[:5].lower() != "data:" and (parse_url(url).scheme or "").startswith("http")


def _field(media_io: Any) -> str:
    if isinstance(media_io, AudioMediaIO):
        return "audio_url"
    return "video_url" if isinstance(media_io, VideoMediaIO) else "image_url"
