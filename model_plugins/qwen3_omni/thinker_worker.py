"""The thinker's worker: exports the layer that the talker reads, and encodes each request's sound in a separate call.

The audio encoder of Qwen3-Omni pads the last chunk of every clip to the longest chunk of the call. Biases of its
convolutions turn the padding into nonzero values. The end of a short clip would therefore depend on the other clips of
the call, by much more than rounding. Transformers encodes the clips of one prompt together; so does this worker. If
some clips or blocks of a prompt are in the encoder cache, the others are padded as in a call with all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_omni_ext.engine.worker import HiddenStatesExportWorker
from vllm_omni_ext.model_plugins.qwen3_omni.sound_blocks import (
    CHUNK_FRAMES,
    CHUNK_ROWS,
    SOUND,
    frames_of,
    joined,
)

PADDED = SOUND
"""The modality whose items the encoder pads to the longest item of a call; images and videos are not padded."""

Due = Mapping[str, list[int]]
"""By request, the indices of the items to encode, as in `SchedulerOutput.scheduled_encoder_inputs`."""


class ThinkerWorker(HiddenStatesExportWorker):
    """Exports the output of `talker_config.accept_hidden_layer` at multimodal positions."""

    def layer_to_export(self) -> int:
        return int(self.vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        model = self.model_runner.get_model()
        encode_apart(self.model_runner, WholeChunks(model.audio_tower))
        join_blocks(model)


class WholeChunks:
    """Adds a whole chunk of zeros to the next call of an encoder if `needed`, and removes its rows from the output.

    The chunks of the other clips are then padded to a whole chunk.

    Args:
        tower: the encoder; it gets two hooks.
    """

    def __init__(self, tower: torch.nn.Module) -> None:
        self.needed = False
        self._added = False
        tower.register_forward_pre_hook(self._before, with_kwargs=True)
        tower.register_forward_hook(self._after)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        frames, rows = kwargs["feature_lens"], kwargs["aftercnn_lens"]
        self._added = self.needed
        if not self._added:
            return None
        (features,) = args
        zeros = features.new_zeros(features.shape[0], CHUNK_FRAMES)
        longer = {
            "feature_lens": torch.cat([frames, frames.new_tensor([CHUNK_FRAMES])]),
            "aftercnn_lens": torch.cat([rows, rows.new_tensor([CHUNK_ROWS])]),
        }
        return (torch.cat([features, zeros], dim=1),), kwargs | longer

    def _after(self, _: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output[:-CHUNK_ROWS] if self._added else None


def join_blocks(model: Any) -> None:
    """Make a loaded model compute the M-RoPE positions of adjacent blocks as those of one sound."""
    positions = model.get_mrope_input_positions
    model.get_mrope_input_positions = lambda tokens, features: positions(tokens, joined(features))


def encode_apart(runner: Any, chunks: WholeChunks) -> None:
    """Make a runner (V1 or V2, with its model loaded) call its encoder once for each request with sound."""
    if hasattr(runner, "model_state"):
        runner.model_state.execute_mm_encoder = by_request_v2(runner, chunks)
    else:
        runner._execute_mm_encoder = by_request(runner, chunks)


def by_request(runner: Any, chunks: WholeChunks) -> Callable[[Any], list[Any]]:
    """Return a V1 runner's `_execute_mm_encoder` with a call for each request with sound, and one for all others."""
    execute = runner._execute_mm_encoder

    def features_of(req_id: str) -> Sequence[Any]:
        return runner.requests[req_id].mm_features  # type: ignore[no-any-return]

    def execute_apart(step: Any) -> list[Any]:
        outputs: list[Any] = []
        for part in _parts(step.scheduled_encoder_inputs, features_of):
            some = copy.copy(step)
            some.scheduled_encoder_inputs = part
            chunks.needed = _lacks_whole_chunk(part, features_of)
            outputs += execute(some)
        return outputs

    return execute_apart


def by_request_v2(runner: Any, chunks: WholeChunks) -> Callable[[Due], None]:
    """Return what `by_request` returns, for the `execute_mm_encoder` of Model Runner V2's model state."""
    execute = runner.model_state.execute_mm_encoder

    def features_of(req_id: str) -> Sequence[Any]:
        return runner.encoder_cache.mm_features[req_id]  # type: ignore[no-any-return]

    def execute_apart(due: Due) -> None:
        for part in _parts(due, features_of):
            chunks.needed = _lacks_whole_chunk(part, features_of)
            execute(part)

    return execute_apart


def _lacks_whole_chunk(part: Due, features_of: Callable[[str], Sequence[Any]]) -> bool:
    """Return whether a prompt with a sound in a call has one with a whole chunk, and no sound of the call has one.

    Sounds of prompts of which the call encodes images or videos only do not count.
    """

    def whole(req_id: str) -> set[int]:
        features = enumerate(features_of(req_id))
        return {item for item, each in features if _is_sound(each) and frames_of(each) >= CHUNK_FRAMES}

    with_sound = [whole(req_id) for req_id, items in part.items() if _encodes_sound(items, features_of(req_id))]
    return any(with_sound) and not any(whole(req_id) & set(items) for req_id, items in part.items())


def _encodes_sound(items: list[int], features: Sequence[Any]) -> bool:
    return any(_is_sound(features[item]) for item in items)


def _is_sound(feature: Any) -> bool:
    return feature.modality == PADDED and feature.data is not None


def _parts(due: Due, features_of: Callable[[str], Sequence[Any]]) -> Iterator[Due]:
    """Yield the items of each encoder call: one call per request with sound, if there are several such requests."""

    apart = [req_id for req_id, items in due.items() if _encodes_sound(items, features_of(req_id))]
    if len(apart) < 2:
        yield due
        return
    yield {req_id: items for req_id, items in due.items() if req_id not in apart}
    for req_id in apart:
        yield {req_id: due[req_id]}
