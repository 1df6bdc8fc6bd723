"""Modality of the thought, the text that the model generates before a picture; an output in addition to the picture.

In a chat it is `message.reasoning`, as vLLM returns the reasoning of language models. In Python it is `think_text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_omni_ext.modalities.base import Assembled, Modality, ModalityStream, OutputChunk

NAME = "thought"


@dataclass(frozen=True, kw_only=True)
class ThoughtChunk(OutputChunk):
    """An output with the whole text of the thought and its number of tokens."""

    modality: ClassVar[str] = NAME
    text: str
    tokens: int = 0


class ThoughtStream(ModalityStream):
    """Streams the thought (the reasoning text) of one chat answer, and counts its tokens."""

    def __init__(self) -> None:
        self._tokens = 0

    async def chunk(self, chunk: OutputChunk) -> list[dict[str, Any]]:
        """Return the streamed choice whose delta contains the thought as `reasoning`."""
        assert isinstance(chunk, ThoughtChunk)
        self._tokens += chunk.tokens
        return [{"index": 0, "delta": {"reasoning": chunk.text}, "logprobs": None, "finish_reason": None}]

    def usage(self) -> Mapping[str, int]:
        return {"reasoning_tokens": self._tokens}


class Thought(Modality):
    """The modality "thought": defines how the thought is returned in chats, streams and Python."""

    name = NAME
    chunk = ThoughtChunk

    async def assemble(self, chunks: Sequence[OutputChunk], encoding: Any, text: str) -> Assembled:
        """Return the thought as the message's field `reasoning`, and its number of tokens."""
        found = [chunk for chunk in chunks if isinstance(chunk, ThoughtChunk)]
        if not found:
            return Assembled()
        tokens = sum(chunk.tokens for chunk in found)
        return Assembled(message={"reasoning": _joined(found)}, usage={"reasoning_tokens": tokens})

    def stream(self, encoding: Any) -> ThoughtStream:
        return ThoughtStream()

    def offline(self, chunks: Sequence[OutputChunk]) -> Mapping[str, Any]:
        """Return `think_text`, the text of the thought; its value is None without a thought."""
        found = [chunk for chunk in chunks if isinstance(chunk, ThoughtChunk)]
        return {"think_text": _joined(found) if found else None}

    def observe(self, metrics: Any, trace: Any, chunk: OutputChunk, at: float) -> None:
        """Record `at`, the time at which the thought arrived, in its trace."""
        trace.times.append(at)


def _joined(chunks: Sequence[ThoughtChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


THOUGHT = Thought()
