"""Every id, frame and sample equals Transformers' (greedy, float32, CPU)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support import goldens
from tests.support.media import Message, audio, image, multi_modal_data, openai_messages, processor_options, video
from tests.support.oracle import Golden, Oracle

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


def user(*content: Any) -> Message:
    parts = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"role": "user", "content": parts if len(parts) > 1 or not isinstance(content[0], str) else content[0]}


def heard(seconds: float, seed: int) -> dict[str, Any]:
    return {"type": "audio", "audio": audio(seconds, seed)}


def seen(width: int, height: int, seed: int) -> dict[str, Any]:
    return {"type": "image", "image": image(width, height, seed)}


def watched(frames: int, seed: int) -> dict[str, Any]:
    return {"type": "video", "video": video(frames, 64, 64, seed)}


def filmed(frames: int, seconds: float, seed: int) -> dict[str, Any]:
    """A video with its own sound."""
    return {**watched(frames, seed), "sound": audio(seconds, seed)}


SYSTEM: Message = {"role": "system", "content": "You are a helpful voice."}
TURNS: list[Message] = [user("What is a replica?"), {"role": "assistant", "content": "One of many."}]


@dataclass(frozen=True)
class Case:
    messages: list[Message]
    voice: str = "ethan"
    text: int = 24  # most thinker tokens
    frames: int = 40  # most talker tokens


CASES: dict[str, Case] = {
    "text": Case([user("hello world")]),
    "another_voice": Case([user("hello world")], voice="chelsie"),
    "system": Case([SYSTEM, user("Say something nice.")]),
    "turns": Case([SYSTEM, *TURNS, user("And a stage?")]),
    "audio": Case([user(heard(1.0, 1), "What do you hear?")]),
    "image": Case([user(seen(96, 64, 2), "What is this?")]),
    "video": Case([user(watched(4, 3), "What happens?")]),
    "video_with_sound": Case([user("word " * 18, filmed(6, 2.3, 14), "What happens?")]),
    "videos_with_sound": Case(
        [user(filmed(4, 0.6, 15), "word " * 30), TURNS[1], user(filmed(2, 3.0, 16), seen(64, 64, 17), "Now?")]
    ),
    "two_images_and_audio": Case([user(seen(64, 64, 4), seen(96, 128, 5), heard(0.7, 6), "Compare them, please.")]),
    "media_in_an_earlier_turn": Case([user(seen(64, 64, 7), "And this?"), TURNS[1], user(heard(0.5, 8), "Now?")]),
    "two_short_sounds": Case([user(heard(0.3, 13), "word " * 30), TURNS[1], user(heard(0.6, 33), "Now?")]),
    "long_prompt": Case([user("word " * 300)]),
    "long_media_prompt": Case([SYSTEM, user("before " * 60, seen(192, 160, 9), "after " * 40, heard(3.0, 10))]),
    "long_answer": Case([user("Tell me a long story.")], text=96, frames=200),
    "one_token": Case([user("Zebra crossing at noon!")]),
    "short_answer": Case([user("Be brief.")], text=2),
    "few_frames": Case([user("Be very brief.")], text=3, frames=6),
}


def sampling(case: Case) -> Mapping[str, SamplingParams]:
    return {
        "thinker": SamplingParams(temperature=0, max_tokens=case.text),
        "talker": SamplingParams(temperature=0, repetition_penalty=1.05, max_tokens=case.frames),
    }


def golden(oracle: Oracle, case: Case) -> Golden:
    limits = {"voice": case.voice, "thinker_max_tokens": case.text, "talker_max_tokens": case.frames}
    return goldens.once(lambda: oracle.run(case.messages, **limits), oracle.checkpoint, case.messages, limits)


def prompt(oracle: Oracle, case: Case) -> dict[str, Any]:
    return {
        "prompt": oracle.prompt(case.messages),
        "multi_modal_data": multi_modal_data(case.messages),
        "mm_processor_kwargs": processor_options(case.messages),
    }


def check(output: Any, expected: Golden) -> None:
    assert output.error is None
    assert list(output.prompt_token_ids) == expected.prompt_ids
    assert list(output.outputs[0].token_ids) == expected.thinker_ids
    if not len(expected.frames):
        assert output.audio is None and len(output.frames) == 0 and output.note
        return
    assert output.frames.tolist() == expected.frames.tolist()
    assert output.sample_rate == 24_000
    assert output.audio.dtype == np.float32 and output.audio.shape == expected.wav.shape
    assert np.abs(output.audio - expected.wav).max() <= TOLERANCE


def answer(omni: Any, oracle: Oracle, names: list[str], chunks: Mapping[str, Any] | None = None) -> list[Any]:
    by_voice: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        by_voice.setdefault(CASES[name].voice, []).append(at)
    outputs: dict[int, Any] = {}
    for voice, places in by_voice.items():
        group = [CASES[names[at]] for at in places]
        got = omni.generate(
            [prompt(oracle, case) for case in group],
            [sampling(case) for case in group],
            voice=voice,
            chunks=chunks,
            use_tqdm=False,
        )
        outputs.update(zip(places, got, strict=True))
    return [outputs[at] for at in range(len(names))]


@pytest.mark.parametrize("name", CASES)
def test_one_by_one(name: str, omni: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    (output,) = answer(omni, oracle, [name])
    check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0


def test_a_sound_of_an_earlier_prompt_changes_no_answer(omni: Any, oracle: Oracle) -> None:
    """The caches have its features and rows, which were computed without the longer sound of the second prompt."""
    first = Case([user(heard(0.3, 8), "Now?")])
    later = Case([user(heard(0.3, 8), "x"), TURNS[1], user(heard(1.2, 100), "Now?")])
    for case in (first, later, first):
        (output,) = omni.generate([prompt(oracle, case)], [sampling(case)], use_tqdm=False)
        check(output, golden(oracle, case))


def test_a_video_or_a_sound_of_the_cache_has_another_one(omni: Any, oracle: Oracle) -> None:
    """The number of placeholders of a video depends on the length of its sound."""
    video, other, sound, longer = watched(4, 21), watched(4, 22), audio(1.2, 21), audio(2.3, 22)
    pairs = [{**shown, "sound": with_it} for shown, with_it in ((video, sound), (video, longer), (other, longer))]
    cases = [Case([user(pair, "Now?")], text=8, frames=8) for pair in pairs]
    cases.append(Case([*cases[0].messages, TURNS[1], user({**other, "sound": longer}, "Now?")], text=8, frames=8))
    for case in cases:
        (output,) = omni.generate([prompt(oracle, case)], [sampling(case)], use_tqdm=False)
        check(output, golden(oracle, case))


MEDIA = [
    *(heard(seconds, seed) for seed, seconds in enumerate((0.2, 0.31, 0.4, 0.7, 0.99, 1.0, 2.5, 9.3))),
    *(seen(32 * width, 32 * height, width) for width, height in ((1, 2), (3, 3), (6, 4))),
    *(watched(frames, frames) for frames in (2, 5)),
]
FILMS = [
    *(each for each in MEDIA if each["type"] == "image"),
    *(filmed(frames, seconds, frames) for frames in (2, 4) for seconds in (0.3, 1.0, 2.7, 8.4)),
    {"type": "video", "video": video(4, 64, 256, 5), "sound": audio(0.4, 5)},
]
WORDS = ("red", "cat", "moon", "why", "stage", "replica")


def conversation(rng: random.Random) -> Case:
    """A conversation of up to four turns, whose user turns have up to three media at any place.

    Some have up to three turns, with one of FILMS at most, which have more tokens.
    """
    media, turns, most = (FILMS, 3, 1) if rng.random() < 0.3 else (MEDIA, 4, 3)
    messages = [SYSTEM] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, turns)):
        messages += [{"role": "assistant", "content": rng.choice(WORDS)}] if turn else []
        content: list[Any] = [rng.choice(media) for _ in range(rng.randint(0, most))]
        content.insert(rng.randint(0, len(content)), " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 40)))))
        messages.append(user(*content))
    return Case(messages, text=12, frames=16)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(8))
def test_any_conversations_at_once(seed: int, omni: Any, oracle: Oracle) -> None:
    """With media that are in the caches, and that several steps compute."""
    rng = random.Random(seed)
    cases = [conversation(rng) for _ in range(8)]
    got = omni.generate([prompt(oracle, each) for each in cases], [sampling(each) for each in cases], use_tqdm=False)
    for case, output in zip(cases, got, strict=True):
        check(output, golden(oracle, case))
    assert omni._omni.orchestrator.held() == 0


@pytest.mark.parametrize("name", ["audio", "video", "video_with_sound", "turns"])
def test_chat(name: str, omni: Any, expected: dict[str, Golden]) -> None:
    case = CASES[name]
    (output,) = omni.chat(
        openai_messages(case.messages),
        sampling(case),
        voice=case.voice,
        mm_processor_kwargs=processor_options(case.messages),
        use_tqdm=False,
    )
    check(output, expected[name])


def test_all_at_once(omni: Any, oracle: Oracle, expected: dict[str, Golden]) -> None:
    names = list(CASES)
    for name, output in zip(names, answer(omni, oracle, names), strict=True):
        check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0


SCHEDULES: dict[str, dict[str, Any]] = {
    "one by one": {"text": [1], "frames": [1], "adaptive": False},
    "4, then 25": {"text": [1], "frames": [4, 25], "adaptive": False},
    "growing": {"text": [3], "frames": [1, 2, 4, 8, 16, 32], "adaptive": False},
    "adapting": {"text": [2, 5], "frames": [2, 25], "adaptive": True},
    "off": {"text": "all", "frames": "all"},
}


@pytest.mark.parametrize(
    "schedule",
    [name if name in ("growing", "off") else pytest.param(name, marks=pytest.mark.extended) for name in SCHEDULES],
)
def test_sizes_of_chunks_do_not_change_an_answer(
    schedule: str, omni: Any, oracle: Oracle, expected: dict[str, Golden]
) -> None:
    """All cases at once, so that streams of all lengths share steps of code2wav; then some alone."""
    chunks, names = SCHEDULES[schedule], list(CASES)
    for name, output in zip(names, answer(omni, oracle, names, chunks), strict=True):
        check(output, expected[name])
    for name in ("text", "one_token", "short_answer", "two_images_and_audio"):
        (output,) = answer(omni, oracle, [name], chunks)
        check(output, expected[name])
    assert omni._omni.orchestrator.held() == 0


MINUTE = 750
"""Frames of one minute."""


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(None, id="default", marks=pytest.mark.extended),
        pytest.param(SCHEDULES["one by one"], id="each", marks=pytest.mark.extended),
        pytest.param(SCHEDULES["off"], id="off", marks=pytest.mark.extended),
    ],
)
def test_a_minute_of_sound_equals_an_unchunked_decode(
    chunks: Mapping[str, Any] | None, omni: Any, oracle: Oracle
) -> None:
    talker = SamplingParams(temperature=0, repetition_penalty=1.05, min_tokens=MINUTE + 1, max_tokens=MINUTE + 1)
    (output,) = omni.generate(
        prompt(oracle, CASES["text"]),
        {"thinker": SamplingParams(temperature=0, max_tokens=24), "talker": talker},
        voice="ethan",
        chunks=chunks,
        use_tqdm=False,
    )
    assert output.frames.shape[0] == MINUTE
    with torch.no_grad():
        whole = oracle.model.code2wav(torch.tensor(output.frames).T[None]).flatten().numpy()
    assert output.audio.shape == whole.shape
    assert np.abs(output.audio - whole).max() <= TOLERANCE


def test_the_cases_cover_both_ends_of_both_stages(oracle: Oracle, expected: dict[str, Golden]) -> None:
    eos = oracle.eos_ids if isinstance(oracle.eos_ids, list) else [oracle.eos_ids]
    codec_eos = oracle.model.config.talker_config.codec_eos_token_id
    thinker = {golden.thinker_ids[-1] in eos for golden in expected.values()}
    talker = {golden.talker_ids[-1] == codec_eos for golden in expected.values() if golden.talker_ids}
    assert thinker == {True, False} and talker == {True, False}
    assert not len(expected["one_token"].frames) and len(expected["short_answer"].frames)


def test_concurrent_requests_do_not_mix(omni: Any, oracle: Oracle) -> None:
    """Short clips of several requests in one step, none of them in a cache."""
    cases = [Case([user(heard(seconds, 30 + i), "Hm?")]) for i, seconds in enumerate((0.35, 0.95, 0.5, 0.2))]
    outputs = omni.generate(
        [prompt(oracle, case) for case in cases], [sampling(case) for case in cases], use_tqdm=False
    )
    for output, case in zip(outputs, cases, strict=True):
        check(output, golden(oracle, case))


def test_real_vocabulary(real_vocab: Path) -> None:
    from vllm import LLM

    oracle = Oracle(real_vocab)
    cases = [CASES["turns"], CASES["two_images_and_audio"]]
    with LLM(str(real_vocab), omni=True, max_model_len=1024) as omni:
        outputs = omni.generate(
            [prompt(oracle, case) for case in cases],
            [sampling(case) for case in cases],
            voice="ethan",
            use_tqdm=False,
        )
    for case, output in zip(cases, outputs, strict=True):
        check(output, golden(oracle, case))
