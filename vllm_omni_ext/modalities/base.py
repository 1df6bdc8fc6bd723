"""Base class of the output chunks that flows emit, and the interface of modalities. Imports no vLLM and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

TEXT, AUDIO, IMAGE = "text", "audio", "image"


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """A piece of an answer in one modality.

    Attributes:
        modality: name of the modality; set by each subclass.
        request_id: the caller's request id; set by the core, not by the flow.
        last: no chunk of this modality follows.
        seconds: time that the stage spent on the output, by phase, e.g. {"steps": 1.5}; for the metrics.
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
    """Entries that a modality adds to a whole answer of `/v1/chat/completions`.

    Attributes:
        message: merged into `choices[0].message`.
        choice: merged into `choices[0]`.
        usage: merged into `usage.completion_tokens_details`.
        keep_text: the text stays in `message.content` though it was not requested: the answer would be empty.
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    keep_text: bool = False


class ModalityStream:
    """Writes one modality of one streamed answer. This base class writes nothing, and does not change the text."""

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return the choices (objects with a `delta`) for one chunk; empty if there is nothing to send yet.

        Work that takes milliseconds (e.g. to encode a picture) must run in a thread.
        """
        return []

    def text(self, delta: dict[str, Any]) -> None:
        """Change a delta with text in place, e.g. add a transcript."""

    def end(self) -> list[dict[str, Any]]:
        """Return the choices to send after the last chunk."""
        return []

    def usage(self) -> Mapping[str, int]:
        """Return entries to merge into `usage.completion_tokens_details`."""
        return {}


class Modality:
    """A kind of output. `modalities.registry` lists the modalities of the core and of model families.

    This base class reads no fields of a body, and adds nothing to an answer.

    Attributes:
        name: e.g. "audio".
        chunk: class of the modality's chunks.
        body_fields: names of the body fields that `read` reads, e.g. ("audio",).
    """

    name: str
    chunk: type[OutputChunk]
    body_fields: tuple[str, ...] = ()

    def read(self, body: Mapping[str, Any], *, stream: bool) -> tuple[Any, Mapping[str, Any]]:
        """Read the modality's fields of a request body.

        Returns:
            (encoding, passed to `assemble` and `stream`; values of the model's fields inside the modality's object, by
            their path in the body, e.g. {"audio.voice": "ethan"})

        Raises:
            RequestError: a field is invalid; the error contains its path.
        """
        return None, {}

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: Any, text: str) -> Assembled:
        """Return the modality's entries of a whole answer. `text` is the answer's text (e.g. the transcript)."""
        return Assembled()

    def stream(self, encoding: Any) -> ModalityStream:
        """Return the writer for one streamed answer."""
        return ModalityStream()

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return attributes of the `OmniRequestOutput` of `LLM.generate`, e.g. {"audio": ..., "sample_rate": ...}.

        For a modality of a model family, this is called for every output, even if `chunks` is empty.
        """
        return {}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record metrics of a chunk that is sent to the client `at` seconds after the request's arrival."""
