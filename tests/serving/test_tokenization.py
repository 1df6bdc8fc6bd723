"""Texts that are too long are refused before all of them is tokenized, with the name of their field."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams

from tests.serving.conftest import asking
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.omni import _check_bad_words
from vllm_omni_ext.orchestrator.lengths import CERTAIN, SHORT, SMALLEST_PIECE, needed


class Letters:
    """A tokenizer with one token for a character or for `run` spaces; counts the characters of its calls."""

    def __init__(self, run: int = 1) -> None:
        self.run = run
        self.seen = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.seen += len(text)
        spaces = text.count(" ")
        return {"input_ids": [0] * (len(text) - spaces + spaces // self.run)}


@pytest.mark.parametrize("from_end", [False, True])
def test_a_long_text_is_tokenized_until_it_is_certainly_too_long(from_end: bool) -> None:
    tokenizer = Letters(run=100)
    for length, most in ((SMALLEST_PIECE, 10), (SHORT * 5000, 5000)):
        assert needed(tokenizer, "a" * length, most) == length
    assert tokenizer.seen == 0, "short texts are not tokenized here"
    enough = needed(tokenizer, "a" * 1_000_000, 5000, from_end=from_end)
    assert CERTAIN * 5000 < enough == tokenizer.seen <= (CERTAIN + SHORT) * 5000
    spread = " " * 400_000 + "a" * 600_000
    assert needed(tokenizer, spread, 5000, from_end=from_end) == (20_000 if from_end else 420_000)
    assert needed(tokenizer, " " * 500_000, 5000) == 500_000


def test_truncated_tokens_equal_those_of_vllm(engine: ScriptedOmni, app: Any) -> None:
    text = "".join(f"{number} words and more; " for number in range(4000))
    renderer = engine.renderer
    for side in (None, "left", "right"):
        params = TokenizeParams(max_total_tokens=100_000, truncate_prompt_tokens=50, truncation_side=side)
        stock = renderer._tokenize_singleton_prompt({"prompt": text}, params)
        ours = asyncio.run(renderer._tokenize_singleton_prompt_async({"prompt": text}, params))
        assert ours == stock, side


async def post(app: Any, path: str, **body: Any) -> httpx.Response:
    async with asking(app) as client:
        return await client.post(path, json=body)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


ENDPOINTS: dict[str, tuple[str, Any, str]] = {
    "chat": ("/v1/chat/completions", chat, "messages"),
    "completions": ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
    "responses": ("/v1/responses", lambda text: {"input": text}, "input"),
    "tokenize": ("/tokenize", lambda text: {"prompt": text}, "prompt"),
    "tokenize chat": ("/tokenize", chat, "messages"),
    "speech": ("/v1/audio/speech", lambda text: {"input": text}, "input"),
}


@pytest.mark.parametrize("name", ENDPOINTS)
async def test_a_text_beyond_the_context_is_refused_before_all_of_it_is_tokenized(
    app: Any, engine: ScriptedOmni, name: str
) -> None:
    path, body, field = ENDPOINTS[name]
    for characters, said in (
        (150_000, r"first \d+ of the 1500\d\d char|at most \d+ tokens fit"),
        (4_000_000, "characters"),
    ):
        answer = await post(app, path, **body("é" * characters))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), answer.text[:500]
        assert re.search(said, error["message"]), error["message"]


async def test_a_long_text_that_is_truncated_is_answered(app: Any, engine: ScriptedOmni) -> None:
    engine.script = ("fine",)
    answer = await post(app, "/v1/completions", prompt="a b " * 1_000_000, truncate_prompt_tokens=5)
    assert answer.status_code == 200, answer.text
    assert len(engine.calls[0].prompt["prompt_token_ids"]) == 5


def test_bad_words_have_a_limit_of_characters() -> None:
    _check_bad_words(SamplingParams(bad_words=["a" * 99, "b"]))
    with pytest.raises(VLLMValidationError, match="bad_words: may have 100000 characters together, got 300001"):
        _check_bad_words(SamplingParams(bad_words=["a" * 300_000, "b"]))


async def test_texts_and_tokens_that_fit_are_converted(app: Any, engine: ScriptedOmni) -> None:
    answer = await post(app, "/tokenize", prompt="hello " * 100, return_token_strs=True)
    found = answer.json()
    assert answer.status_code == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 50
    back = await post(app, "/detokenize", tokens=found["tokens"])
    assert back.json()["prompt"] == "hello " * 100
    talk = await post(app, "/tokenize", **chat("hello"))
    assert talk.status_code == 200 and talk.json()["count"] > 1
    refused = await post(app, "/detokenize", tokens=[1] * (engine.model_config.max_model_len + 1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
