"""Limits of media: pixels of images, bytes of files from URLs, and one error for all failures to get a file."""

from __future__ import annotations

import asyncio
import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from PIL import Image
from urllib3.util import parse_url
from vllm.logger import init_logger
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO

from vllm_omni_ext.config.schema import OmniConfig
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.serving.limits.fetching import Fetcher, Rules
from vllm_omni_ext.serving.responses import BadRequest, as_vllm_error

logger = init_logger(__name__)

STOCK = "http"
"""Name of vLLM's own connector, which ours replaces; another one that VLLM_MEDIA_CONNECTOR names stays in use."""

EARLIEST_FAILURE_S = 0.5
"""Seconds. A failure is never answered earlier, so that its time does not reveal whether a port nearby is open."""

MOST_BYTES = 1 << 30
"""Bytes of media from URLs that an API server holds at once, before they are decoded."""

FIELDS = {AudioMediaIO: "audio_url", VideoMediaIO: "video_url"}
FAILED = "could not be fetched, or is not what it should be"


class Budget:
    """Limits what is held at once, in several threads.

    Args:
        most: limit of all amounts together.
        problem: text of the error.
        parameter: field that the error names.
    """

    def __init__(self, most: int, problem: str, *, parameter: str) -> None:
        self._most = most
        self._error = partial(RequestError, problem, parameter=parameter)
        self._lock = threading.Lock()
        self.held = 0

    def take(self, amount: int) -> None:
        """Add to what is held; RequestError if that is more than the limit."""
        with self._lock:
            self.held += amount
            if self.held > self._most:
                raise self._error()

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Return a function like `take`; the end of the block returns the amounts of its calls."""
        taken: list[int] = []

        def take(amount: int) -> None:
            taken.append(amount)
            self.take(amount)

        try:
            yield take
        finally:
            with self._lock:
                self.held -= sum(taken)


PIXELS: ContextVar[Budget | None] = ContextVar("pixels", default=None)
"""Budget of the request that is being handled.

Each image is decoded on arrival and held until the model's processor takes all of them, at three bytes per pixel. The
file of a single-coloured image is small at any size.
"""


def pixel_budget(config: OmniConfig) -> Budget:
    """Return the budget of one request."""
    most = config.limits.max_request_pixels
    problem = f"the images of a request may have {most} pixels together (limits.max_request_pixels)"
    return Budget(most, problem, parameter="image_url")


def count_pixels(budget: Budget, data: bytes) -> None:
    """Take the pixels of an image from a budget before it is decoded; its reader refuses data that is no image."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    except (OSError, ValueError, Image.DecompressionBombError):
        return
    budget.take(width * height)


class MediaNotFetched(BadRequest):
    """Status 400, the same for every failure; the log has the reason."""


class RestrictedMediaConnector(MediaConnector):
    """`MediaConnector` that fetches with `Fetcher`; `install` sets the attributes."""

    allow_private_media: str | None = None
    budget: Budget
    """Bytes of the process."""

    def __init__(self, *args: Any, allowed_media_domains: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, allowed_media_domains=allowed_media_domains, **kwargs)
        self._rules = Rules.of(self.allow_private_media, allowed_media_domains or ())

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
        _limit_pixels(media_io)
        if not _is_http(url):
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        self._assert_url_in_allowed_media_domains(parse_url(url))
        since = time.monotonic()
        try:
            with self.budget.lease() as take:
                once = copy.copy(self)
                once.connection = Fetcher(self._rules, take)  # type: ignore[assignment]
                return await super(RestrictedMediaConnector, once).load_from_url_async(
                    url, media_io, fetch_timeout=fetch_timeout
                )
        except BadRequest:
            raise
        except Exception as error:
            logger.warning("A medium of %r was not fetched: %r", parse_url(url).host, error)
            await asyncio.sleep(EARLIEST_FAILURE_S - (time.monotonic() - since))
            field = next((name for kind, name in FIELDS.items() if isinstance(media_io, kind)), "image_url")
            raise MediaNotFetched(f"{field} {FAILED}", parameter=field) from None


def _limit_pixels(media_io: Any) -> None:
    """Count an image before it is decoded. Decoding runs in a thread without the request's context."""
    budget = PIXELS.get()
    if budget is None or not isinstance(media_io, ImageMediaIO):
        return
    decode = media_io.load_bytes

    def load_bytes(data: bytes) -> Any:
        try:
            count_pixels(budget, data)
        except RequestError as error:
            raise as_vllm_error(error) from error
        return decode(data)

    media_io.load_bytes = load_bytes  # type: ignore[method-assign]


@contextmanager
def install(allow_private_media: str | None) -> Iterator[None]:
    """Inside the block, this process fetches the media of requests by our rules."""
    stock = MEDIA_CONNECTOR_REGISTRY.name2class[STOCK]
    budget = Budget(MOST_BYTES, f"all media being fetched have more than {MOST_BYTES} bytes", parameter="url")
    settings = {"allow_private_media": allow_private_media, "budget": budget}
    configured = type(RestrictedMediaConnector.__name__, (RestrictedMediaConnector,), settings)
    MEDIA_CONNECTOR_REGISTRY.register(STOCK)(configured)
    try:
        yield
    finally:
        MEDIA_CONNECTOR_REGISTRY.register(STOCK)(stock)


def _is_http(url: str) -> bool:
    """Return whether vLLM would fetch a URL, by vLLM's own test."""
    return url[:5].lower() != "data:" and (parse_url(url).scheme or "").startswith("http")
