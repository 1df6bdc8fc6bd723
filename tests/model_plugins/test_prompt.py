"""The segments of a prompt and the talker's prompt made of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.talker_ids import AUDIO, HEADER, IDS, IM_END, IMAGE, NEWLINE, SYSTEM, VIDEO, turn, user
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import (
    MULTIMODAL,
    NO_CODEC,
    PADS,
    Medium,
    PromptSegments,
    find_parts,
    prefix_keys,
    talker_prompt,
)
from vllm_omni_ext.wire.stage_input import KEY_POSITIONS

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


@dataclass(frozen=True)
class Spoken:
    """A prompt with sounds, each a run of positions, for a voice and a scope."""

    prompt: tuple[int, ...]
    sounds: tuple[str, ...] = ()
    voice: str = "ethan"
    scope: str = ""

    def media(self) -> list[Medium]:
        runs = parts_of([*self.prompt]).multimodal
        return [Medium(start, stop - start, name) for (start, stop), name in zip(runs, self.sounds, strict=True)]

    def keys(self) -> tuple[bytes, ...]:
        parts = parts_of([*self.prompt])
        text, codec = talker_prompt(self.prompt, parts, self.voice, IDS)
        return prefix_keys(self.prompt, parts, text, codec, media=self.media(), scope=self.scope)

    def inputs(self) -> list[Any]:
        """All that determines the input of each position of the talker's prompt."""
        parts = parts_of([*self.prompt])
        text, codec = talker_prompt(self.prompt, parts, self.voice, IDS)
        at = [p for a, b in parts.user for p in range(a, b)]
        media = self.media()
        found: list[Any] = []
        for position, (token, code) in enumerate(zip(text, codec, strict=False)):
            seen: Any = None
            if token == MULTIMODAL:
                until = at[position] + 1
                seen = self.prompt[:until], tuple(each for each in media if each.offset < until)
            found.append((self.scope, token, code, seen))
        return found


def spoken(turns: list[tuple[int, int, int, str]], **fields: str) -> Spoken:
    """Turns: a role, the number of its text tokens and of the positions of its sound, and the sound's name."""
    segments = [turn(role, *[20] * text, *[AUDIO] * sound, *[21] * bool(sound)) for role, text, sound, _ in turns]
    names = tuple(name for role, _, sound, name in turns if sound and role == IDS.user)
    return Spoken((*(token for segment in segments for token in segment), *HEADER), names, **fields)


said = st.tuples(
    st.sampled_from([SYSTEM, IDS.user, IDS.assistant]), st.integers(0, 9), st.integers(0, 20), st.sampled_from("ab")
).map(lambda made: (made[0], made[1], made[2] if made[0] == IDS.user else 0, made[3]))


ends = st.tuples(st.lists(said, max_size=4), st.sampled_from(["ethan", "chelsie"]), st.sampled_from(["", "s"]))


@given(st.lists(ends, min_size=2, max_size=4), st.lists(said, max_size=3))
def test_beginnings_have_equal_keys_exactly_if_their_inputs_are_equal(
    ends: list[tuple[list[tuple[int, int, int, str]], str, str]], first: list[tuple[int, int, int, str]]
) -> None:
    by_key: dict[bytes, Any] = {}
    by_inputs: dict[Any, bytes] = {}
    for last, voice, scope in ends:
        conversation = spoken([*first, *last], voice=voice, scope=scope)
        inputs, keys = conversation.inputs(), conversation.keys()
        assert len(keys) == len(inputs) // KEY_POSITIONS
        for count, key in enumerate(keys, 1):
            beginning = tuple(inputs[: count * KEY_POSITIONS])
            assert by_key.setdefault(key, beginning) == beginning, "different inputs have one key"
            assert by_inputs.setdefault(beginning, key) == key, "equal inputs have two keys"


def test_positions_are_part_of_the_keys() -> None:
    prompt = user(*[20] * 60) + HEADER
    parts = parts_of(prompt)
    text, codec = talker_prompt(prompt, parts, "ethan", IDS)
    axes = np.tile(np.arange(len(codec), dtype=np.int32), (3, 1))
    plain = prefix_keys(prompt, parts, text, codec)
    assert prefix_keys(prompt, parts, text, codec, positions=axes.tobytes()) == plain
    axes[2, 40] += 1
    moved = prefix_keys(prompt, parts, text, codec, positions=axes.tobytes())
    assert [a == b for a, b in zip(plain, moved, strict=True)] == [True, True, False, False]


def test_names_of_media_cannot_imitate_tokens() -> None:
    """A client may choose the name of a media item."""
    prompt = user(*[AUDIO] * 40) + HEADER
    token = np.array([AUDIO], np.int32).tobytes().decode()
    keys = {
        prefix_keys(prompt, parts_of(prompt), *talker_prompt(prompt, parts_of(prompt), "ethan", IDS), media=media)[-1]
        for media in ([], [Medium(3, 40, "")], [Medium(3, 40, token)], [Medium(3, 20, ""), Medium(23, 20, "")])
    }
    assert len(keys) == 4


@given(st.lists(said, min_size=1, max_size=4))
def test_a_turn_begins_with_the_keys_of_the_turn_before(turns: list[tuple[int, int, int, str]]) -> None:
    """Up to the header, which is only the end of each prompt."""
    for before, after in pairwise(spoken(turns[:count]) for count in range(len(turns) + 1)):
        shared = max(0, len(before.inputs()) - len(HEADER) - PADS - 1) // KEY_POSITIONS
        assert before.keys()[:shared] == after.keys()[:shared]
