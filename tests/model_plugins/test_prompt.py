"""The segments of a prompt and the talker's prompt made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.talker_ids import AUDIO, HEADER, IDS, IM_END, IMAGE, NEWLINE, SYSTEM, VIDEO, turn, user
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import (
    MULTIMODAL,
    NO_CODEC,
    PromptSegments,
    find_parts,
    talker_prompt,
)

tokens = st.lists(st.sampled_from([20, 21, 22, AUDIO, IMAGE, VIDEO]), max_size=6)
turns = st.lists(st.tuples(st.sampled_from([SYSTEM, IDS.user, IDS.assistant]), tokens), max_size=5)


def parts_of(prompt: list[int]) -> PromptSegments:
    parts = find_parts(prompt, IDS)
    assert parts is not None
    return parts


def kept(prompt: list[int]) -> list[int]:
    return [t for a, b in parts_of(prompt).user for t in prompt[a:b]]


@given(turns, tokens)
def test_user_turns_and_their_media_are_found_in_any_conversation(
    conversation: list[tuple[int, list[int]]], begun: list[int]
) -> None:
    """Against a second, plainer way: turns are kept or dropped as they are written."""
    segments = [(role, turn(role, *content)) for role, content in conversation]
    before = [t for _, segment in segments for t in segment]
    prompt = before + HEADER + begun
    parts = parts_of(prompt)
    said = [t for role, segment in segments if role == IDS.user for t in segment]
    assert kept(prompt) == said
    assert parts.header == len(before)
    positions = [p for a, b in parts.multimodal for p in range(a, b)]
    users = {p for a, b in parts.user for p in range(a, b)}
    assert positions == [p for p in sorted(users) if prompt[p] in IDS.multimodal]
    assert parts.multimodal_count == len(positions) == sum(t in IDS.multimodal for t in said)
    assert all(b not in positions and a - 1 not in positions for a, b in parts.multimodal), (
        "runs are as long as possible"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [20, 21],
        [IDS.assistant, NEWLINE],
        [IDS.im_start],
        [IDS.im_start, IDS.assistant],
        user(20),
        [*user(20), IDS.im_start, IDS.assistant],
        turn(IDS.assistant, 20) + user(21),
        [*HEADER, IDS.im_start, SYSTEM, NEWLINE],
        [*HEADER, IDS.im_start],
    ],
    ids=str,
)
def test_a_prompt_without_a_final_assistant_turn_has_no_parts(prompt: list[int]) -> None:
    assert find_parts(prompt, IDS) is None


def test_text_before_the_first_turn_is_left_out() -> None:
    parts = parts_of([20, AUDIO, *user(21), *HEADER])
    assert parts == PromptSegments(user=((2, 8),), header=8, multimodal=())


def test_layout_of_the_talker_prompt() -> None:
    prompt = turn(SYSTEM, 30) + user(20, AUDIO, AUDIO, 21) + turn(IDS.assistant, 31) + user(VIDEO) + HEADER + [40]
    text, codec = talker_prompt(prompt, parts_of(prompt), "chelsie", IDS)
    first = [IDS.im_start, IDS.user, NEWLINE, 20, MULTIMODAL, MULTIMODAL, 21, IM_END, NEWLINE]
    second = [IDS.im_start, IDS.user, NEWLINE, MULTIMODAL, IM_END, NEWLINE]
    assert text == [*first, *second, *HEADER, 7, 7, 7, 7, IDS.tts_bos]
    assert codec == [NO_CODEC] * (len(first + second) + 3) + [70, 71, 72, 81, 73, 74]


@given(turns, st.sampled_from(["ethan", "chelsie"]))
def test_the_talker_prompt_has_nine_positions_after_the_user_turns(
    conversation: list[tuple[int, list[int]]], voice: str
) -> None:
    prompt = [t for role, content in conversation for t in turn(role, *content)] + HEADER
    parts = parts_of(prompt)
    text, codec = talker_prompt(prompt, parts, voice, IDS)
    assert len(text) + 1 == len(codec) == len(kept(prompt)) + 9
    mixed = [p for p, token in enumerate(text) if token == MULTIMODAL]
    assert [p for start, stop in parts.talker_spans for p in range(start, stop)] == mixed
    assert len(mixed) == parts.multimodal_count
    assert codec[-3] == IDS.speakers[voice]
