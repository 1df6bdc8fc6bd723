"""Limits the pixels of all images of one request together.

Each image is decoded on arrival and held until the model's processor takes all of them, at three bytes per pixel. The
file of a single-coloured image is small at any size, so a limit on the body's length does not limit the pixels.
"""

from __future__ import annotations

import io
import threading
from contextvars import ContextVar

from PIL import Image

from vllm_omni_ext.errors import RequestError

FIELD = "image_url"


class PixelBudget:
    """The pixels that the images of one request may still have. Used by several threads.

    Args:
        most: pixels of all images together.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._lock = threading.Lock()

    def take(self, data: bytes) -> None:
        """Count an image before it is decoded; data that is no image is ignored, and its reader refuses it.

        Args:
            data: the image's file.

        Raises:
            RequestError: the images have too many pixels together.
        """
        try:
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
        except (OSError, ValueError, Image.DecompressionBombError):
            return
        with self._lock:
            self._left -= width * height
            if self._left < 0:
                raise RequestError(
                    f"the images of a request may have {self._most} pixels together (max_request_pixels)",
                    parameter=FIELD,
                )


BUDGET: ContextVar[PixelBudget | None] = ContextVar("pixel_budget", default=None)
"""Budget of the request that is being handled."""
