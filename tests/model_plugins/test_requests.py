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

from tests import media
from tests.media import Message
from tests.model_plugins.talker_ids import AUDIO, HEADER, IDS, turn, user
from tests.oracle import Oracle
from vllm_omni_ext.connectors.chunks import ChunkSchedule
from vllm_omni_ext.errors import RequestError
from vllm_omni_ext.model_plugins.qwen3_omni.flow import SpeechFlow
from vllm_omni_ext.model_plugins.qwen3_omni.prompt import SpecialIds
from vllm_omni_ext.model_plugins.qwen3_omni.requests import Qwen3OmniRequests, join_segments
from vllm_omni_ext.orchestrator.flow import Open, Produced
from vllm_omni_ext.orchestrator.requests import OmniOptions, TextRequest
from vllm_omni_ext.tiny.qwen3_omni import write_qwen3_omni
from vllm_omni_ext.wire.handoff import export_ranges
from vllm_omni_ext.wire.parts import refusal
from vllm_omni_ext.wire.rows import Notice

BOTH = ("text", "audio")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_qwen3_omni(tmp_path_factory.mktemp("tiny"), seed=0))


VOCODER = SimpleNamespace(upsampling_ratios=(2, 2), upsample_rates=(8, 5, 4, 3))
SPEAKING = SimpleNamespace(enable_audio_output=True, code2wav_config=VOCODER)


@pytest.fixture
def requests() -> Iterator[Qwen3OmniRequests]:
    with mock.patch.object(SpecialIds, "of", return_value=IDS):
        yield Qwen3OmniRequests(SPEAKING)


SILENT = Qwen3OmniRequests(SimpleNamespace(enable_audio_output=False))


def test_what_a_checkpoint_offers(requests: Qwen3OmniRequests) -> None:
    assert requests.output_modalities == BOTH
    assert (requests.voices, requests.default_voice) == (("chelsie", "ethan"), "ethan")
    assert (SILENT.output_modalities, SILENT.voices) == (("text",), ())


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


def test_without_the_preferred_voice_the_first_one_speaks(requests: Qwen3OmniRequests) -> None:
    with mock.patch.object(Qwen3OmniRequests, "voices", ("bea", "carl")):
        assert requests.default_voice == "bea"


@pytest.mark.parametrize("modalities", [("text",), ("audio",), BOTH])
@pytest.mark.parametrize("voice", [None, "ethan", "Chelsie", "ETHAN"])
def test_what_is_offered_can_be_asked_for(requests: Any, modalities: tuple[str, ...], voice: str | None) -> None:
    requests.check(OmniOptions(modalities=modalities, voice=voice))


@pytest.mark.parametrize(
    ("options", "parameter", "says"),
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
    requests: Any, options: Any, parameter: str, says: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        requests.check(OmniOptions(**options))
    assert refused.value.parameter == parameter
    assert [word for word in says if word not in str(refused.value)] == []


def test_a_checkpoint_without_a_talker_answers_with_text_only() -> None:
    SILENT.check(OmniOptions(modalities=("text",)))
    with pytest.raises(RequestError, match="'audio' is not available; use text"):
        SILENT.check(OmniOptions(modalities=BOTH))


def test_a_text_prompt_exports_nothing(requests: Qwen3OmniRequests) -> None:
    request = TextRequest(prompt=turn(4, AUDIO) + user(20) + HEADER, extra_args={"mine": 1})
    assert isinstance(requests.open(request, OmniOptions(modalities=BOTH)), SpeechFlow)
    assert request.extra_args == {"mine": 1}
    assert not request.skip_prefix_cache


@pytest.mark.parametrize("prompt", [[], [20, 21], user(20)], ids=str)
def test_a_prompt_without_a_speaker_is_refused(requests: Qwen3OmniRequests, prompt: list[int]) -> None:
    request = TextRequest(prompt=prompt)
    with pytest.raises(RequestError, match="assistant") as refused:
        requests.open(request, OmniOptions(modalities=BOTH))
    assert refused.value.parameter == "prompt"
    assert (request.extra_args, request.skip_prefix_cache) == ({}, False)


@pytest.mark.parametrize(("voice", "speaker"), [(None, 80), ("Chelsie", 81)])
def test_the_voice_reaches_the_talker(requests: Qwen3OmniRequests, voice: str | None, speaker: int) -> None:
    flow = requests.open(TextRequest(prompt=user(20) + HEADER), OmniOptions(modalities=BOTH, voice=voice))
    (opened,) = flow.handle(Produced("thinker", (40, 9), None, "stop"))
    assert isinstance(opened, Open)
    assert opened.handoff is not None
    assert opened.handoff["codec"][-3] == speaker


def test_only_the_thinkers_tensor_is_unpacked() -> None:
    rows = torch.ones(2, 3)
    notice = Notice(source="tcp://a", name="0/r", first=4, count=2)
    assert SILENT.decode("thinker", notice.tensor()) == notice
    assert SILENT.decode("talker", rows) is rows
    assert SILENT.decode("code2wav", rows) is rows


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
        mock.patch("vllm_omni_ext.model_plugins.qwen3_omni.requests.SpeechFlow") as flow,
    ):
        options = OmniOptions(modalities=BOTH, chunks=asked)
        requests = Qwen3OmniRequests(SPEAKING, configured)
        requests.check(options)
        requests.open(TextRequest(prompt=user(20) + HEADER), options)
    assert flow.call_args.kwargs == {"text": text, "frames": frames}


def test_a_refusal_of_the_vocoder_becomes_text() -> None:
    assert SILENT.decode("code2wav", refusal("no such code")) == "no such code"


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
    request = TextRequest(prompt=ids, features=features_of(oracle, inputs))
    flow = Qwen3OmniRequests(oracle.model.config).open(request, OmniOptions(modalities=BOTH))
    assert request.skip_prefix_cache
    multimodal = SpecialIds.of(oracle.model.config).multimodal
    exported = [p for a, b in export_ranges(request.extra_args) for p in range(a, b)]
    assert exported == [p for p, t in enumerate(ids) if t in multimodal]
    notice = Notice(source="tcp://a", name="0/r", first=0, count=len(exported))
    (opened,) = flow.handle(Produced("thinker", (40, 41, 9), notice, "stop"))
    assert isinstance(opened, Open)
    assert opened.handoff is not None
    got = segments_of(opened.handoff["positions"])
    assert got.shape[1] == len(opened.prompt) == len(opened.handoff["text"])
    assert got.tolist() == talker_positions(oracle, inputs)
