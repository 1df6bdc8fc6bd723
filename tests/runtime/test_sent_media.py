"""Media that an engine holds are not sent again; media that it has dropped are. The engine's cache is vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache, MultiModalCacheMissError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from vllm_omni_ext.runtime.client.sent_media import SentMedia, engine_keeps_media

ITEM = 1024
"""Floats of a medium."""

ROOM_GB = 3.5 * 4 * ITEM / 2**30
"""Capacity of an engine: three media."""


def config(gb: float = ROOM_GB, kind: str = "lru", ranks: int = 1, multimodal: bool = True) -> Any:
    media = SimpleNamespace(mm_processor_cache_gb=gb, mm_processor_cache_type=kind)
    model = Model()
    model.multimodal_config, model.is_multimodal_model = media, multimodal
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(data_parallel_size=ranks))


class Model:
    multimodal_config: Any
    is_multimodal_model: bool

    def get_multimodal_config(self) -> Any:
        return self.multimodal_config


def medium(name: int, identifier: str = "") -> MultiModalFeatureSpec:
    data = MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(torch.full((ITEM,), float(name)), MultiModalBatchedField())}
    )
    return MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=identifier or f"medium {name}",
        mm_position=PlaceholderRange(offset=0, length=1),
        mm_hash=f"medium {name}",
    )


def request(media: list[MultiModalFeatureSpec], name: str = "request", **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1],
        mm_features=media,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **more,
    )


class Engine:
    """vLLM's cache in an engine, and its answer to a request whose media are missing."""

    def __init__(self) -> None:
        self.cache = LruKeyReplicatedReceiverCache(config().model_config)

    def receive(self, message: EngineCoreRequest) -> EngineCoreOutput | list[float]:
        """Return the values of the media, or the output that reports missing ones."""
        try:
            features = self.cache.get_and_update_features(message.mm_features or [])
        except MultiModalCacheMissError as err:
            return EngineCoreOutput(
                message.request_id, [], finish_reason=FinishReason.ERROR, mm_cache_miss_hashes=err.mm_hashes
            )
        return [float(each.data["pixels"].data[0]) for each in features if each.data is not None]


REQUESTS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=4)), max_size=12)


@given(requests=REQUESTS, clients=st.integers(1, 3))
def test_an_engine_gets_all_media_of_each_request_from_any_number_of_api_servers(
    requests: list[tuple[int, list[int]]], clients: int
) -> None:
    engine, senders = Engine(), [SentMedia(config(), clients) for _ in range(clients)]
    for client, names in requests:
        media = senders[client % clients]
        whole = request([medium(name) for name in names])
        found = engine.receive(media.without_held(whole))
        if isinstance(found, EngineCoreOutput):
            assert clients > 1, "one API server's cache always agrees with the engine's"
            outputs = EngineCoreOutputs(outputs=[found])
            (again,) = media.missed(outputs)
            assert outputs.outputs == [] and again is whole
            found = engine.receive(again)
        assert found == [float(name) for name in names]
        assert all(each.data is not None for each in whole.mm_features or []), "a failover sends the request to another"


def test_the_media_of_earlier_turns_are_sent_once() -> None:
    media = SentMedia(config(), 1)
    first = request([medium(1)])
    assert media.without_held(first) is first
    second = media.without_held(request([medium(1), medium(2)]))
    assert [each.data is None for each in second.mm_features or []] == [True, False]
    assert media.without_held(parts := request([medium(1)], resumable=True)) is parts
    text = request([])
    assert media.without_held(text) is text


def test_other_outputs_of_a_message_stay_and_an_aborted_request_is_not_sent_again() -> None:
    media = SentMedia(config(), 1)
    media.without_held(request([medium(1)]))
    for name in ("answered", "missing", "aborted"):
        media.without_held(request([medium(1)], name))
    media.forget(["aborted"])
    missing = {"finish_reason": FinishReason.ERROR, "mm_cache_miss_hashes": ["medium 1"]}
    outputs = EngineCoreOutputs(
        outputs=[
            EngineCoreOutput("answered", [5]),
            EngineCoreOutput("missing", [], **missing),
            EngineCoreOutput("aborted", [], **missing),
        ]
    )
    assert [each.request_id for each in media.missed(outputs)] == ["missing"]
    assert [each.request_id for each in outputs.outputs] == ["answered"]
    assert media.without_held(whole := request([medium(1)])) is whole, "the engine has dropped it"


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, True), ({"gb": 0.0}, False), ({"kind": "shm"}, False), ({"ranks": 2}, False), ({"multimodal": False}, False)],
)
def test_engines_without_a_cache_of_media_get_all_media(given: dict[str, Any], kept: bool) -> None:
    assert engine_keeps_media(config(**given)) is kept
