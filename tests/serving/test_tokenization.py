"""Texts that are too long: refused before they are tokenized, with the name of their field."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams

from tests.support.pace import pace
from tests.support.scripted import ScriptedOmni
from vllm_omni_ext.omni import _check_bad_words
from vllm_omni_ext.orchestrator.lengths import CERTAIN, SHORT, SMALLEST_PIECE, needed

LIMIT_S = 2.0


class Letters:
    """A tokenizer with one token a character, or one for `run` spaces; counts what it was given."""

    def __init__(self, run: int = 1) -> None:
        self.run = run
        self.seen = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.seen += len(text)
        spaces = text.count(" ")
        return {"input_ids": [0] * (len(text) - spaces + spaces // self.run)}


def test_a_short_text_is_not_looked_at() -> None:
    tokenizer = Letters()
    assert needed(tokenizer, "a" * SMALLEST_PIECE, 10) == SMALLEST_PIECE
    assert needed(tokenizer, "a" * SHORT * 5000, 5000) == SHORT * 5000
    assert tokenizer.seen == 0


@pytest.mark.parametrize("from_end", [False, True])
def test_a_long_text_is_looked_at_until_it_is_certain(from_end: bool) -> None:
    tokenizer = Letters(run=100)
    text = "a" * 1_000_000
    enough = needed(tokenizer, text, 5000, from_end=from_end)
    assert CERTAIN * 5000 < enough == tokenizer.seen <= (CERTAIN + SHORT) * 5000
    spread = " " * 400_000 + "a" * 600_000
    assert needed(tokenizer, spread, 5000, from_end=from_end) == (20_000 if from_end else 420_000)


def test_a_text_of_long_tokens_may_be_long() -> None:
    text = " " * 500_000
    assert needed(Letters(run=100), text, 5000) == len(text)


def test_truncation_keeps_what_it_did(engine: ScriptedOmni, app: Any) -> None:
    """The real tokenizer: a text that is cut to some tokens gives the same tokens as vLLM's own, from either end."""
    text = "".join(f"{number} words and more; " for number in range(4000))
    renderer = engine.renderer
    for side in (None, "left", "right"):
        params = TokenizeParams(max_total_tokens=100_000, truncate_prompt_tokens=50, truncation_side=side)
        stock = renderer._tokenize_singleton_prompt({"prompt": text}, params)
        ours = asyncio.run(renderer._tokenize_singleton_prompt_async({"prompt": text}, params))
        assert ours == stock, side


async def post(app: Any, path: str, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as client:
        since = time.monotonic()
        return await client.post(path, json=body), time.monotonic() - since


def chat(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]}


ENDPOINTS: dict[str, tuple[str, Any, str]] = {
    "chat": ("/v1/chat/completions", chat, "messages"),
    "completions": ("/v1/completions", lambda text: {"model": "tiny", "prompt": text}, "prompt"),
    "responses": ("/v1/responses", lambda text: {"model": "tiny", "input": text}, "input"),
    "tokenize": ("/tokenize", lambda text: {"model": "tiny", "prompt": text}, "prompt"),
    "tokenize chat": ("/tokenize", chat, "messages"),
    "speech": ("/v1/audio/speech", lambda text: {"model": "tiny", "input": text}, "input"),
}


@pytest.mark.parametrize("characters", [300_000, 4_000_000])
@pytest.mark.parametrize("name", ENDPOINTS)
async def test_long_texts_are_refused_at_once(app: Any, engine: ScriptedOmni, name: str, characters: int) -> None:
    path, body, field = ENDPOINTS[name]
    answer, took = await post(app, path, body("é" * characters))
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == field, answer.text[:500]
    assert took < LIMIT_S * pace()


async def test_a_long_text_that_is_cut_is_answered(app: Any, engine: ScriptedOmni) -> None:
    engine.script = ("fine",)
    answer, took = await post(
        app, "/v1/completions", {"model": "tiny", "prompt": "a b " * 1_000_000, "truncate_prompt_tokens": 5}
    )
    assert answer.status_code == 200, answer.text
    assert len(engine.calls[0].prompt["prompt_token_ids"]) == 5 and took < LIMIT_S * pace()


def test_words_to_avoid_are_tokenized_in_the_event_loop_and_have_a_limit() -> None:
    _check_bad_words(SamplingParams(bad_words=["a" * 99, "b"]))
    with pytest.raises(VLLMValidationError, match="bad_words: may have 100000 characters together, got 300001"):
        _check_bad_words(SamplingParams(bad_words=["a" * 300_000, "b"]))


async def test_what_fits_is_tokenized(app: Any) -> None:
    answer, _ = await post(app, "/tokenize", {"model": "tiny", "prompt": "hello " * 100, "return_token_strs": True})
    said = answer.json()
    assert answer.status_code == 200 and said["count"] == len(said["tokens"]) == len(said["token_strs"]) > 50
    back, _ = await post(app, "/detokenize", {"model": "tiny", "tokens": said["tokens"]})
    assert back.json()["prompt"] == "hello " * 100
    talk, _ = await post(app, "/tokenize", chat("hello"))
    assert talk.status_code == 200 and talk.json()["count"] > 1


async def test_more_tokens_than_fit_are_not_put_together(app: Any, engine: ScriptedOmni) -> None:
    most = engine.model_config.max_model_len
    answer, _ = await post(app, "/detokenize", {"model": "tiny", "tokens": [1] * (most + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
