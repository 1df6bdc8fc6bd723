"""Caches that a vLLM tree has been checked, so that a start does not parse forty of its files again.

The cache is an empty file whose name is a hash of everything the result depends on: each source file's path, size and
modification time, and the expected fingerprints.
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


class VerifiedCache:
    """The cached result for one tree and one set of seams.

    Args:
        folder: folder of the cache; None: `vllm-omni-ext` in the user's cache folder.
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
        """Whether exactly this combination passed the check before."""
        return self._file.is_file()

    def keep(self) -> None:
        """Record that the check has passed; if the file cannot be written, the next start checks again."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
        except OSError as error:
            log.debug("not remembered: %s", error)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-omni-ext"
