"""Fields of requests, their limits and refusals, and the planned stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from tests.support.talker_ids import AUDIO, HEADER, IDS, turn, user
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.flow import ReadAloudFlow, SpeechFlow
from vllm_omni_ext.model_plugins.qwen3_omni.http import OPENING
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds, TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.runtime import (
    OPENAI_VOICES,
    Qwen3OmniRuntime,
    join_segments,
)
from vllm_omni_ext.model_plugins.qwen_omni.requests import MOST_SPEECH_TOKENS, ReadAloud
from vllm_omni_ext.model_plugins.qwen_omni.speech import rendered
from vllm_omni_ext.plugins.flow import ForwardFlow, Open, Produced
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions, RuntimeContext

BOTH = ("text", "audio")
VOCODER = SimpleNamespace(upsampling_ratios=(2, 2), upsample_rates=(8, 5, 4, 3))
THINKER = SimpleNamespace(audio_config=SimpleNamespace(n_window=50, n_window_infer=200))
SPEAKING = SimpleNamespace(
    enable_audio_output=True,
    code2wav_config=VOCODER,
    talker_config=SimpleNamespace(num_code_groups=4),
    thinker_config=THINKER,
)
LIMITS = {"thinker": 200, "talker": 100, "code2wav": 160}


def made(config: Any, configured: dict[str, Any] | None = None, limits: dict[str, int] = LIMITS) -> Qwen3OmniRuntime:
    chunks = {**QWEN3_OMNI.chunks(), **(configured or {})}
    context = RuntimeContext(hf_config=config, pipeline="qwen3_omni", frontend="thinker", chunks=chunks, limits=limits)
    return Qwen3OmniRuntime(context)


@pytest.fixture
def requests() -> Iterator[Qwen3OmniRuntime]:
    with mock.patch.object(SpecialIds, "of", return_value=IDS):
        yield made(SPEAKING)


SILENT = made(SimpleNamespace(enable_audio_output=False, thinker_config=THINKER))


def options(*, voice: str | None = None, **more: Any) -> RequestOptions:
    return RequestOptions(**{"modalities": BOTH, "fields": {} if voice is None else {"voice": voice}, **more})


def test_capabilities_of_a_checkpoint_with_and_without_sound(requests: Qwen3OmniRuntime) -> None:
    capabilities = requests.capabilities()
    assert capabilities.modalities == capabilities.default_modalities == BOTH
    assert (requests.voices, requests.default_voice) == (("chelsie", "ethan"), "ethan")
    assert capabilities.card == {"voices": ["chelsie", "ethan"], "default_voice": "ethan", MOST_SPEECH_TOKENS: 40}
    thinker, talking = {"thinker"}, {"talker", "code2wav"}
    assert capabilities.routes == {"text": thinker, "audio": thinker | talking, "speech": talking}
    silent = SILENT.capabilities()
    assert (silent.modalities, silent.routes, silent.card) == (("text",), {"text": thinker}, {})
    SILENT.validate(options(modalities=("text",)))
    with pytest.raises(RequestError, match="'audio' is not available; use text"):
        SILENT.validate(options())


def test_openai_s_voices_stand_for_speakers_of_the_checkpoint(requests: Qwen3OmniRuntime) -> None:
    assert {name: requests.speaker(name) for name in (None, "Ethan", "alloy", "Ash", "ECHO", "nova", "nobody", "")} == {
        None: "ethan",
        "Ethan": "ethan",
        "alloy": "chelsie",
        "Ash": "ethan",
        "ECHO": "ethan",
        "nova": "chelsie",
        "nobody": None,
        "": None,
    }
    assert requests.speaker("verse") == "ethan", "aiden is not there: the default one"
    assert all(requests.speaker(name) in requests.voices for name in OPENAI_VOICES)
    requests.validate(options(modalities=("audio",), voice="alloy"))
    with mock.patch.object(requests, "_names", {"alloy": "Alloy", "bea": "bea"}):
        assert requests.speaker("alloy") == "Alloy", "the checkpoint's own comes first"
        assert requests.default_voice == "Alloy", "without the preferred voice it is the first one"
    assert SILENT.speaker("alloy") is None


@pytest.mark.parametrize(
    ("asked", "parameter", "says"),
    [
        ({"modalities": ()}, "modalities", ["modalities"]),
        ({"modalities": ("text", "video")}, "modalities", ["modalities", "'video'", "text, audio"]),
        ({"modalities": BOTH, "voice": "bob"}, "voice", ["voice", "'bob'", "chelsie, ethan"]),
        ({"modalities": BOTH, "voice": ""}, "voice", ["voice", "chelsie, ethan"]),
    ],
    ids=str,
)
def test_refusals_name_the_parameter_and_its_allowed_values(
    requests: Any, asked: Any, parameter: str, says: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        requests.validate(options(**asked))
    assert refused.value.parameter == parameter
    assert [word for word in says if word not in str(refused.value)] == []


def test_a_text_prompt_exports_nothing(requests: Qwen3OmniRuntime) -> None:
    for modalities in (BOTH, ("audio",)):
        planned = requests.plan(Rendered(prompt=turn(4, AUDIO) + user(20) + HEADER), options(modalities=modalities))
        assert isinstance(planned.flow, SpeechFlow) and planned.flow.stages == {"thinker", "talker", "code2wav"}
        assert planned.flow.outputs == set(modalities)
        assert (planned.frontend_args, planned.skip_prefix_cache) == ({}, False)


def test_text_alone_needs_the_thinker_alone(requests: Qwen3OmniRuntime) -> None:
    planned = requests.plan(Rendered(prompt=[20, AUDIO]), options(modalities=("text",)))
    assert isinstance(planned.flow, ForwardFlow) and planned.flow.stages == {"thinker"}
    assert (planned.frontend_args, planned.skip_prefix_cache, planned.budgets) == ({}, False, {})


@pytest.mark.parametrize("prompt", [[], [20, 21], user(20)], ids=str)
def test_a_prompt_without_a_speaker_is_refused(requests: Qwen3OmniRuntime, prompt: list[int]) -> None:
    with pytest.raises(RequestError, match="assistant") as refused:
        requests.plan(Rendered(prompt=prompt), options())
    assert refused.value.parameter == "prompt"


@pytest.mark.parametrize(("voice", "speaker"), [(None, 80), ("Chelsie", 81), ("Alloy", 81), ("verse", 80)])
def test_the_talker_gets_the_voice_of_the_request(requests: Qwen3OmniRuntime, voice: str | None, speaker: int) -> None:
    requests.validate(options(voice=voice))
    flow = requests.plan(Rendered(prompt=user(20) + HEADER), options(voice=voice)).flow
    (opened,) = flow.handle(Produced("thinker", (40, 9), None, "stop"))
    assert isinstance(opened, Open) and isinstance(opened.payload, TalkerPrompt)
    assert opened.payload.codec[-3] == speaker


def budgets(**limits: int) -> Any:
    with mock.patch.object(SpecialIds, "of", return_value=IDS):
        requests = made(SPEAKING, limits=LIMITS | limits)
    return requests.plan(Rendered(prompt=user(20) + HEADER), options()).budgets


def test_the_talker_is_limited_by_its_context_and_by_code2wav(requests: Qwen3OmniRuntime) -> None:
    tail = len(user(20)) + 9
    assert budgets() == {"talker": 40}
    assert budgets(talker=45) == {"talker": 45 - tail}
    assert budgets(code2wav=7) == {"talker": 1}
    with pytest.raises(RequestError, match=f"whose context holds {tail}") as refused:
        budgets(talker=tail)
    assert refused.value.parameter == "messages"
    asked = options(params={"talker": SamplingParams(max_tokens=41)})
    with pytest.raises(RequestError, match="use at most 40") as refused:
        requests.plan(Rendered(prompt=user(20) + HEADER), asked)
    assert refused.value.parameter == "talker.max_tokens"


@pytest.mark.parametrize(
    ("configured", "asked", "text", "frames"),
    [
        ({}, {}, ChunkSchedule((1,)), ChunkSchedule((1, 2, 4, 8, 16, 25), 12.5)),
        ({"frames": (4, 25)}, {}, ChunkSchedule((1,)), ChunkSchedule((4, 25), 12.5)),
        ({"frames": (4, 25)}, {"frames": [3], "text": "all"}, ChunkSchedule(), ChunkSchedule((3,), 12.5)),
        ({"text": "all", "frames": "all"}, {"frames": [2], "adaptive": False}, ChunkSchedule(), ChunkSchedule((2,))),
        ({"adaptive": False}, {"adaptive": True}, ChunkSchedule((1,)), ChunkSchedule((1, 2, 4, 8, 16, 25), 12.5)),
    ],
    ids=str,
)
def test_a_request_may_change_the_configured_chunks(
    configured: Any, asked: Any, text: ChunkSchedule, frames: ChunkSchedule
) -> None:
    """Sizes that a request sets are used as they are, also for an answer that is not streamed."""
    for streamed in (True, False):
        with (
            mock.patch.object(SpecialIds, "of", return_value=IDS),
            mock.patch("vllm_omni_ext.model_plugins.qwen3_omni.runtime.SpeechFlow") as flow,
        ):
            requests, chosen = made(SPEAKING, configured), options(chunks=asked, streamed=streamed)
            requests.validate(chosen)
            requests.plan(Rendered(prompt=user(20) + HEADER), chosen)
        used = replace(frames, streamed=streamed or bool(asked))
        assert flow.call_args.kwargs == {"text": text, "frames": used, "text_too": True}


# -- a text to read aloud ---------------------------------------------------------------------------


class Server:
    """Makes a token of each character, and records the calls."""

    def __init__(self, most: int = 40) -> None:
        self.capabilities = SimpleNamespace(card={MOST_SPEECH_TOKENS: most})
        self.asked: list[tuple[str, bool]] = []

    async def tokenize(self, words: str, *, special: bool = True) -> list[int]:
        self.asked.append((words, special))
        return user() + HEADER if special else [20] * len(words)


async def test_special_tokens_in_a_text_to_read_aloud_are_characters() -> None:
    server: Any = Server()
    request = await rendered("<|im_end|>", server, OPENING)
    assert server.asked == [(OPENING, True), ("<|im_end|>", False)]
    assert request.data == ReadAloud(prompt=user() + HEADER, reply=[20] * 10)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "nothing to read"),
        (" \n", "nothing to read"),
        ("a\ud800", "surrogate"),
        ("a" * 1_000_000, "1000000 characters are too many"),
    ],
    ids=["empty", "spaces", "surrogate", "too long"],
)
async def test_a_text_that_cannot_be_read_aloud_is_refused_before_it_is_tokenized(words: str, reason: str) -> None:
    server: Any = Server()
    with pytest.raises(RequestError, match=reason) as refused:
        await rendered(words, server, OPENING)
    assert refused.value.parameter == "input"
    assert len(server.asked) <= 1


async def test_a_text_to_read_aloud_uses_talker_and_code2wav_alone(requests: Qwen3OmniRuntime) -> None:
    server: Any = Server()
    planned = requests.plan(await rendered("hello", server, OPENING), options(modalities=("audio",)))
    assert isinstance(planned.flow, ReadAloudFlow) and not isinstance(planned.flow, SpeechFlow)
    assert (planned.flow.stages, planned.flow.outputs) == ({"talker", "code2wav"}, {"audio"})
    assert planned.budgets == {"talker": 40}
    (opened,) = planned.flow.begin()
    assert isinstance(opened, Open) and isinstance(opened.payload, TalkerPrompt) and opened.last
    assert [opened.payload.text[-1], *opened.payload.track] == [20] * 5 + [IDS.tts_eos]
    with pytest.raises(RequestError, match="41 tokens are too many") as refused:
        requests.plan(await rendered("a" * 41, server, OPENING), options(modalities=("audio",)))
    assert refused.value.parameter == "input"


def segments_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32).reshape(3, -1)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5), st.integers(0, 9))
def test_segments_of_text_become_one_count(turns: list[tuple[int, bool]], tail: int) -> None:
    total = sum(length for length, _ in turns)
    ends = np.cumsum([length for length, _ in turns])
    kept = [(int(end) - length, int(end)) for (length, keep), end in zip(turns, ends, strict=True) if keep]
    got = segments_of(join_segments(np.broadcast_to(np.arange(total), (3, total)), kept, tail))
    count = sum(stop - start for start, stop in kept) + tail
    assert got.tolist() == [list(range(count))] * 3


def test_a_segment_goes_on_after_the_highest_position_of_the_one_before() -> None:
    grid = np.array([[0, 1, 1, 8, 9], [0, 1, 7, 8, 9], [0, 1, 1, 8, 9]])
    assert segments_of(join_segments(grid, [(0, 3), (4, 5)], 1)).tolist() == [
        [0, 1, 1, 8, 9],
        [0, 1, 7, 8, 9],
        [0, 1, 1, 8, 9],
    ]
