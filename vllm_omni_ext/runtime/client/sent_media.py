"""Leaves out the media that an engine holds from the requests that an API server sends to the engine.

Each engine of a multimodal model has vLLM's receiver cache, which all API servers fill. Each API server has vLLM's
sender cache for each replica: the sizes of the media that it has sent, in the order of use, within its share of the
engine's capacity. The caches of several API servers can disagree with the engine's: the engine then returns the missing
hashes (`EngineCoreOutput.mm_cache_miss_hashes`), and the request is sent again with all its media.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest


def engine_keeps_media(config: VllmConfig) -> bool:
    """Return whether the engine of a config has vLLM's receiver cache for media.

    vLLM's condition that there is one API process is not checked, because the engine's agent (`engine.agent`) meets it.
    """
    model: Any = config.model_config
    media = model.multimodal_config
    if media is None or not model.is_multimodal_model:
        return False
    in_messages = media.mm_processor_cache_gb > 0 and media.mm_processor_cache_type == "lru"
    return in_messages and config.parallel_config.data_parallel_size == 1


class SentMedia:
    """Records the media (images, videos, sounds) that one API server has sent to one engine, whose cache holds them.

    The API server leaves them out of later requests with the same media.

    Args:
        config: vLLM's config of the engine, for which `engine_keeps_media` is True.
        api_servers: number of the API servers that share the engine's cache.
    """

    def __init__(self, config: VllmConfig, api_servers: int) -> None:
        share = copy(config.model_config)
        share.multimodal_config = media = deepcopy(config.model_config.multimodal_config)
        assert media is not None
        media.mm_processor_cache_gb /= api_servers
        self._cache = LruKeyReplicatedSenderCache(share)
        self._unanswered: dict[str, EngineCoreRequest] = {}

    def without_held(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return a copy of a request without media that the engine holds; the request itself if there are none."""
        features = request.mm_features
        if not features or request.resumable:
            return request
        for feature in features:
            if feature.mm_hash is not None:
                self._cache.touch_sender_cache_item(feature.mm_hash)
        left = [self._left(feature) for feature in features]
        if all(one is other for one, other in zip(left, features, strict=True)):
            return request
        self._unanswered[request.request_id] = request
        message = copy(request)
        message.mm_features = left
        return message

    def _left(self, feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
        if feature.mm_hash is None or feature.data is None:
            return feature
        data, _ = self._cache.get_and_update_item((feature.data, ()), feature.mm_hash)
        return feature if data is not None else replace(feature, data=None)

    def missed(self, outputs: EngineCoreOutputs) -> list[EngineCoreRequest]:
        """Remove the outputs that report missing media from `outputs`.

        Returns:
            The requests of these outputs, with all their media, to be sent again.
        """
        if not self._unanswered:
            return []
        found, kept = [], []
        for output in outputs.outputs:
            request = self._unanswered.pop(output.request_id, None)
            if not output.mm_cache_miss_hashes:
                kept.append(output)
                continue
            for name in output.mm_cache_miss_hashes:
                self._cache.invalidate(name)
            if request is not None:  # it has not been aborted
                found.append(request)
        if len(kept) < len(outputs.outputs):
            outputs.outputs = kept
        return found

    def forget(self, request_ids: list[str]) -> None:
        """Forget aborted requests, which are not sent again."""
        for request_id in request_ids:
            self._unanswered.pop(request_id, None)
