"""The thinker's worker: exports the layer that the talker reads, and encodes each request's sound in a separate call.

The audio encoder of Qwen3-Omni pads the last chunk of every sound to the longest chunk of the call. Biases of its
convolutions turn the padding into nonzero values. The encoder outputs of a short sound therefore depend on the other
sounds of the call, by much more than rounding. Transformers encodes all sounds of one prompt in one call. This worker
pads as in Transformers' call, even if it encodes the sounds (or their blocks, see `sound_blocks.py`) of a prompt in
several steps, or if the encoder cache has some of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_omni_ext.engine.worker import HiddenStatesExportWorker
from vllm_omni_ext.model_plugins.qwen3_omni.sound_blocks import (
    is_sound,
    joined,
    longest_chunk,
    rows_of_chunk,
)
from vllm_omni_ext.model_plugins.qwen_omni.own_sounds import Clock, merge_by_modality, positions_by_time

Due = Mapping[str, list[int]]
"""Request id -> indices of the media items to encode, as in `SchedulerOutput.scheduled_encoder_inputs`."""


class ThinkerWorker(HiddenStatesExportWorker):
    """Exports the output of `talker_config.accept_hidden_layer` at multimodal positions."""

    def layer_to_export(self) -> int:
        return int(self.vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)

    def load_model(self, **kwargs: Any) -> None:
        from vllm.model_executor.models import qwen3_omni_moe_thinker

        merge_by_modality(qwen3_omni_moe_thinker)
        super().load_model(**kwargs)
        model = self.model_runner.get_model()
        encode_apart(self.model_runner, LongestChunk(model.audio_tower))
        correct_positions(model, Clock.of(self.vllm_config.model_config.hf_config.thinker_config, own_marks=True))


class LongestChunk:
    """Adds a chunk of zeros to each call of the audio encoder, and removes the rows of this chunk from the output.

    The encoder then pads shorter chunks of the call to the length of the added chunk.

    Attributes:
        frames: length of the chunk in feature frames, which is set before each call; 0: no chunk is added.

    Args:
        tower: the audio encoder, on which two forward hooks are registered.
    """

    def __init__(self, tower: torch.nn.Module) -> None:
        self.frames = 0
        self._added = 0
        tower.register_forward_pre_hook(self._before, with_kwargs=True)
        tower.register_forward_hook(self._after)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        frames, rows = kwargs["feature_lens"], kwargs["aftercnn_lens"]
        self._added = rows_of_chunk(self.frames)
        if not self._added:
            return None
        (features,) = args
        zeros = features.new_zeros(features.shape[0], self.frames)
        longer = {
            "feature_lens": torch.cat([frames, frames.new_tensor([self.frames])]),
            "aftercnn_lens": torch.cat([rows, rows.new_tensor([self._added])]),
        }
        return (torch.cat([features, zeros], dim=1),), kwargs | longer

    def _after(self, _: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output[: -self._added] if self._added else None


def correct_positions(model: Any, times: Clock) -> None:
    """Patch the M-RoPE positions of a loaded model: they equal Transformers', and adjacent blocks count as one sound.

    Args:
        model: vLLM's thinker.
        times: numbers for the positions of videos with a sound track.
    """
    compute = model.get_mrope_input_positions
    model.get_mrope_input_positions = lambda tokens, features: positions_by_time(
        compute, tokens, joined(features), times
    )


def encode_apart(runner: Any, chunk: LongestChunk) -> None:
    """Patch a runner (V1 or V2, with its model loaded) so that an encoder call has the sounds of one request only."""
    if hasattr(runner, "model_state"):
        if runner.encoder_cache is not None:  # it is None if `limit_mm_per_prompt` allows no media
            runner.model_state.execute_mm_encoder = by_request_v2(runner, chunk)
    else:
        runner._execute_mm_encoder = by_request(runner, chunk)


def by_request(runner: Any, chunk: LongestChunk) -> Callable[[Any], list[Any]]:
    """Return a replacement for a V1 runner's `_execute_mm_encoder`.

    It makes one call for each request with sound, and one call for all other requests of the step.
    """
    execute = runner._execute_mm_encoder

    def features_of(req_id: str) -> Sequence[Any]:
        return runner.requests[req_id].mm_features  # type: ignore[no-any-return]

    def execute_apart(step: Any) -> list[Any]:
        outputs: list[Any] = []
        for part in _parts(step.scheduled_encoder_inputs, features_of):
            some = copy.copy(step)
            some.scheduled_encoder_inputs = part
            chunk.frames = _lacking_chunk(part, features_of, lambda req_id: longest_chunk(features_of(req_id)))
            outputs += execute(some)
        return outputs

    return execute_apart


def by_request_v2(runner: Any, chunk: LongestChunk) -> Callable[[Due], None]:
    """Return a replacement for the `execute_mm_encoder` of Model Runner V2's model state; see `by_request`.

    The longest chunk of each request's sounds is read when the request is added: vLLM 0.33 drops the data of a sound
    that is computed, or covered by the prefix cache, before the encoder runs.
    """
    execute, cache = runner.model_state.execute_mm_encoder, runner.encoder_cache
    add, remove = cache.add_request, cache.remove_request
    longest: dict[str, int] = {}

    def add_request(req_id: str, features: Sequence[Any]) -> None:
        longest[req_id] = longest_chunk(features)
        add(req_id, features)

    def remove_request(req_id: str) -> None:
        longest.pop(req_id, None)
        remove(req_id)

    def features_of(req_id: str) -> Sequence[Any]:
        return cache.mm_features[req_id]  # type: ignore[no-any-return]

    def execute_apart(due: Due) -> None:
        for part in _parts(due, features_of):
            chunk.frames = _lacking_chunk(part, features_of, longest.__getitem__)
            execute(part)

    cache.add_request, cache.remove_request = add_request, remove_request

    return execute_apart


def _lacking_chunk(part: Due, features_of: Callable[[str], Sequence[Any]], longest_of: Callable[[str], int]) -> int:
    """Return the length of the chunk of zeros that is added to an encoder call, in feature frames; 0 for no chunk.

    A call has sounds of one request at most. If the call lacks the longest chunk of that request's sounds, the added
    chunk has the length of the longest chunk.

    Args:
        longest_of: returns the length of the longest chunk of a request's sounds.
    """
    for req_id, items in part.items():
        features = features_of(req_id)
        encoded, longest = longest_chunk(features[item] for item in items), longest_of(req_id)
        if 0 < encoded < longest:
            return longest
    return 0


def _parts(due: Due, features_of: Callable[[str], Sequence[Any]]) -> Iterator[Due]:
    """Divide the media items of a step into encoder calls.

    If several requests have sound, each of them gets a call, and the first call has all other requests. Otherwise one
    call has all items.
    """
    apart = [req_id for req_id, items in due.items() if any(is_sound(features_of(req_id)[item]) for item in items)]
    if len(apart) < 2:
        yield due
        return
    yield {req_id: items for req_id, items in due.items() if req_id not in apart}
    for req_id in apart:
        yield {req_id: due[req_id]}
