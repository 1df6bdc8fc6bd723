"""vLLM's outputs for answers whose text does not come from vLLM's engine request."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni_ext.modalities.chunks import TextChunk


class TextOutputs:
    """Converts the text of one request's chunks to `RequestOutput`s.

    Args:
        delta: each output has only the new text; otherwise all text so far.
    """

    def __init__(self, request_id: str, *, delta: bool) -> None:
        self._request_id = request_id
        self._delta = delta
        self._text = ""
        self._tokens = 0

    def of(self, chunk: TextChunk, prompt: Sequence[int]) -> RequestOutput:
        """Return the output for a chunk. Its token ids are unknown, only their number is known."""
        self._text = chunk.text if self._delta else self._text + chunk.text
        self._tokens = chunk.tokens if self._delta else self._tokens + chunk.tokens
        return self._output(prompt, finished=chunk.last)

    def empty(self, prompt: Sequence[int]) -> RequestOutput:
        """Return the output of a request that has no text."""
        return self._output(prompt, finished=True)

    def _output(self, prompt: Sequence[int], *, finished: bool) -> RequestOutput:
        reason = "stop" if finished else None
        completion = CompletionOutput(0, self._text, [0] * self._tokens, None, None, finish_reason=reason)
        return RequestOutput(
            request_id=self._request_id,
            prompt=None,
            prompt_token_ids=list(prompt),
            prompt_logprobs=None,
            outputs=[completion],
            finished=finished,
        )
