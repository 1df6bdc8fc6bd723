"""Output chunks of flows, and the interface of modalities. Pure: no vLLM, no torch, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

TEXT, AUDIO, IMAGE = "text", "audio", "image"


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """A chunk of one output of an answer.

    Attributes:
        modality: name of the modality; fixed by the class.
        request_id: the caller's request id; set by the core.
        last: no chunk of this modality follows.
        seconds: time that the stage spent on the output, by part, e.g. {"steps": 1.5}; for the metrics.
    """

    modality: ClassVar[str]
    request_id: str = ""
    last: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProgressChunk(OutputChunk):
    """Progress of a stage: `done` of `total` steps."""

    modality: ClassVar[str] = "progress"
    stage: str
    done: int
    total: int
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A modality's share of a whole answer of `/v1/chat/completions`.

    Attributes:
        message: merged into `choices[0].message`.
        choice: merged into `choices[0]`.
        usage: merged into `usage.completion_tokens_details`.
        keep_text: the text stays in `message.content` in any case (the answer would otherwise be empty).
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    keep_text: bool = False


class ModalityStream:
    """One streamed answer of one modality. The default is an answer without chunks, which leaves the text as it is."""

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return the choices (objects with a `delta`) for one chunk; none if the chunk is held back.

        Work that takes milliseconds (encoding a picture) belongs in a thread.
        """
        return []

    def text(self, delta: dict[str, Any]) -> None:
        """Change a text delta in place, e.g. add a transcript."""

    def end(self) -> list[dict[str, Any]]:
        """Return the choices after the last chunk."""
        return []

    def usage(self) -> Mapping[str, int]:
        """Return entries to merge into `usage.completion_tokens_details`."""
        return {}


class Modality:
    """A kind of output. `modalities.registry` lists those of the core and of families.

    The default has no fields in a body and adds nothing to an answer.

    Attributes:
        name: e.g. "audio".
        chunk: the class of its chunks.
        body_fields: names of the body fields that `read` reads, e.g. ("audio",).
    """

    name: str
    chunk: type[OutputChunk]
    body_fields: tuple[str, ...] = ()

    def read(self, body: Mapping[str, Any], *, stream: bool) -> tuple[Any, Mapping[str, Any]]:
        """Read the modality's fields of a body.

        Returns:
            (encoding of answers, for `assemble` and `stream`; request fields inside the modality's own object, under
            their name in the body, e.g. {"audio.voice": "ethan"})

        Raises:
            RequestError: a field is wrong; named by its path.
        """
        return None, {}

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: Any, text: str) -> Assembled:
        """Return the modality's share of a whole answer. `text` is the answer's text (e.g. the transcript)."""
        return Assembled()

    def stream(self, encoding: Any) -> ModalityStream:
        """Begin one streamed answer."""
        return ModalityStream()

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return attributes of the `OmniRequestOutput` of `LLM.generate`, e.g. {"audio": ..., "sample_rate": ...}.

        For a modality of a family, this is called for every output, also without any chunks.
        """
        return {}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record a chunk that goes to the client, `at` seconds after the request's arrival."""
