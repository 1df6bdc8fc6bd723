"""What a request may ask for, and what the thinker is asked to hand over for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams

from tests.support import media
from tests.support.media import Message
from tests.support.oracle import Oracle
from tests.support.talker_ids import AUDIO, HEADER, IDS, turn, user
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.family import QWEN3_OMNI
from vllm_omni_ext.model_plugins.qwen3_omni.flow import ReadAloudFlow, SpeechFlow
from vllm_omni_ext.model_plugins.qwen3_omni.payloads import TalkerPrompt
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds
from vllm_omni_ext.model_plugins.qwen3_omni.read_aloud import MOST_SPEECH_TOKENS, OPENING, ReadAloud, rendered
from vllm_omni_ext.model_plugins.qwen3_omni.runtime import OPENAI_VOICES, Qwen3OmniRuntime, join_segments
from vllm_omni_ext.plugins.flow import ForwardFlow, Open, Produced
from vllm_omni_ext.plugins.runtime import Rendered, RequestOptions, RuntimeContext
from vllm_omni_ext.wire.envelope import HiddenStatesChunkReady
from vllm_omni_ext.wire.stage_input import EXPORT

BOTH = ("text", "audio")


VOCODER = SimpleNamespace(upsampling_ratios=(2, 2), upsample_rates=(8, 5, 4, 3))
SPEAKING = SimpleNamespace(
    enable_audio_output=True, code2wav_config=VOCODER, talker_config=SimpleNamespace(num_code_groups=4)
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


SILENT = made(SimpleNamespace(enable_audio_output=False))


def options(*, voice: str | None = None, **more: Any) -> RequestOptions:
    return RequestOptions(**{"modalities": BOTH, "fields": {} if voice is None else {"voice": voice}, **more})


def test_what_a_checkpoint_offers(requests: Qwen3OmniRuntime) -> None:
    capabilities = requests.capabilities()
    assert capabilities.modalities == capabilities.default_modalities == BOTH
    assert (requests.voices, requests.default_voice) == (("chelsie", "ethan"), "ethan")
    card = {"voices": ["chelsie", "ethan"], "default_voice": "ethan", MOST_SPEECH_TOKENS: 40}
    assert capabilities.card == card
    thinker, talking = {"thinker"}, {"talker", "code2wav"}
    assert capabilities.routes == {"text": thinker, "audio": thinker | talking, "speech": talking}
    silent = SILENT.capabilities()
    assert (silent.modalities, silent.routes, silent.card) == (("text",), {"text": thinker}, {})


def test_special_ids_come_from_the_config(oracle: Oracle) -> None:
    ids = SpecialIds.of(oracle.model.config)
    assert set(ids.speakers) == {"aiden", "chelsie", "ethan"}
    names = {
        "<|im_start|>": ids.im_start,
        "user": ids.user,
        "assistant": ids.assistant,
        "<tts_text_bos>": ids.tts_bos,
        "<tts_text_eod>": ids.tts_eos,
        "<tts_pad>": ids.tts_pad,
    }
    known = oracle.processor.tokenizer.convert_tokens_to_ids
    assert {name: known(name) for name in names} == names
    assert ids.multimodal == {known(f"<|{kind}_pad|>") for kind in ("audio", "image", "video")}


def test_without_the_preferred_voice_the_first_one_speaks(requests: Qwen3OmniRuntime) -> None:
    with mock.patch.object(Qwen3OmniRuntime, "voices", ("bea", "carl")):
        assert requests.default_voice == "bea"


def test_openai_s_names_of_voices_stand_for_the_checkpoint_s(requests: Qwen3OmniRuntime) -> None:
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
    with mock.patch.object(Qwen3OmniRuntime, "voices", ("alloy", "bea")):
        assert requests.speaker("alloy") == "alloy", "the checkpoint's own comes first"
    assert SILENT.speaker("alloy") is None


@pytest.mark.parametrize("modalities", [("text",), ("audio",), BOTH])
@pytest.mark.parametrize("voice", [None, "ethan", "Chelsie", "ETHAN"])
def test_what_is_offered_can_be_asked_for(requests: Any, modalities: tuple[str, ...], voice: str | None) -> None:
    requests.validate(options(modalities=modalities, voice=voice))


@pytest.mark.parametrize(
    ("asked", "parameter", "says"),
    [
        ({"modalities": ()}, "modalities", ["modalities"]),
        ({"modalities": ("text", "video")}, "modalities", ["modalities", "'video'", "text, audio"]),
        ({"modalities": BOTH, "voice": "bob"}, "voice", ["voice", "'bob'", "chelsie, ethan"]),
        ({"modalities": BOTH, "voice": ""}, "voice", ["voice", "chelsie, ethan"]),
        ({"modalities": BOTH, "chunks": {"frame": [1]}}, "chunks.frame", ["chunks.frame", "text, frames, adaptive"]),
        ({"modalities": BOTH, "chunks": {"frames": [0]}}, "chunks.frames", ["chunks.frames", "[0]", "sizes >= 1"]),
        ({"modalities": BOTH, "chunks": {"text": "some"}}, "chunks.text", ["chunks.text", "'some'", "'all'"]),
        ({"modalities": BOTH, "chunks": {"adaptive": 1}}, "chunks.adaptive", ["true or false"]),
    ],
    ids=str,
)
def test_refusals_name_the_parameter_and_what_is_allowed(
    requests: Any, asked: Any, parameter: str, says: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        requests.validate(options(**asked))
    assert refused.value.parameter == parameter
    assert [word for word in says if word not in str(refused.value)] == []


def test_a_checkpoint_without_a_talker_answers_with_text_only() -> None:
    SILENT.validate(options(modalities=("text",)))
    with pytest.raises(RequestError, match="'audio' is not available; use text"):
        SILENT.validate(options())


def test_a_text_prompt_exports_nothing(requests: Qwen3OmniRuntime) -> None:
    planned = requests.plan(Rendered(prompt=turn(4, AUDIO) + user(20) + HEADER), options())
    assert isinstance(planned.flow, SpeechFlow) and planned.flow.outputs == {"text", "audio"}
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
def test_the_voice_reaches_the_talker(requests: Qwen3OmniRuntime, voice: str | None, speaker: int) -> None:
    flow = requests.plan(Rendered(prompt=user(20) + HEADER), options(voice=voice)).flow
    (opened,) = flow.handle(Produced("thinker", (40, 9), None, "stop"))
    assert isinstance(opened, Open) and isinstance(opened.payload, TalkerPrompt)
    assert opened.payload.codec[-3] == speaker


def test_tensors_are_what_they_are() -> None:
    rows = torch.ones(2, 3)
    assert SILENT.decode("talker", rows) is rows
    assert SILENT.decode("code2wav", rows) is rows


@pytest.mark.parametrize(
    ("limits", "budget"),
    [({}, 40), ({"talker": 45}, 45 - len(user(20)) - 9), ({"code2wav": 7}, 1)],
    ids=str,
)
def test_the_talker_may_make_what_it_holds_and_code2wav_decodes(limits: dict[str, int], budget: int) -> None:
    with mock.patch.object(SpecialIds, "of", return_value=IDS):
        requests = made(SPEAKING, limits=LIMITS | limits)
    assert requests.plan(Rendered(prompt=user(20) + HEADER), options()).budgets == {"talker": budget}


def test_a_prompt_that_fills_the_talker_is_refused() -> None:
    with mock.patch.object(SpecialIds, "of", return_value=IDS):
        requests = made(SPEAKING, limits=LIMITS | {"talker": len(user(20)) + 9})
    with pytest.raises(RequestError, match="whose context holds 15") as refused:
        requests.plan(Rendered(prompt=user(20) + HEADER), options())
    assert refused.value.parameter == "messages"


def test_more_frames_than_code2wav_can_decode_are_refused(requests: Qwen3OmniRuntime) -> None:
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
    with (
        mock.patch.object(SpecialIds, "of", return_value=IDS),
        mock.patch("vllm_omni_ext.model_plugins.qwen3_omni.runtime.SpeechFlow") as flow,
    ):
        requests = made(SPEAKING, configured)
        requests.validate(options(chunks=asked))
        requests.plan(Rendered(prompt=user(20) + HEADER), options(chunks=asked))
    assert flow.call_args.kwargs == {"text": text, "frames": frames, "text_too": True}


# -- a text that is read out ---------------------------------------------------------------------------


class Server:
    """Counts a token for each character, and remembers what was asked."""

    def __init__(self, most: int = 40) -> None:
        self.capabilities = SimpleNamespace(card={MOST_SPEECH_TOKENS: most})
        self.asked: list[tuple[str, bool]] = []

    async def tokenize(self, words: str, *, special: bool = True) -> list[int]:
        self.asked.append((words, special))
        return user() + HEADER if special else [20] * len(words)


async def test_marks_in_a_text_that_is_read_out_are_characters() -> None:
    server: Any = Server()
    request = await rendered("<|im_end|>", server)
    assert server.asked == [(OPENING, True), ("<|im_end|>", False)]
    assert request.data == ReadAloud(prompt=user() + HEADER, reply=[20] * 10)


@pytest.mark.parametrize("words", ["", " \n", "a\ud800"], ids=ascii)
async def test_a_text_that_cannot_be_read_out_is_refused(words: str) -> None:
    with pytest.raises(RequestError) as refused:
        await rendered(words, Server())  # type: ignore[arg-type]
    assert refused.value.parameter == "input"


async def test_not_all_of_a_text_that_is_much_too_long_is_cut() -> None:
    server: Any = Server()
    with pytest.raises(RequestError, match="1000000 characters are too many"):
        await rendered("a" * 1_000_000, server)
    assert len(server.asked) == 1


async def test_a_text_that_is_read_out_is_planned(requests: Qwen3OmniRuntime) -> None:
    server: Any = Server()
    planned = requests.plan(await rendered("hello", server), options(modalities=("audio",)))
    assert isinstance(planned.flow, ReadAloudFlow) and not isinstance(planned.flow, SpeechFlow)
    assert (planned.flow.stages, planned.flow.outputs) == ({"talker", "code2wav"}, {"audio"})
    assert planned.budgets == {"talker": 40}
    (opened,) = planned.flow.begin()
    assert isinstance(opened, Open) and isinstance(opened.payload, TalkerPrompt) and opened.last
    assert [opened.payload.text[-1], *opened.payload.track] == [20] * 5 + [IDS.tts_eos]
    with pytest.raises(RequestError, match="41 tokens are too many") as refused:
        requests.plan(await rendered("a" * 41, server), options(modalities=("audio",)))
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


# -- against Transformers ----------------------------------------------------------------------


def feature(modality: str, offset: int, length: int, **data: torch.Tensor) -> MultiModalFeatureSpec:
    field = MultiModalBatchedField()
    item = MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in data.items()})
    return MultiModalFeatureSpec(item, modality, f"{modality}{offset}", PlaceholderRange(offset, length))


def features_of(oracle: Oracle, inputs: dict[str, torch.Tensor]) -> list[MultiModalFeatureSpec]:
    """vLLM's description of the media, from what the processor says."""
    thinker, ids = oracle.model.config.thinker_config, inputs["input_ids"][0].tolist()
    found: list[MultiModalFeatureSpec] = []
    kinds = {
        "audio": (
            thinker.audio_token_id,
            lambda i: {"audio_feature_lengths": inputs["feature_attention_mask"][i].sum()},
        ),
        "image": (thinker.image_token_id, lambda i: {"image_grid_thw": inputs["image_grid_thw"][i]}),
        "video": (
            thinker.video_token_id,
            lambda i: {
                "video_grid_thw": inputs["video_grid_thw"][i],
                "second_per_grid_ts": torch.as_tensor(inputs["video_second_per_grid"][i]),
            },
        ),
    }
    for kind, (token, data) in kinds.items():
        starts = [p for p, t in enumerate(ids) if t == token and ids[p - 1] != token]
        for i, start in enumerate(starts):
            stop = next(p for p in range(start, len(ids)) if ids[p] != token)
            found.append(feature(kind, start, stop - start, **data(i)))
    return found


