"""Text as an output: vLLM's server writes the text, so this modality does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni_ext.modalities.base import TEXT, Assembled, OutputChunk
from vllm_omni_ext.modalities.chunks import TextChunk


class TextStream:
    """The text of one streamed answer, which vLLM's own events contain."""

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def text(self, delta: dict[str, Any]) -> None:
        """Leave the delta as it is."""

    def end(self) -> list[dict[str, Any]]:
        """Return nothing."""
        return []

    def usage(self) -> Mapping[str, int]:
        """Return nothing: vLLM counts tokens."""
        return {}


class Text:
    """The modality."""

    name = TEXT
    chunk: type[OutputChunk] = TextChunk
    body_fields: tuple[str, ...] = ()

    def read(self, body: Mapping[str, Any], *, stream: bool) -> tuple[Any, Mapping[str, Any]]:
        """Read nothing."""
        return None, {}

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: Any, text: str) -> Assembled:
        """Return nothing: the text is in the message already."""
        return Assembled()

    def stream(self, encoding: Any) -> TextStream:
        """Begin one streamed answer."""
        return TextStream()

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return nothing: the text is in `outputs` already."""
        return {}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record nothing."""
