"""Records the lines of a batch that are sent, so that a line which ends API servers is not sent without limit."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container
from pathlib import Path

MOST_ENDED = 3
"""Number of API servers that may end while they answer a line; the line then gets an error."""

BEGUN, WITHDRAWN = b"+", b"-"


class Sends:
    """A file with an entry for each time that an API server has begun a line, and for each time that it stopped it.

    A line whose entries say that it was begun, and which has no line of output, was being answered when its API server
    ended. Entries survive the end of the process, not that of the machine.

    Args:
        path: the file, which is written again with the lines that are not in `done`.
        done: `custom_id` of lines that have a line of output.
    """

    def __init__(self, path: Path, done: Container[str]) -> None:
        self._path = path
        counts = {name: count for name, count in _read(path).items() if count > 0 and name not in done}
        self._ended = counts
        if path.exists():
            temporary = path.with_name(f"{path.name}.new")
            temporary.write_bytes(b"".join(_entry(BEGUN, name) * count for name, count in counts.items()))
            os.replace(temporary, path)

    def ended(self, custom_id: str) -> int:
        """Return the number of API servers that had ended while they answered the line, when the file was read."""
        return self._ended.get(custom_id, 0)

    def begin(self, custom_id: str) -> None:
        """Add the entry of a line that is sent now."""
        self._append(BEGUN, custom_id)

    def withdraw(self, custom_id: str) -> None:
        """Undo `begin`: this API server stops the line, and it did not end because of it."""
        self._append(WITHDRAWN, custom_id)

    def _append(self, sign: bytes, custom_id: str) -> None:
        with self._path.open("ab") as file:
            file.write(_entry(sign, custom_id))


def _entry(sign: bytes, custom_id: str) -> bytes:
    return sign + json.dumps(custom_id).encode() + b"\n"


def _read(path: Path) -> Counter[str]:
    """Return the number of times that each line was begun and not withdrawn; an incomplete last entry is left out."""
    found: Counter[str] = Counter()
    if path.exists():
        for entry in path.read_bytes().split(b"\n")[:-1]:
            found[json.loads(entry[1:])] += 1 if entry[:1] == BEGUN else -1
    return found
