"""Records which lines of a batch are being answered, so that a line that crashes API servers is not sent forever."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container
from pathlib import Path

from vllm_omni_ext.batch.files import replaced

MOST_ENDED = 3
"""Number of API servers that may end while they answer the same line. Then the line's result is an error."""

BEGUN, WITHDRAWN = b"+", b"-"


class Sends:
    """A file to which an API server appends an entry when it begins to answer a line, and when it stops an answer.

    A line that was begun and not stopped, and has no result, was being answered when its API server ended. Entries
    survive the end of the process, but perhaps not a crash of the machine.

    Args:
        path: the file; entries of lines in `done` are removed from it.
        done: `custom_id` of lines that have a result.
    """

    def __init__(self, path: Path, done: Container[str]) -> None:
        self._path = path
        counts = {name: count for name, count in _read(path).items() if count > 0 and name not in done}
        self._ended = counts
        if path.exists():
            with replaced(path) as file:
                file.write(b"".join(_entry(BEGUN, name) * count for name, count in counts.items()))

    def ended(self, custom_id: str) -> int:
        """Return the number of API servers that ended while they answered a line, before this object was created."""
        return self._ended.get(custom_id, 0)

    def begin(self, custom_id: str) -> None:
        """Record that this API server begins to answer a line."""
        self._append(BEGUN, custom_id)

    def withdraw(self, custom_id: str) -> None:
        """Record that this API server stops its answer to a line, e.g. at shutdown; `ended` does not count it."""
        self._append(WITHDRAWN, custom_id)

    def _append(self, sign: bytes, custom_id: str) -> None:
        with self._path.open("ab") as file:
            file.write(_entry(sign, custom_id))


def _entry(sign: bytes, custom_id: str) -> bytes:
    return sign + json.dumps(custom_id).encode() + b"\n"


def _read(path: Path) -> Counter[str]:
    """Return how often each line was begun and not withdrawn, by `custom_id`; an incomplete last entry is ignored."""
    found: Counter[str] = Counter()
    if path.exists():
        for entry in path.read_bytes().split(b"\n")[:-1]:
            found[json.loads(entry[1:])] += 1 if entry[:1] == BEGUN else -1
    return found
