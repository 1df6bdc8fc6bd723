"""Costs of a spoken answer: bytes between thinker and talker, extra work in the thinker, the prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.support.media import image, openai_messages
from vllm_omni_ext.ids import ReplicaId

pytestmark = pytest.mark.engine

TALKER = ReplicaId("talker", 0)
TOLERANCE = 1e-4
MOST_BYTES_A_TOKEN = 64
MOST_BYTES_A_MESSAGE = 256
QUESTION = [{"role": "user", "content": "Tell me about the blue cat in the moon"}]
LONG = [{"role": "user", "content": "word " * 300}]
SHOWN = [{"type": "image", "image": image(96, 64, seed=2)}, {"type": "text", "text": "before " * 200 + "What is this?"}]
PICTURE = openai_messages([{"role": "user", "content": SHOWN}])


def ask(
    omni: Any, messages: Any, *, text: int = 8, frames: int = 8, least: int = 0, modalities: Any = None, **options: Any
) -> Any:
    """One greedy answer of exactly `text` tokens."""
    sampling = {
        "thinker": SamplingParams(temperature=0, max_tokens=text, ignore_eos=True),
        "talker": SamplingParams(temperature=0, min_tokens=least, max_tokens=frames),
    }
    (output,) = omni.chat(messages, sampling, use_tqdm=False, modalities=modalities, **options)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == text
    return output


@pytest.mark.parametrize(("chunks", "most"), [("all", MOST_BYTES_A_TOKEN), ([1], MOST_BYTES_A_MESSAGE)], ids=str)
def test_a_thinker_token_takes_few_bytes_to_the_talker(omni: Any, benchmark: Any, chunks: Any, most: int) -> None:
    """Ids alone; with chunks the rest is the cost of vLLM's request message."""
    totals = {}
    for text in (2, 200):
        with benchmark("handoff_bytes").sent_to(omni, TALKER) as sizes:
            ask(omni, QUESTION, text=text, frames=220, least=220, chunks={"text": chunks})
        totals[text] = sum(sizes)
    assert 0 < (totals[200] - totals[2]) / 198 <= most, totals


def test_the_thinker_exports_hidden_states_of_spoken_answers_to_media_alone(omni: Any) -> None:
    before = omni.collective_rpc("handoff_steps")
    ask(omni, QUESTION)
    ask(omni, LONG)
    ask(omni, PICTURE, modalities=["text"])
    assert omni.collective_rpc("handoff_steps") == before
    ask(omni, PICTURE)
    assert omni.collective_rpc("handoff_steps") > before


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_a_repeated_text_prompt_comes_from_the_prefix_cache(omni: Any, modalities: list[str]) -> None:
    block = omni._omni.vllm_config.cache_config.block_size
    ask(omni, LONG, modalities=modalities)
    output = ask(omni, LONG, modalities=modalities)
    assert len(output.prompt_token_ids) > block
    assert output.num_cached_tokens >= block


def test_a_repeated_picture_has_the_same_sound(omni: Any) -> None:
    first, second = ask(omni, PICTURE, frames=24), ask(omni, PICTURE, frames=24)
    assert len(first.frames) > 1
    assert first.frames.tolist() == second.frames.tolist()
    assert first.audio.shape == second.audio.shape and np.abs(first.audio - second.audio).max() <= TOLERANCE
    assert second.num_cached_tokens > 0, "its hidden states are kept"
