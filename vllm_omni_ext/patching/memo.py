"""Remembers that a vLLM tree has been checked, so that a start does not parse forty of its files again.

What is remembered is a file named after everything the answer depends on: each source file's path, size and time of
change, and the fingerprints it was compared with. Anything that changes gives another name.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Seam

log = logging.getLogger(__name__)


class Memo:
    """The memory of one tree and one set of seams.

    Args:
        folder: where it is kept; None: `vllm-omni-ext` in the user's cache folder.
    """

    def __init__(self, source: VllmSource, seams: Sequence[Seam], folder: Path | None = None) -> None:
        digest = hashlib.sha256()
        for module in sorted({seam.target.partition(":")[0] for seam in seams}):
            digest.update(f"{module} {source.state(module)}\n".encode())
        for seam in seams:
            digest.update(f"{seam.target} {sorted(seam.seen)}\n".encode())
        self._file = (folder or _cache()) / f"checked-{digest.hexdigest()[:32]}"

    @property
    def known(self) -> bool:
        """Whether exactly this has been found in order before."""
        return self._file.is_file()

    def keep(self) -> None:
        """Remember that it is in order; where nothing can be written, it is checked again next time."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
        except OSError as error:
            log.debug("not remembered: %s", error)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-omni-ext"
