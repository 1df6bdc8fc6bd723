"""Counts the contents of a JSON body while its bytes arrive, before the body is parsed.

Parsing and validation cost memory and time for every value of a body, and a value may be two bytes long. The scan looks
only at structural characters, so that a long text costs next to nothing, and it stores only counts. Of a body that is
not JSON it counts at least the values that a parser reads before the first mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_omni_ext.errors import RequestError

BLOCK = 1 << 16
"""Bytes per step: the scan needs about ten times as much memory."""

WHOLE = "body"
"""Parameter name of errors that concern no single field."""

MOST_FIELDS = 1000
"""Largest number of keys of the outermost object."""

LONGEST_KEY = 1 << 16
"""Largest length in bytes of a key of the outermost object, because errors may repeat the key."""

LONGEST_NAME = 256
"""Largest length in bytes of a field name; a longer name is not read."""

ID_FIELDS = frozenset({"prompt", "input", "tokens", "token_ids", "prompt_token_ids", "allowed_token_ids"})
"""Fields that may be long lists of token ids."""

CONTENT_FIELDS = ID_FIELDS | frozenset(
    {WHOLE, "messages", "system", "instructions", "query", "queries", "documents", "items", "text", "text_1", "text_2"}
    | {"data", "data_1", "data_2", "prompt_embeds", "features"}
    | {"image", "images", "mask", "audio", "ref_audio", "video", "file"}
    | {"args", "kwargs", "init_info", "update_info"}
)
"""Fields that may be as long as a body: prompts, media, and operators' messages to workers."""

OTHERS = "*"
ARRAYS, PARTS = "[]", ".*"
PART_DEPTH = 5
"""Depth of an object in a list in an object in the list of a field: content parts and tool calls of a message."""

MOST_ELEMENTS = "max_field_elements"
QUOTE, COMMA, COLON, OPEN_ARRAY, OPEN_OBJECT = b'",:[{'
_STRUCTURE = bytes(character in b'"[]{},:' for character in range(256))
_STEPS = np.array([(character in b"[{") - (character in b"]}") for character in range(256)], np.int8)

Bytes = npt.NDArray[np.uint8]


