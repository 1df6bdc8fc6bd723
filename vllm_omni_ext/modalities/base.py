"""Base class of the output chunks that flows emit (`plugins.flow.Emit`), and the interface of modalities.

Imports no vLLM and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

TEXT, AUDIO, IMAGE = "text", "audio", "image"


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """A piece of an answer in one modality; a flow sends it to the client with `plugins.flow.Emit`.

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
    """Entries that a modality adds to an answer of `/v1/chat/completions` that is not streamed.

    Attributes:
        message: merged into `choices[0].message`.
        choice: merged into `choices[0]`.
        usage: merged into `usage.completion_tokens_details`.
        keep_text: keep the text in `message.content` although the client has not requested text, because the answer
            has no output of the modality.
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, int] = field(default_factory=dict)
    keep_text: bool = False


class ModalityStream:
    """Writes the output of one modality to one streamed answer of `/v1/chat/completions`.

    This base class writes nothing, and does not change the text.
    """

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return the choices (objects with a `delta`) for one chunk; empty if there is nothing to send yet.

        Work that takes milliseconds (e.g. to encode a picture) must run in a thread.
        """
        return []

    def text(self, delta: dict[str, Any]) -> None:
        """Change the `delta` of a choice with text in place before it is sent, e.g. add a transcript."""

    def end(self) -> list[dict[str, Any]]:
        """Return the choices (objects with a `delta`) to send after the last chunk."""
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

        Args:
            stream: whether the answer is streamed.

        Returns:
            (encoding, model fields). The encoding is passed to `assemble` and `stream`. The model fields are request
            fields of the model inside the modality's object, by their path in the body, e.g. {"audio.voice": "ethan"}.

        Raises:
            RequestError: a field is invalid; the error contains its path.
        """
        return None, {}

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: Any, text: str) -> Assembled:
        """Return the modality's entries of an answer that is not streamed.

        Args:
            chunks: all chunks of the modality, in order.
            encoding: the encoding that `read` has returned.
            text: the answer's text (e.g. the transcript of its sound).
        """
        return Assembled()

    def stream(self, encoding: Any) -> ModalityStream:
        """Return the writer for one streamed answer; `encoding` is the encoding that `read` has returned."""
        return ModalityStream()

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return attributes of the `OmniRequestOutput` of `LLM.generate`, e.g. {"audio": ..., "sample_rate": ...}.

        For a modality of a model family, this is called for every output, even if `chunks` is empty.
        """
        return {}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record metrics of a chunk that is sent to the client.

        Args:
            metrics: the `vllm_omni_ext.metrics.Metrics` of the API server.
            trace: the `observability.request_trace.OutputTrace` of the request and modality.
            at: seconds since the request's arrival.
        """
