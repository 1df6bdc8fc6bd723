"""Defines the input for a stage that is sent in vLLM's own request messages (msgpack; never pickle). Pure.

A flow opens a request with an ordinary ADD whose `SamplingParams.extra_args` contain a `StageInput` under `INPUT`. A
later chunk is another ADD with the same request id and a `StageInput` under `CHUNK`. A stream is sent as a sequence of
parts. Each part is a separate request with a `PartHeader`, under `PART` in `extra_args` or as
`PoolingParams.extra_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

INPUT = "omni_input"
CHUNK = "omni_chunk"
PART = "omni_part"
EXPORT = "omni_export"
"""Ranges [start, stop) of positions of a request whose hidden states another stage needs; the last may be open."""
EXPORTED = "omni_exported"
"""Number of leading positions whose hidden states another replica exports. A flow sets 0 if it can use hidden states of
one request from a prefill and a decode replica (`HiddenStatesRef.before`); the request for decode has the prompt's
length."""
TICKET = "omni_ticket"
"""Key with which `Admission` finds a request's options; not sent to replicas."""
ABORT_CLIENT = "omni_forget"
"""Marks a message that makes a replica abort the requests that a dead API server sent before a given time."""
RESUMED = "omni_resumed"
"""Number of tokens at the end of a forwarded request's prompt that a lost replica had generated."""
RESERVED = frozenset({INPUT, CHUNK, PART, EXPORT, EXPORTED, TICKET, ABORT_CLIENT, RESUMED})
"""Keys of `extra_args` that a client must not set."""

KEY_POSITIONS = 16
"""Number of prompt positions between two keys of `StageInput.prefix_keys`."""

OPEN_END = 1 << 31
"""Stop of an exported range that has no end: positions of generated tokens are exported too."""

END = -1
"""Part index of a request that only ends its stream."""

FILLER = [0]
"""Prompt of a part without tokens: vLLM accepts no empty prompt."""


class HiddenStatesRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Location of the first `count` hidden states of a request.

    Attributes:
        source: address of the producer that stores them.
        name: name of the request at the producer.
        start: number of hidden states that this producer does not store, since another replica has exported them.
        before: location of the first `start` hidden states.
    """

    source: str
    name: str
    count: int
    start: int = 0
    before: HiddenStatesRef | None = None

    def places(self) -> list[tuple[HiddenStatesRef, int]]:
        """Return the locations, and the number of hidden states up to the end of each, in the order of reading."""
        found = [] if self.before is None else self.before.places()
        return [*((ref, min(end, self.start)) for ref, end in found), (self, self.count)]


class StageInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk of a request's input for a stage, with the fields of `plugins.flow.Open` and `Extend`.

    Attributes:
        prompt_positions: number of (further) prompt positions whose input is complete; None = all.
        step_inputs: number of (further) positions after the prompt whose input is complete.
        last: no chunk follows.
        hidden_spans: ranges [start, stop) of prompt positions whose input is hidden states of another stage.
        hidden_states: location of these hidden states.
        done: number of tokens at the end of the engine's prompt that this stage has generated already.
        prefix_keys: keys of the prompt's beginnings of `KEY_POSITIONS`, twice as many, ... positions.
        payload: the plugin's message as decoded msgpack; the stage's worker converts it to the plugin's Struct.
        params: the stage's own parameters, if the stage defines a type for them.
        group, rate: largest number of tokens in an output, and tokens per second that its consumer uses.
    """

    prompt_positions: int | None = None
    step_inputs: int = 0
    last: bool = True
    hidden_spans: tuple[tuple[int, int], ...] = ()
    hidden_states: HiddenStatesRef | None = None
    done: int = 0
    prefix_keys: tuple[bytes, ...] = ()
    payload: Any = None
    params: Any = None
    group: int = 1
    rate: float = 0.0

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> tuple[StageInput, bool]:
        """Return the input, and whether it is a later chunk. A request without a `StageInput` is complete."""
        extra = extra_args or {}
        if CHUNK in extra:
            return msgspec.convert(extra[CHUNK], cls), True
        return msgspec.convert(extra.get(INPUT, {}), cls), False


def generated_before(extra_args: Mapping[str, Any]) -> int:
    """Return the number of tokens at the end of a request's prompt that another replica of the stage has generated."""
    return int(extra_args.get(RESUMED) or extra_args.get(INPUT, {}).get("done", 0))


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Header of a request that contains one part of a stream.

    Attributes:
        stream: name of the stream, unique for each attempt.
        part: index of the part in its stream, from 0, or END.
        last: the stream ends with this part.
        empty: the prompt is `FILLER`.
        payload: the plugin's message as decoded msgpack.
        params: the stage's own parameters, if the stage defines a type for them.
    """

    stream: str
    part: int
    last: bool
    empty: bool = False
    payload: Any = None
    params: Any = None

    def as_extra(self) -> dict[str, Any]:
        """Return the header as plain data for `PoolingParams.extra_kwargs`."""
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain

    @classmethod
    def of(cls, extra: Any) -> PartHeader:
        """Return the header that `extra` contains; msgspec.ValidationError if it is not a valid header."""
        return msgspec.convert(extra, cls)

    @classmethod
    def end(cls, stream: str) -> PartHeader:
        """Return the header of a request that makes a stage drop a stream."""
        return cls(stream=stream, part=END, last=True, empty=True)


def export_ranges(extra_args: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Return the ranges [start, stop) whose hidden states another stage needs; empty for most requests."""
    return [(int(a), int(b)) for a, b in (extra_args or {}).get(EXPORT, ())]


def exported_before(extra_args: Mapping[str, Any] | None) -> int:
    """Return the number of leading positions whose hidden states another replica exports (`EXPORTED`)."""
    return int((extra_args or {}).get(EXPORTED, 0))