class BodyRefused(RequestError):
    """A body exceeds a limit; `parameter` is the outermost field that does.

    Args:
        problem: the exceeded limit, as the rest of a sentence about the field.
    """

    def __init__(self, problem: str, *, parameter: str) -> None:
        super().__init__(f"{parameter}: {problem}", parameter=parameter)


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits for the contents of a body.

    Attributes:
        values: objects, arrays, texts, numbers and keys, except those that another limit counts.
        ids: numbers in `ID_FIELDS`.
        depth: nesting of objects and arrays.
        in_field: objects, arrays and texts directly in the list of a field, by the field's name. Name plus `ARRAYS`:
            only arrays. Name plus `PARTS`: objects and arrays in lists of the field's elements, and deeper.
        field_values: values in a field, by its name.
        field_bytes: length of a field, by its name; `OTHERS` applies to fields without an entry outside
            `CONTENT_FIELDS`.
        wide_text_bytes: length of a text with characters beyond ASCII, for which Python needs up to four times as much.
    """

    values: int
    ids: int
    depth: int
    in_field: Mapping[str, int]
    field_values: Mapping[str, int]
    field_bytes: Mapping[str, int]
    wide_text_bytes: int


class BodyScan:
    """The scan of one body, which arrives in pieces of any size."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._in_text = False
        self._escaped = False  # the last byte was a backslash that escapes the next byte
        self._text_bytes = 0  # length so far of an unfinished text
        self._before = 0  # the structural character before that text
        self._wide = False  # that text has characters beyond ASCII
        self._depth = 0
        self._tail = b""  # the last bytes read, which may contain the next field's name
        self._fields = self._values = self._ids = 0  # of the fields before the current one
        self._field = _Field(WHOLE)

    def feed(self, data: bytes) -> None:
        """Scan the next piece.

        Raises:
            BodyRefused: a limit is exceeded.
        """
        for start in range(0, len(data), BLOCK):
            self._read(data[start : start + BLOCK])

    def _read(self, block: bytes) -> None:
        if b"\0" in block:  # NUL occurs in JSON encoded as UTF-16 or UTF-32, and never in UTF-8
            raise BodyRefused("must be JSON in UTF-8", parameter=WHOLE)
        block = self._without_escapes(block)
        goes_on = self._in_text
        ends = block.find(b'"')
        if goes_on:
            self._lengthen(block if ends < 0 else block[:ends])
        if goes_on and ends < 0:
            self._field.bytes += len(block)
            self._refuse()
        else:
            self._read_structure(block)
            if ends >= 0:
                self._text_bytes, self._wide = 0, False
            if self._in_text:
                self._lengthen(block[block.rfind(b'"') + 1 :])
        self._tail = (self._tail + block[-LONGEST_NAME:])[-LONGEST_NAME:]

    def _read_structure(self, block: bytes) -> None:
        codes = np.frombuffer(block, np.uint8)
        at = np.flatnonzero(np.frombuffer(block.translate(_STRUCTURE), np.bool_))
        kinds = codes[at]
        quotes = kinds == QUOTE
        inside = (np.cumsum(quotes) + self._in_text) % 2 == 1  # whether the scan is inside a text after each character
        if len(inside):
            self._in_text = bool(inside[-1])
        counts = quotes == inside  # opening quotes, and structural characters outside texts
        self._count(kinds[counts], at[counts], block)

    def _without_escapes(self, block: bytes) -> bytes:
        r"""Return the block with every `\\` and `\"` replaced by letters, in the same length."""
        if self._escaped and block[:1] in (b'"', b"\\"):
            block = b"_" + block[1:]
        if b"\\" not in block:
            self._escaped = False
            return block
        block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = block.endswith(b"\\")
        return block

    def _lengthen(self, more: bytes) -> None:
        """Refuse an unfinished key, or an unfinished text beyond ASCII, that exceeds its limit."""
        self._text_bytes += len(more)
        self._wide = self._wide or not more.isascii() or b"\\u" in more
        if self._depth == 1 and self._before != COLON and self._text_bytes > LONGEST_KEY:
            raise BodyRefused(f"has a key of more than {LONGEST_KEY} bytes", parameter=WHOLE)
        if self._wide and self._text_bytes > (most := self._limits.wide_text_bytes):
            raise BodyRefused(
                f"has a text of more than {most} bytes with characters beyond ASCII", parameter=self._field.name
            )

    def _count(self, kinds: Bytes, at: npt.NDArray[np.intp], block: bytes) -> None:
        """Count brackets, commas, colons and texts; `at` holds their positions in the block."""
        steps = _STEPS[kinds]
        depths = self._depth + np.cumsum(steps, dtype=np.int64)  # depth after each character
        self._depth = int(depths[-1]) if len(depths) else self._depth
        if len(structural := kinds[kinds != QUOTE]):
            self._before = int(structural[-1])
        names = np.flatnonzero((kinds == COLON) & (depths == 1))
        self._fields += len(names)
        if self._fields > MOST_FIELDS:
            raise BodyRefused(f"has more than {MOST_FIELDS} fields", parameter=WHOLE)
        begin = begins = 0
        for end in [*names.tolist(), len(kinds)]:
            ends = int(at[end]) if end < len(kinds) else len(block)
            self._field.bytes += ends - begins
            self._field.add(kinds[begin:end], depths[begin:end])
            self._refuse()
            if end < len(kinds):
                self._values += self._field.values
                self._ids += self._field.ids
                self._field = _Field(self._name(block[max(0, ends - LONGEST_NAME) : ends]))
            begin, begins = end, ends

    def _refuse(self) -> None:
        """Raise BodyRefused if the field, or the body including the field, exceeds a limit."""
        limits, field = self._limits, self._field
        others = None if field.name in CONTENT_FIELDS else limits.field_bytes.get(OTHERS)
        for kind, count, most, key in (
            ("objects and arrays inside of one another", field.depth, limits.depth, "max_body_depth"),
            ("elements", field.elements, limits.in_field.get(field.name), MOST_ELEMENTS),
            ("arrays", field.arrays, limits.in_field.get(field.name + ARRAYS), MOST_ELEMENTS),
            ("parts of elements", field.parts, limits.in_field.get(field.name + PARTS), MOST_ELEMENTS),
            ("values", field.values, limits.field_values.get(field.name), "max_field_values"),
            ("bytes", field.bytes, limits.field_bytes.get(field.name, others), "max_field_bytes"),
        ):
            if most is not None and count > most:
                raise BodyRefused(f"has more than {most} {kind} ({key})", parameter=field.name)
        for kind, count, most, key in (
            ("values", self._values + field.values, limits.values, "max_body_values"),
            ("token ids", self._ids + field.ids, limits.ids, "max_body_ids"),
        ):
            if count > most:
                raise BodyRefused(f"with it the body has more than {most} {kind} ({key})", parameter=field.name)

    def _name(self, before: bytes) -> str:
        """Return the name of a field from the bytes before its colon."""
        text = (self._tail + before)[-LONGEST_NAME:].rstrip()
        name = text[text.rfind(b'"', 0, -1) :] if text.endswith(b'"') and text.count(b'"') > 1 else b'""'
        try:
            return str(json.loads(name)) or WHOLE
        except ValueError:
            return WHOLE


class _Field:
    """Counts of one outermost field, whose value is at depth 2 if it is an object or an array."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = self.depth = self.elements = self.arrays = self.parts = 0
        self._commas = self._others = 0

    def add(self, kinds: Bytes, depths: npt.NDArray[np.int64]) -> None:
        """Add counts: the kinds of characters, and the depth after each."""
        if not len(kinds):
            return
        arrays, texts = kinds == OPEN_ARRAY, kinds == QUOTE
        opened = arrays | (kinds == OPEN_OBJECT)
        self.depth = max(self.depth, int(depths.max()))
        self.arrays += int(np.count_nonzero(arrays & (depths == 3)))
        self.elements += int(np.count_nonzero((opened & (depths == 3)) | (texts & (depths == 2))))
        self.parts += int(np.count_nonzero(opened & (depths >= PART_DEPTH)))
        self._commas += int(np.count_nonzero(kinds == COMMA))
        self._others += int(np.count_nonzero(opened | texts))

    @property
    def values(self) -> int:
        """Lower bound, at least half of the values and keys: every array element but the first follows a comma."""
        return self._others if self.name in ID_FIELDS else max(self._others, self._commas)

    @property
    def ids(self) -> int:
        """Number of numbers in a field that may be a prompt."""
        return max(0, self._commas - self._others) if self.name in ID_FIELDS else 0
