"""Limits the pixels of images and the bytes of fetched media; reports every failed fetch with the same error."""

from __future__ import annotations

import asyncio
import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from urllib3.util import parse_url
from vllm.logger import init_logger
from vllm.multimodal.image import open_image
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
"""Name of vLLM's own connector, which `install` replaces. A connector set by VLLM_MEDIA_CONNECTOR is not replaced."""

EARLIEST_FAILURE_S = 0.5
"""Least seconds from the start of a fetch to its error response.

Thus the time does not reveal to clients whether a port in the server's network is open."""

MOST_BYTES = 1 << 30
"""Limit of the bytes of fetched, undecoded media that an API server holds at a time."""

FIELDS = {AudioMediaIO: "audio_url", VideoMediaIO: "video_url"}
FAILED = "could not be fetched, or could not be decoded"


class Budget:
    """Limits a sum, e.g. of bytes or pixels, that several threads increase and decrease.

    Args:
        most: limit of the sum.
        problem: text of the RequestError that is raised if the limit is exceeded.
        parameter: field that the RequestError names, unless a call of `take` names another one.
    """

    def __init__(self, most: int, problem: str, *, parameter: str) -> None:
        self._most = most
        self._problem = problem
        self._parameter = parameter
        self._lock = threading.Lock()
        self.held = 0

    def take(self, amount: int, *, parameter: str = "") -> None:
        """Add `amount`, of the field `parameter`, to the sum; raise RequestError if the sum exceeds the limit."""
        with self._lock:
            self.held += amount
            if self.held > self._most:
                raise RequestError(self._problem, parameter=parameter or self._parameter)

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that calls `take`; subtract the amounts of all its calls when the `with` block ends."""
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
"""Pixel budget of the current request; None: no limit.

Each image is decoded on arrival, to three bytes per pixel, and held until the model's processor has all images of the
request. The size of the files is no limit: the file of a single-coloured image is small at any number of pixels.
"""


def pixel_budget(config: OmniConfig) -> Budget:
    """Return the pixel budget of one request: `limits.max_request_pixels`."""
    most = config.limits.max_request_pixels
    problem = f"the images of a request may have {most} pixels together (limits.max_request_pixels)"
    return Budget(most, problem, parameter="image_url")


def count_pixels(budget: Budget, data: bytes, parameter: str) -> None:
    """Add the pixels of an encoded image to a budget. Data that is not an image is ignored: its decoder raises.

    Args:
        parameter: field or form part with the image, which the budget's RequestError names.
    """
    try:
        with open_image(io.BytesIO(data)) as image:
            width, height = image.size
    except Exception:  # Pillow's decoders raise errors of any type
        return
    budget.take(width * height, parameter=parameter)


class MediaNotFetched(BadRequest):
    """Status 400 with the same message for every failed fetch; the reason is only in the log."""


class RestrictedMediaConnector(MediaConnector):
    """vLLM's `MediaConnector`, but http and https URLs are fetched with `Fetcher`, which checks their addresses.

    Attributes:
        allow_private_media: value of the stage config (see `Rules.of`); `install` sets it, and `budget`.
    """

    allow_private_media: str | None = None
    budget: Budget
    """Byte budget of this process for fetched media."""

    def __init__(self, *args: Any, allowed_media_domains: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, allowed_media_domains=allowed_media_domains, **kwargs)
        self._rules = Rules.of(self.allow_private_media, allowed_media_domains or ())

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load an image, video or sound; called in a thread without an event loop."""
        if not _is_http(url):
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
        return asyncio.run(self.load_from_url_async(url, media_io, fetch_timeout=fetch_timeout))

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Load an image, video or sound.

        Raises:
            MediaNotFetched: the file could not be fetched or decoded.
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
            field = _field(media_io)
            raise MediaNotFetched(f"{field} {FAILED}", parameter=field) from None


def _limit_pixels(media_io: Any) -> None:
    """Make `media_io` count the pixels of each image, also of a video in JPEG images, before it decodes the image.

    The budget is read from `PIXELS` here, because the thread that decodes does not have the request's context.
    """
    budget = PIXELS.get()
    image_io = media_io.image_io if isinstance(media_io, VideoMediaIO) else media_io
    if budget is None or not isinstance(image_io, ImageMediaIO):
        return
    decode, field = image_io.load_bytes, _field(media_io)

    def load_bytes(data: bytes) -> Any:
        try:
            count_pixels(budget, data, field)
            return decode(data)
        except RequestError as error:
            raise as_vllm_error(error) from error
        except RuntimeError as error:  # Pillow's decoder of AVIF
            unread = RequestError(f"{field}: is not a picture that can be read", parameter=field)
            raise as_vllm_error(unread) from error

    image_io.load_bytes = load_bytes  # type: ignore[method-assign]


def _field(media_io: Any) -> str:
    return next((name for kind, name in FIELDS.items() if isinstance(media_io, kind)), "image_url")


@contextmanager
def install(allow_private_media: str | None) -> Iterator[None]:
    """Make this process fetch media with `RestrictedMediaConnector` inside the `with` block."""
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
    """Return whether vLLM fetches a URL over HTTP; the same test as in vLLM's `MediaConnector`."""
    return url[:5].lower() != "data:" and (parse_url(url).scheme or "").startswith("http")
