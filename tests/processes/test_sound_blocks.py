"""A prompt whose sound was computed in blocks before it was complete is answered as Transformers answers it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.processes.test_parity import Case, golden, heard, prompt, sampling, user
from tests.processes.test_replicas import hidden_states_held, within
from tests.support.media import audio
from tests.support.oracle import Oracle
from vllm_omni_ext.ids import ReplicaId
from vllm_omni_ext.modalities.chunks import AudioChunk
from vllm_omni_ext.plugins.runtime import RequestOptions

pytestmark = pytest.mark.engine

BOTH = ("text", "audio")
RATE, BLOCK_S, MARGIN_S = 16_000, 2, 0.2
SECONDS, SEED = 12.3, 5
"""Six blocks and a rest whose only chunk is not whole."""

_numbers = itertools.count()


def said(seconds: float) -> Case:
    """The beginning of one sound."""
    start = {"type": "audio", "audio": audio(SECONDS, SEED)[: round(seconds * RATE)]}
    return Case([user(heard(0.4, 9), start, "What do you hear?")], text=12, frames=24)


def ask(omni: Any, oracle: Oracle, case: Case, **options: Any) -> tuple[list[int], list[Any], Any]:
    """Return ids, frames and the last output of a request."""
    params = sampling(case)
    ahead = options.get("ahead_of") is not None
    given = RequestOptions(
        modalities=("text",) if ahead else BOTH, params={} if ahead else {"talker": params["talker"]}, **options
    )
    rendered = omni._preprocess_cmpl_one(prompt(oracle, case))
    text = params["thinker"]

    async def read() -> tuple[list[int], list[Any], Any]:
        frames: list[Any] = []
        async for item in omni._omni.generate(rendered, text, f"blocks-{next(_numbers)}", options=given):
            if isinstance(item, AudioChunk):
                frames = item.frames.tolist()
            else:
                last = item
        return list(last.outputs[0].token_ids), frames, last

    return omni._run(read())  # type: ignore[no-any-return]


def test_a_sound_that_is_computed_block_by_block_is_answered_as_the_whole(omni: Any, oracle: Oracle) -> None:
    case = said(SECONDS)
    expected = golden(oracle, case)
    size = omni._omni.vllm_config.cache_config.block_size
    for ahead in (False, True):
        omni.reset_prefix_cache()
        omni.reset_mm_cache()
        lengths = []
        for count in range(1, int(SECONDS / BLOCK_S) + 1) if ahead else ():
            shorter = said(count * BLOCK_S + MARGIN_S)
            _, _, begun = ask(omni, oracle, shorter, in_blocks=True, ahead_of=BOTH)
            lengths.append(len(begun.prompt_token_ids) - 1)
            assert begun.prompt_token_ids[:-1] == expected.prompt_ids[: lengths[-1]]
        ids, frames, output = ask(omni, oracle, case, in_blocks=True)
        assert list(output.prompt_token_ids) == expected.prompt_ids
        assert (ids, frames) == (expected.thinker_ids, expected.frames.tolist())
        assert output.num_cached_tokens == (lengths[-1] // size * size if ahead else 0)
    assert output.num_cached_tokens > 0
    assert omni._omni.orchestrator.held() == 0 and hidden_states_held(omni) == 0
    assert within(omni, "thinker", "hidden_states_kept")[0] > 0


def test_media_that_the_engine_holds_are_not_sent_and_those_it_has_dropped_are_sent_again(
    omni: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([user(heard(0.7, 23), "What do you hear?")], text=4, frames=4)
    expected = golden(oracle, case)
    client, sent = omni._omni.orchestrator.replicas[ReplicaId("thinker", 0)].client, list[bool]()
    original = client.add_request_async

    async def recorded(request: Any) -> None:
        sent.extend(feature.data is not None for feature in request.mm_features)
        await original(request)

    monkeypatch.setattr(client, "add_request_async", recorded)
    for reset, data in (("nothing", [True]), ("nothing", [False]), ("reset_mm_cache", [False, True])):
        omni.reset_prefix_cache()
        if reset != "nothing":
            getattr(omni, reset)()
        ids, frames, output = ask(omni, oracle, case)
        assert list(output.prompt_token_ids) == expected.prompt_ids
        assert (ids, frames) == (expected.thinker_ids, expected.frames.tolist())
        assert sent == data
        sent.clear()
