"""Tool calls in the text of a whole answer, found while the text is generated: they are not spoken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser

logger = init_logger(__name__)


class ToolCallWatch:
    """Calls a function at the first tool call of one answer.

    Args:
        parser: of its own, because it keeps state.
        found: called once, at most.
    """

    def __init__(self, parser: Parser, request: ChatCompletionRequest, found: Callable[[], Awaitable[None]]) -> None:
        self._parser: Parser | None = parser
        self._request = request
        self._found = found
        self._text = self._tokens = 0

    async def take(self, output: RequestOutput) -> None:
        """Parse the new part of an output with all text so far."""
        if self._parser is None:
            return
        (answer,) = output.outputs
        text, tokens = answer.text[self._text :], list(answer.token_ids[self._tokens :])
        self._text, self._tokens = len(answer.text), len(answer.token_ids)
        finished, prompt = answer.finish_reason is not None, output.prompt_token_ids
        try:
            delta = self._parser.parse_delta(text, tokens, self._request, prompt, finished=finished)
        except Exception:  # parsers of streams raise errors of any type; the whole text is parsed again at its end
            logger.exception("The tool parser has failed at a partial answer")
            self._parser = None
            return
        if delta is not None and delta.tool_calls:
            self._parser = None
            await self._found()
