"""The table of faults, read from the YAML files in this folder: one file for each part of the package."""

from __future__ import annotations

from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change to one file.

    Attributes:
        name: unique, in words and hyphens.
        file: path from the repository's root.
        find: text that occurs once in the file.
        replace: text that takes its place.
        tests: node ids of pytest, or files; one of their tests must fail.
        suite: smallest command that runs these tests: `make quick`, `make test` or `make test-all`.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]
    suite: str

    def changed(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises:
            ValueError: the text to replace does not occur exactly once.
        """
        if text.count(self.find) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.find)} times in {self.file}, not once")
        return text.replace(self.find, self.replace)


def read() -> list[Fault]:
    """Return all faults, file by file."""
    return [fault for file in sorted(FOLDER.glob("*.yaml")) for fault in read_file(file)]


def read_file(file: Path) -> list[Fault]:
    """Return the faults of one file."""
    return msgspec.yaml.decode(file.read_bytes(), type=list[Fault])
