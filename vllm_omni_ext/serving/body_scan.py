"""Counting what a JSON body holds while its bytes arrive, before anything is made of them.

Parsing and validating cost memory and time for every value of a body, and a value may be two bytes long. The scan looks
only at the characters that give a body its structure, so that a long text costs next to nothing, and keeps nothing but
counts. Of a body that is no JSON it sees at least what a parser sees up to the first mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_omni_ext.errors import OmniError

BLOCK = 1 << 16
"""Bytes looked at in one step: the scan needs about ten times as much memory."""

WHOLE = "body"
"""What an error names when it is about no single field."""

MOST_FIELDS = 1000
"""Keys of the outermost object."""

LONGEST_NAME = 256
"""Bytes of a field's name; of a longer one nothing is known."""

QUOTE, COMMA, COLON = b'",:'
_STRUCTURE = bytes(character in b'"[]{},:' for character in range(256))
_STEPS = np.array([(character in b"[{") - (character in b"]}") for character in range(256)], np.int8)

Bytes = npt.NDArray[np.uint8]


class BodyRefused(OmniError):
    """A body has too much of something.

    Args:
        message: what, and how much is allowed.
        parameter: the outermost field it is in.
    """

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """How much a body may hold.

    Attributes:
        values: values of all kinds, but not the keys of objects.
        objects: objects, arrays and keys.
        depth: objects and arrays inside of one another.
        in_field: objects and arrays directly in the list of a field, by its name.
    """

    values: int
    objects: int
    depth: int
    in_field: Mapping[str, int]


class BodyScan:
    """The scan of one body, which comes in pieces of any size."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._in_text = False
        self._escaped = False  # the last byte was a backslash that belongs to the next one
        self._depth = 0
        self._values = self._objects = self._fields = self._in_field = 0
        self._field = WHOLE
        self._tail = b""  # the end of what was read, where the name of the next field may be

    def feed(self, data: bytes) -> None:
        """Read the next piece.

        Raises:
            BodyRefused: a limit is exceeded.
        """
        for start in range(0, len(data), BLOCK):
            self._read(data[start : start + BLOCK])

    def _read(self, block: bytes) -> None:
        if b"\0" in block:  # in the first bytes of every JSON in UTF-16 or UTF-32, and in none that is in UTF-8
            raise BodyRefused("must be JSON in UTF-8", parameter=WHOLE)
        if self._in_text and not self._escaped and b'"' not in block and b"\\" not in block:
            self._tail = (self._tail + block[-LONGEST_NAME:])[-LONGEST_NAME:]
            return
        plain = self._without_escapes(block)
        codes = np.frombuffer(plain, np.uint8)
        at = np.flatnonzero(np.frombuffer(plain.translate(_STRUCTURE), np.bool_))
        kinds = codes[at]
        quotes = kinds == QUOTE
        inside = (np.cumsum(quotes) + self._in_text) % 2 == 1  # after the quote, if it is one
        self._in_text = bool(inside[-1]) if len(inside) else self._in_text
        outside = ~(quotes | inside)
        self._count(kinds[outside], at[outside], plain)
        self._tail = (self._tail + plain[-LONGEST_NAME:])[-LONGEST_NAME:]

    def _without_escapes(self, block: bytes) -> bytes:
        r"""The same number of bytes, with `\\` and `\"` as letters."""
        if self._escaped and block[:1] in (b'"', b"\\"):
            block = b"_" + block[1:]
        if b"\\" not in block:
            self._escaped = False
            return block
        block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = block.endswith(b"\\")
        return block

    def _count(self, kinds: Bytes, at: npt.NDArray[np.intp], block: bytes) -> None:
        """Count what is outside of texts: brackets, commas and colons, and where they are in the block."""
        if not len(kinds):
            return
        steps = _STEPS[kinds]
        depths = self._depth + np.cumsum(steps, dtype=np.int64)  # after each of them
        self._depth = int(depths[-1])
        names = np.flatnonzero((kinds == COLON) & (depths == 1))
        self._fields += len(names)
        if self._fields > MOST_FIELDS:
            raise BodyRefused(f"has more than {MOST_FIELDS} fields", parameter=WHOLE)
        begin = 0
        for end in [*names.tolist(), len(kinds)]:
            self._add(kinds[begin:end], steps[begin:end], depths[begin:end])
            if end < len(kinds):
                self._field, self._in_field = self._name(block[max(0, at[end] - LONGEST_NAME) : at[end]]), 0
            begin = end

    def _add(self, kinds: Bytes, steps: npt.NDArray[np.int8], depths: npt.NDArray[np.int64]) -> None:
        """Add what one field has in this block."""
        if not len(kinds):
            return
        limits, name = self._limits, self._field
        opened = steps > 0
        brackets = int(np.count_nonzero(opened))
        self._values += int(np.count_nonzero(kinds == COMMA)) + brackets
        self._objects += int(np.count_nonzero(kinds == COLON)) + brackets
        self._in_field += int(np.count_nonzero(opened & (depths == 3)))
        if int(depths.max()) > limits.depth:
            raise BodyRefused(
                f"has more than {limits.depth} objects and arrays inside of one another (max_body_depth)",
                parameter=name,
            )
        if (most := limits.in_field.get(name)) is not None and self._in_field > most:
            raise BodyRefused(f"has more than {most} elements (max_field_elements)", parameter=name)
        if self._objects > limits.objects:
            raise BodyRefused(
                f"with it the body has more than {limits.objects} objects, arrays and keys (max_body_objects)",
                parameter=name,
            )
        if self._values > limits.values:
            raise BodyRefused(
                f"with it the body has more than {limits.values} values (max_body_values)", parameter=name
            )

    def _name(self, before: bytes) -> str:
        """The name of a field, from what is in front of its colon."""
        text = (self._tail + before)[-LONGEST_NAME:].rstrip()
        name = text[text.rfind(b'"', 0, -1) :] if text.endswith(b'"') and text.count(b'"') > 1 else b'""'
        try:
            return str(json.loads(name)) or WHOLE
        except ValueError:
            return WHOLE
