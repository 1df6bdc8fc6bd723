"""The findings of `vllm-omni-ext doctor`, as data and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_INDENT = 2


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        name: the checked thing.
        ok: False makes `doctor` fail.
        state: the result, in a few words, and the remedy if it is not ok.
        details: more about it, by heading.
    """

    name: str
    ok: bool
    state: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A group of findings."""

    title: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """True if every line is."""
        return all(line.ok for line in self.lines)


def as_text(sections: Sequence[Section]) -> str:
    """Text for a terminal: one line per finding, details indented below it, a text of several lines without heading."""
    return "\n".join(row for section in sections for row in _rows(section))


def as_data(sections: Sequence[Section]) -> dict[str, object]:
    """Data for `--json`."""
    return {
        "ok": all(section.ok for section in sections),
        "sections": {
            section.title: [
                {"name": line.name, "ok": line.ok, "state": line.state, **line.details} for line in section.lines
            ]
            for section in sections
        },
    }


def _rows(section: Section) -> Iterator[str]:
    yield section.title
    width = max((len(line.name) for line in section.lines), default=0)
    for line in section.lines:
        yield f"{'':{_INDENT}}{'ok ' if line.ok else 'BAD'} {line.name:{width}}  {line.state}"
        for heading, text in line.details.items():
            if "\n" in text:
                yield textwrap.indent(text, " " * (_INDENT + 4))
            else:
                yield f"{'':{_INDENT + 4}}{heading}: {text}"
    yield ""
