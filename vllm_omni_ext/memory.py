"""Returns memory to the system after start-up."""

from __future__ import annotations

import ctypes
import ctypes.util


def malloc_trim() -> None:
    """Return free heap pages to the system: loading leaves hundreds of MB behind that glibc would keep for ever.

    Does nothing without glibc. It does not collect garbage: that would write into every object, and in a forked process
    each page written to is copied.
    """
    library = ctypes.util.find_library("c")
    release = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if release is not None:
        release(0)