def heard(seconds: float, seed: int) -> dict[str, Any]:
    return {"type": "audio", "audio": media.audio(seconds, seed)}


def seen(width: int, height: int, seed: int) -> dict[str, Any]:
    return {"type": "image", "image": media.image(width, height, seed)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


SYSTEM: Message = {"role": "system", "content": "Be kind."}
REPLY: Message = {"role": "assistant", "content": "I see."}
CONVERSATIONS: dict[str, list[Message]] = {
    "image and audio": [SYSTEM, {"role": "user", "content": [seen(96, 64, 1), heard(0.5, 2), text("Which?")]}],
    "audio, then images": [
        SYSTEM,
        {"role": "user", "content": [text("Listen:"), heard(0.7, 3)]},
        REPLY,
        {"role": "user", "content": [seen(64, 96, 4), text("and"), seen(128, 64, 5)]},
    ],
    "video": [
        {"role": "user", "content": [{"type": "video", "video": media.video(4, 64, 64, 6)}, text("What?")]},
        REPLY,
        {"role": "user", "content": "Sure?"},
    ],
    "audio alone": [SYSTEM, {"role": "user", "content": [heard(0.4, 7), text("What?")]}],
}


def talker_positions(oracle: Oracle, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The prompt's positions as Transformers gives them to the talker's transformer."""
    seen_ = []
    forward = oracle.model.talker.model.forward

    def listen(*args: Any, **kwargs: Any) -> Any:
        seen_.append(kwargs["position_ids"])
        return forward(*args, **kwargs)

    with mock.patch.object(oracle.model.talker.model, "forward", listen):
        oracle.model.generate(
            **inputs,
            thinker_max_new_tokens=3,
            thinker_eos_token_id=-1,
            thinker_do_sample=False,
            talker_max_new_tokens=2,
            talker_do_sample=False,
            return_audio=True,
        )
    return seen_[0][-3:, 0].long().tolist()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_positions_and_ranges_are_those_of_transformers(oracle: Oracle, name: str) -> None:
    inputs = oracle.inputs(CONVERSATIONS[name])
    ids = inputs["input_ids"][0].tolist()
    limits = dict.fromkeys(LIMITS, 10_000)
    request = Rendered(prompt=ids, features=features_of(oracle, inputs))
    planned = made(oracle.model.config, limits=limits).plan(request, options())
    assert planned.skip_prefix_cache
    multimodal = SpecialIds.of(oracle.model.config).multimodal
    exported = [p for a, b in planned.frontend_args[EXPORT] for p in range(a, b)]
    assert exported == [p for p, t in enumerate(ids) if t in multimodal]
    ready = HiddenStatesChunkReady(source="tcp://a", name="0/r", first=0, count=len(exported))
    (opened,) = planned.flow.handle(Produced("thinker", (40, 41, 9), ready, "stop"))
    assert isinstance(opened, Open) and isinstance(opened.payload, TalkerPrompt)
    assert opened.payload.positions is not None
    got = segments_of(opened.payload.positions)
    assert got.shape[1] == len(opened.prompt) == len(opened.payload.text)
    assert got.tolist() == talker_positions(oracle, inputs)
