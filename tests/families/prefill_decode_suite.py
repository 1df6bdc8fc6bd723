"""A family of another package whose frontend has prefill and decode replicas; `test_prefill_decode.py` runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.server import Server
from tests.families.oracles import continued, painted, tokens_of
from tests.families.serving import chat, chat_body, picture, served, settled
from tests.support.cluster import (
    ANSWER_S,
    MODEL,
    all_up,
    asked_again,
    kill,
    metric,
    overrides,
    replicas,
    status,
    until,
    wait_busy,
)

PREFILL, DECODE = "ar.prefill", "ar.decode"
BLOCK = 32
PATIENT = {"transfer_timeout_s": 60.0}
"""Decode gives up no transfer because it had to wait for a core."""

SPLIT = {"ar": {"engine": {"block_size": BLOCK}, "prefill_decode": PATIENT}}
TEXTS = ["a", "a blue boat", "x" * (BLOCK - 1), "y" * BLOCK, "a red house by the sea " * 20]
"""Prompts of one token, of less than a block, of one block and more."""

SIZE, SIDES = "16x12", (16, 12)
TOKENS = 24
THINKING = {"max_completion_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
AT_ONCE = 8
UP_S = 300.0
"""For machines that other programs keep busy."""

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "three answers": {"temperature": 1.0, "seed": 5, "n": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "prompt logprobs": {"prompt_logprobs": 1},
}


LONG = chat_body(TEXTS[1], "text", temperature=1.0, seed=7, stream=True, **{**THINKING, "max_completion_tokens": 600})
"""Takes some seconds."""


@dataclass(frozen=True)
class Whole:
    """Token ids of a frontend that is not split.

    Attributes:
        short: those of all requests of `bodies`, in their order; one list for each answer.
        long: those of `LONG`.
    """

    short: list[list[list[int]]]
    long: list[int]


def bodies() -> list[dict[str, Any]]:
    """A request for each prompt and sampling."""
    return [chat_body(text, "text", **{**THINKING, **more}) for text in TEXTS for more in SAMPLINGS.values()]


def ids(server: Server, body: dict[str, Any]) -> list[list[int]]:
    """The token ids of each answer to a request."""
    return [choice["token_ids"] for choice in chat(server, body)["choices"]]


def ids_of_all(server: Server) -> list[list[list[int]]]:
    """Those of all requests, several at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda body: ids(server, body), bodies()))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("optional_text_image")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    with served(folder, tmp_path_factory.mktemp("whole") / "log", 2) as server:
        [long] = ids(server, {**LONG, "stream": False})
        return Whole(ids_of_all(server), long)


@pytest.fixture(scope="module")
def server(folder: Path, whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("split") / "log"
    with served(folder, log, 3, *overrides(**SPLIT)) as server:
        yield server


def test_ids_equal_those_of_an_undivided_frontend_and_decode_fetches_the_prompts(server: Server, whole: Whole) -> None:
    assert ids_of_all(server) == whole.short
    computed = len(TEXTS) + len(SAMPLINGS) + 2 - 1
    assert metric(server, "kv_local_prefills_total") == computed, "prompts of one token, and those with prompt logprobs"
    assert metric(server, "kv_transfer_bytes_total", replica=f"{PREFILL}/0") > 0
    assert metric(server, "kv_transfer_failures_total") == 0
    (edge,) = status(server)["kv_edges"]
    assert (edge["source"], edge["target"]) == (PREFILL, DECODE)
    assert settled(server)


def test_a_painted_thought_equals_the_oracle(server: Server, folder: Path) -> None:
    text = TEXTS[1]
    prompt = tokens_of(folder, text)
    thought = continued(folder, prompt, TOKENS)
    answer = chat(server, chat_body(text, "text", "image", size=SIZE, seed=3, **THINKING))
    assert answer["choices"][0]["token_ids"] == thought
    np.testing.assert_array_equal(picture(answer), painted(folder, [*prompt, *thought], SIDES, 3))
    assert settled(server)


def test_a_client_cannot_send_transfer_parameters(server: Server) -> None:
    fields = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "x"}}
    answer = httpx.post(f"{server.base_url}/chat/completions", json=chat_body("a", "text", **fields), timeout=60)
    assert answer.status_code == 400 and "kv_transfer_params" in answer.text
    assert MODEL in answer.request.content.decode()


def test_ids_stay_the_same_when_the_prefill_replica_is_killed(server: Server, whole: Whole) -> None:
    with asked_again(lambda: ids_of_all(server)) as asked:
        kill(server, wait_busy(server, PREFILL, asked))
    assert all(answers == whole.short for answers in asked.result())
    assert until(lambda: all_up(server, 3), UP_S)
    assert settled(server)
    sent = metric(server, "kv_transfer_bytes_total")
    assert ids_of_all(server) == whole.short and metric(server, "kv_transfer_bytes_total") > sent
    assert settled(server)


def test_ids_of_a_seeded_answer_stay_the_same_when_the_decode_replica_is_killed_within_it(
    server: Server, whole: Whole
) -> None:
    found: list[int] = []
    with httpx.stream("POST", f"{server.base_url}/chat/completions", json=LONG, timeout=ANSWER_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            before = len(found)
            for choice in json.loads(line.removeprefix("data:"))["choices"]:
                found += choice.get("token_ids") or ()
            if before < TOKENS <= len(found):
                kill(server, f"{DECODE}/0")
    assert found == whole.long
    assert until(lambda: all_up(server, 3) and replicas(server)[f"{DECODE}/0"]["restarts"] == 1, UP_S)
    assert ids_of_all(server) == whole.short
    assert settled(server)
