"""The first tool call in a growing text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_ext.serving.chat import ToolCallWatch

REQUEST: Any = object()


class Parser:
    """A parser that finds a call at `call_at` characters, and fails at `fails_at`."""

    def __init__(self, call_at: int = 99, fails_at: int = 99) -> None:
        self.call_at, self.fails_at = call_at, fails_at
        self.text, self.tokens, self.finished = "", [], []

    def parse_delta(self, text: str, tokens: list[int], request: Any, prompt: Any, *, finished: bool) -> Any:
        assert request is REQUEST and prompt == [7]
        self.text += text
        self.tokens += tokens
        self.finished.append(finished)
        if len(self.text) >= self.fails_at:
            raise RuntimeError("no JSON")
        return SimpleNamespace(tool_calls=["call"] if len(self.text) >= self.call_at else []) if text else None


async def found(parser: Any) -> int:
    """Return how many times a call was reported in an answer of five outputs."""
    calls = []

    async def note() -> None:
        calls.append(1)

    watch = ToolCallWatch(parser, REQUEST, note)
    for number, text in enumerate(("", "a", "ab", "abcd", "abcdef")):
        answer = SimpleNamespace(text=text, token_ids=range(number), finish_reason="stop" if number == 4 else None)
        output: Any = SimpleNamespace(outputs=[answer], prompt_token_ids=[7])
        await watch.take(output)
    return len(calls)


async def test_an_answer_without_a_call_is_parsed_to_its_end() -> None:
    parser = Parser()
    assert await found(parser) == 0
    assert (parser.text, parser.tokens, parser.finished) == ("abcdef", [0, 1, 2, 3], [False] * 4 + [True])


async def test_a_call_is_reported_once_and_the_rest_is_not_parsed() -> None:
    parser = Parser(call_at=2)
    assert await found(parser) == 1 and parser.text == "ab"


async def test_a_parser_that_fails_is_logged_and_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    parser = Parser(fails_at=2)
    assert await found(parser) == 0 and parser.text == "ab"
    assert "no JSON" in caplog.text
