"""Returns memory to the system after start-up."""

from __future__ import annotations

import ctypes
import ctypes.util


def malloc_trim() -> None:
    """Return free heap pages to the operating system; glibc would keep hundreds of MB that were used while loading.

    Does nothing without glibc. It does not collect garbage: that would write into every object, and a forked process
    copies each page that is written to.
    """
    library = ctypes.util.find_library("c")
    release = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if release is not None:
        release(0)
