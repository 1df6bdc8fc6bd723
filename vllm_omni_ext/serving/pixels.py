"""How many pixels all images of one request may have together.

Each image is decoded as soon as it has arrived and held until the model's processor takes all of them, at three bytes a
pixel. The file of an image of one colour is small whatever its size, so that the length of a body limits nothing.
"""

from __future__ import annotations

import io
import threading
from contextvars import ContextVar

from PIL import Image

from vllm_omni_ext.errors import RequestError

FIELD = "image_url"


class PixelBudget:
    """What the images of one request may still have. Used by several threads.

    Args:
        most: pixels of all images together.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._lock = threading.Lock()

    def take(self, data: bytes) -> None:
        """Count an image before it is decoded; what is no image is left to its reader to refuse.

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
"""Of the request that is being handled."""
