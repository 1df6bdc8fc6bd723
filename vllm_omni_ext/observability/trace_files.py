"""Traces of ended requests as files, so that every API server can return them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from vllm_omni_ext.observability.request_trace import RequestTrace, as_trace

FOLDER = "traces"


class TraceFiles:
    """Writes the files of one API server, and reads those of all.

    Args:
        folder: private folder of the deployment.
        server: index of this API server; a replacement with the same index takes its files over.
        keep: maximum number of files of each API server; the oldest are deleted.
    """

    def __init__(self, folder: str | Path, server: int, keep: int) -> None:
        self._all = Path(folder, FOLDER)
        self._mine = self._all / str(server)
        self._keep = max(1, keep)
        self._mine.mkdir(parents=True, exist_ok=True)
        before = sorted(self._mine.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        self._written = dict.fromkeys(path.name for path in before)

    def write(self, record: RequestTrace) -> None:
        """Write the trace of a request, replacing an earlier one with the same id."""
        name = _name(record.request_id)
        unfinished = self._mine / f"{name}.new"
        unfinished.write_text(json.dumps(as_trace(record)), encoding="utf-8")
        os.replace(unfinished, self._mine / name)
        self._written.pop(name, None)
        self._written[name] = None
        while len(self._written) > self._keep:
            oldest = next(iter(self._written))
            del self._written[oldest]
            (self._mine / oldest).unlink(missing_ok=True)

    def read(self, request_id: str) -> bytes | None:
        """The trace of a request as JSON; None if no API server has kept it."""
        for folder in sorted(self._all.iterdir()):
            try:
                return (folder / _name(request_id)).read_bytes()
            except FileNotFoundError:
                continue
        return None


def _name(request_id: str) -> str:
    """A safe file name for a request id, which a client may have chosen."""
    return f"{hashlib.sha256(request_id.encode('utf-8', 'surrogatepass')).hexdigest()}.json"
